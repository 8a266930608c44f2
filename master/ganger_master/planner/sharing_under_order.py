"""Sharing of devices under an order that preempts jobs: co-location of running jobs, which frees devices for pending
jobs, and first time slices of new jobs.

A job that is too slow beside the other returns to the queue. When the queue is empty, co-located jobs migrate to
devices of their own. A newcomer that has waited for a quantum joins running jobs in time slices (Gandiva, OSDI 2018,
section 3.1); after two slices of its own it is suspended, and waits in the queue like any preempted job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ganger.cluster.capacity_index import Trial
from ganger.cluster.fit import demand
from ganger.cluster.resources import accepts_type
from ganger.cluster.search import PlacementRequest
from ganger.cluster.topology import Topology
from ganger.cluster.view import View
from msgspec.structs import replace as replace_of

from ganger_master.core.gang_model import Gang, GangIntent
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, MoveChange, PlanChange, Purpose, SuspendChange, TrialFinding
from ganger_master.planner.colocations import Colocations, is_settled, plan_colocations, with_refusals
from ganger_master.planner.context import PlanContext, PlanOutcome, PlanStage
from ganger_master.planner.device_groups import as_held, devices_of
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.matrices import SliceMatrices, SliceQuantum, least_memory
from ganger_master.policies import Tune
from ganger_master.policies.trials import Berth

# Intervals between two passes, as multiples of the interval between plans that preempt: during a trial, after a pass
# with changes, and after one without. By default 1, 5 and 10 minutes.
_TRIAL: Final = 0.2
_BUSY: Final = 1.0
_QUIET: Final = 2.0
# A job must have been pending for this many intervals before others are co-located for it. Most jobs start sooner.
_LONG: Final = 2.0
_ROOM_AGAIN: Final = Purpose(Goal.UNPACK, detail="no job waits for the devices that it goes to")
# Least interval between two passes.
_LEAST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class OrderColocation:
    """State from one pass to the next. `last_pass_s`: time of the last pass; `is_quiet`: it changed nothing. `halved`:
    numbers of the jobs whose co-locations have ended, and that do not have all of their cores back."""

    colocations: Colocations = field(default_factory=Colocations)
    last_pass_s: float = -math.inf
    is_quiet: bool = False
    halved: tuple[int, ...] = ()

    def next_pass_s(self, table: LiveTable, plan_every_s: float) -> float:
        """Return when the next pass is due, or infinity. `plan_every_s`: least time between plans that preempt."""
        if not (self.colocations.present or self.halved or table.has_waiting or table.has_sharing):
            return math.inf
        pace = _TRIAL if self.colocations.is_trying else _QUIET if self.is_quiet else _BUSY
        return self.last_pass_s + max(_LEAST_S, pace * plan_every_s)


class ColocationStage(PlanStage):
    """The co-location stage of a plan. It proposes changes only if earlier stages propose none."""

    def __init__(self, packing: OrderColocation | None) -> None:
        self.packing = self._before = packing or OrderColocation()

    def plan(self, context: PlanContext) -> None:
        table, now, every_s = context.jobs, context.now, context.settings.pace.every_s
        self._before = self.packing
        if not context.draft.changes and now >= self.packing.next_pass_s(table, every_s):
            changes, self.packing, findings = plan_under_order(self.packing, context)
            context.draft = replace(context.draft, changes=changes)
            context.findings.extend(findings)
        context.come_back(max(now, self.packing.next_pass_s(table, every_s)))

    def is_idle(self, context: PlanContext) -> bool:
        return context.now < self.packing.next_pass_s(context.jobs, context.settings.pace.every_s)

    def settle(self, outcome: PlanOutcome) -> None:
        if not outcome.refusals:
            return
        colocations = with_refusals(self._before.colocations, self.packing.colocations, outcome.refused, outcome.barred)
        self.packing = replace(self.packing, colocations=colocations)

    @property
    def on_trial(self) -> frozenset[int]:
        return self.packing.colocations.on_trial

    @property
    def memory(self) -> Mapping[str, Any]:
        return {"packing": self.packing}


def plan_under_order(
    packing: OrderColocation, context: PlanContext
) -> tuple[tuple[PlanChange, ...], OrderColocation, tuple[TrialFinding, ...]]:
    """Return the changes to propose now, the state if they are proposed, and the findings of trials. `packing`: the
    state of the last pass. The stage runs when the other stages have no changes."""
    table, room, now = context.jobs, context.room, context.now
    room.follow()
    pending = _PendingDemand(context)
    is_oversubscribed = pending.longest_wait_s(now) > max(_LEAST_S, _LONG * context.settings.pace.every_s)
    before = packing.colocations
    changes, colocations, findings = plan_colocations(
        before, context, is_oversubscribed, False, pending.missing_devices
    )
    # A guest that was parked waits in the queue like other jobs, so the end of its co-location needs no follow-up.
    colocations = replace(colocations, parting=())
    if not (pending.jobs or changes):
        changes, colocations = _separate(colocations, context)
    left = {colocation.numbers for colocation in colocations.present}
    parted = [
        number for colocation in before.present if colocation.numbers not in left for number in colocation.numbers
    ]
    # With a tuning, `tune_stage` returns cores to hosts.
    hosts = [] if context.policy.has(Tune) else sorted({*packing.halved, *parted})
    halved = tuple([number for number in hosts if _lacks_cores(table, room.view, number)])
    return changes, OrderColocation(colocations, now, not changes, halved), findings


class _PendingDemand:
    """Pending jobs that more free devices could start, and the devices that they lack."""

    def __init__(self, context: PlanContext) -> None:
        view, excluded = context.room.view, context.excluded
        self._table, self._view = context.jobs, view
        self._missing: dict[tuple[Topology, int, str], int] = {}
        types = {made.device_type for made in view.sets.values()}
        hopeless = {*excluded.not_started, *excluded.unplaced}
        self.jobs = [
            job
            for job in context.jobs.waiting_at_most(context.capacity.gpus)
            if job.gpus and job.number not in hopeless and any(accepts_type(job.spec.device_type, one) for one in types)
        ]
        self._closed = frozenset[str]().union(*[job.closed_nodes for job in self.jobs])

    def longest_wait_s(self, now: float) -> float:
        """Return the longest time for which one of the jobs has been pending."""
        return now - min([job.pending_since for job in self.jobs], default=math.inf)

    def missing_devices(self, guest: Berth) -> float:
        """Return the devices of the guest's type and partitions that jobs of at least its priority lack. Free devices
        count, since they may suffice together with those that the guest frees."""
        found, node = self._table.get(guest.residents[0].number), guest.seat[0][0]
        named = node if node in self._closed else ""
        key = self._view.topology(node), found[0].priority if found is not None else 0, named
        if key not in self._missing:
            self._missing[key] = self._count_missing(*key)
        return self._missing[key]

    def _count_missing(self, like: Topology, least_priority: int, node: str) -> int:
        view, device_type = self._view, like.configuration_set.device_type
        requested = [
            job.gpus
            for job in self.jobs
            if job.priority >= least_priority and like.accepts(job.spec.device_type, job.partition.name)
            if node not in job.closed_nodes
        ]
        free = [
            mask.bit_count()
            for mask, topology, available in zip(view.free, view.topologies, view.available, strict=True)
            if available and mask and topology.configuration_set.device_type == device_type
            if topology.partitions == like.partitions
        ]
        return sum(requested) - sum(free)


def _lacks_cores(table: LiveTable, view: View, number: int) -> bool:
    found = table.pair(number)
    if found is None or found[1].intent is not GangIntent.RUN:
        return False
    job, gang = found
    wanted = [
        (claim, demand(view.topology(claim.node).configuration_set, job.shape, claim.tasks).millicores)
        for claim in gang.claims
        if claim.node in view
    ]
    return any(sum(claim.millicores) < millicores for claim, millicores in wanted)


def _separate(colocations: Colocations, context: PlanContext) -> tuple[tuple[PlanChange, ...], Colocations]:
    table, room = context.jobs, context.room
    room.follow()
    trying = Trial(room)
    changes, left = [], []
    for colocation in colocations.present:
        found, claims = table.pair(colocation.guest), None
        if colocation.is_kept and found is not None and is_settled(*found) and found[0].capabilities.can_hand_over:
            shape = as_held(found[0].shape, found[1])
            claims = context.policy.placement.place(room, PlacementRequest(shape, math.inf))
        if found is None or claims is None:
            left.append(colocation)
            continue
        trying.take(claims)
        changes.append(MoveChange(colocation.guest, found[0].revision, claims, purpose=_ROOM_AGAIN))
    trying.undo()
    return tuple(changes), replace(colocations, present=tuple(left))


# Most gangs on one device, so that a running job keeps half of its time.
_MOST_SLICES: Final = 2
# For how many quanta a newcomer runs in slices: it has two of its own, and its host as many.
_STAY_QUANTA: Final = 4
# Most searches for places in a quantum.
_SEARCHES: Final = 4


@dataclass(frozen=True, slots=True)
class _Guest:
    job: JobRecord
    gang: Gang
    beside: tuple[tuple[JobRecord, Gang], ...]

    def leaves_s(self, quantum_s: float) -> float:
        """Return when it has used its time slices, in Unix seconds; infinite while it starts or stops."""
        if not is_settled(self.job, self.gang):
            return math.inf
        return max(self.gang.create_time, self.job.start_time) + _STAY_QUANTA * quantum_s


class NewcomerStage(PlanStage):
    """The stage of first time slices. It proposes changes only if earlier stages propose none."""

    def __init__(self) -> None:
        self._quantum = SliceQuantum()
        # When places were searched last without success, and when the plan that it requested is due.
        self._searched_s, self._again_s = -math.inf, math.inf

    def plan(self, context: PlanContext) -> None:
        quantum_s = self._quantum.at(context.cluster.quantum_s, context.now)
        if quantum_s is None:
            return
        if not context.draft.changes and not context.is_giving:
            changes = _leaving(context, quantum_s) or self._joining(context, quantum_s)
            if changes:
                context.draft = replace(context.draft, changes=tuple(changes))
        self._again_s = max(self._due_s(context.jobs, quantum_s), context.now + quantum_s / _SEARCHES)
        context.come_back(self._again_s)

    def _joining(self, context: PlanContext, quantum_s: float) -> list[PlanChange]:
        table, now = context.jobs, context.now
        if now < self._searched_s + quantum_s / _SEARCHES:
            return []
        positions, since_s = table.newcomers
        barred = {*context.excluded.not_started, *context.migrating}
        newcomers = [job for job in table.jobs_at(positions[since_s + quantum_s <= now]) if job.number not in barred]
        if not newcomers:
            return []
        newcomers.sort(key=lambda job: (-job.priority, job.number))
        view, running = context.room.view, table.running
        # A job that has just started has its first slice to itself.
        new = [job.number for job, gang in running if now < gang.create_time + quantum_s]
        apart = frozenset([*context.excluded.not_stopped, *context.on_trial, *context.migrating, *new])
        # The matrix of a group names all of its jobs, also those that take no newcomer.
        excluded = replace_of(context.excluded, not_stopped=apart)
        # Free devices stay with the order, which may reserve them for a larger gang.
        joining = SliceMatrices(
            view, running, excluded, least_memory(view), Counter(), most_rows=_MOST_SLICES, takes_free=False
        )
        joining.join([(job, None) for job in newcomers])
        changes = joining.changes(quantum_s, context.cluster.changing)
        self._searched_s = -math.inf if changes else now
        return changes

    def _due_s(self, table: LiveTable, quantum_s: float) -> float:
        """Return when the next newcomer has waited for a quantum or has used its time slices, in Unix seconds."""
        leaving = [guest.leaves_s(quantum_s) for guest in _guests(table)]
        _, since_s = table.newcomers
        return min([float(since_s.min(initial=math.inf)) + quantum_s, *leaving])

    def is_idle(self, context: PlanContext) -> bool:
        quantum_s = self._quantum.at(context.cluster.quantum_s, context.now)
        if quantum_s is None:
            return True
        due_s = self._due_s(context.jobs, quantum_s)
        return due_s == math.inf or context.now < self._again_s <= max(due_s, self._searched_s + quantum_s / _SEARCHES)

    def settle(self, outcome: PlanOutcome) -> None:
        self._quantum.settle(outcome)


def _guests(table: LiveTable) -> list[_Guest]:
    if not table.has_sharing:
        return []
    found = []
    for numbers in dict.fromkeys(table.groups.co_located.values()):
        known = [one for number in numbers if (one := table.get(number)) is not None]
        pairs = [(job, gang) for job, gang in known if gang is not None and gang.node_set]
        pairs.sort(key=lambda pair: (pair[1].create_time, pair[0].number))
        devices = [devices_of([gang]) for _, gang in pairs]
        for at, (job, gang) in enumerate(pairs):
            beside = [other for other in range(len(pairs)) if other != at and devices[at] & devices[other]]
            if beside and beside[0] < at:
                found.append(_Guest(job, gang, tuple([pairs[other] for other in beside])))
    return sorted(found, key=lambda guest: guest.job.number)


def _leaving(context: PlanContext, quantum_s: float) -> list[PlanChange]:
    """Return the suspensions of newcomers that have used their slices, or else of jobs on their devices."""
    changes = dict[int, PlanChange]()
    for guest in _guests(context.jobs):
        if context.now < guest.leaves_s(quantum_s):
            continue
        for going in (((guest.job, guest.gang),), guest.beside):
            if all(_may_leave(context, *pair) for pair in going):
                changes.update({one.number: _suspension(one) for one, _ in going})
                break
    return list(changes.values())


def _may_leave(context: PlanContext, job: JobRecord, gang: Gang) -> bool:
    if gang.node_set in context.cluster.changing or job.number in context.excluded.not_stopped:
        return False
    can = job.preemptible and job.capabilities.checkpoint
    return can and is_settled(job, gang) and gang.intent is GangIntent.RUN


def _suspension(job: JobRecord) -> PlanChange:
    purpose = Purpose(Goal.UNPACK, detail="its first time slices are over")
    return SuspendChange(job.number, job.revision, level=SuspendLevel.CHECKPOINT, purpose=purpose)
