"""Co-location under an order that preempts jobs: running jobs share devices to free some for pending jobs.

Two running gangs are tried on the devices of one of them, and stay co-located if they do more work together than one
after the other (`planner.colocations`). The devices of the other are free for pending jobs. A job that is too slow
beside the other returns to the queue. While no job waits for devices, co-located jobs move to devices of their own, if
there are any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ganger.cluster.capacity_index import Trial
from ganger.cluster.fit import demand
from ganger.cluster.resources import accepts_type
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View

from ganger_master.core.gang_model import GangIntent
from ganger_master.core.moves import can_hand_over
from ganger_master.core.plan_changes import Goal, MoveChange, PlanChange, Purpose, TrialFinding
from ganger_master.planner.colocations import Colocations, is_settled, plan_packs, with_refusals
from ganger_master.planner.context import PlanContext, PlanOutcome
from ganger_master.planner.device_groups import as_held
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.colocation_choice import Berth
from ganger_master.policies.stages import Tune

# Intervals between two passes, as multiples of the interval between plans that preempt: during a trial, after a pass
# with changes, and after one without. By default 1, 5 and 10 minutes.
_TRIAL: Final = 0.2
_BUSY: Final = 1.0
_QUIET: Final = 2.0
# A job must have been pending for this many intervals before others are co-located for it. Most jobs start sooner.
_LONG: Final = 2.0
# Least interval between two passes.
_LEAST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class OrderColocation:
    """State from one pass to the next.

    `looked_s`: time of the last pass; `is_quiet`: it changed nothing. `halved`: numbers of the jobs whose co-locations
    have ended, and that do not have all of their cores back.
    """

    packs: Colocations = field(default_factory=Colocations)
    looked_s: float = -math.inf
    is_quiet: bool = False
    halved: tuple[int, ...] = ()

    def next_look_s(self, table: LiveTable, plan_every_s: float) -> float:
        """Return when the next pass is due; infinite if there is nothing to do.

        `plan_every_s`: least time between two plans that preempt running jobs.
        """
        if not (self.packs.packs or self.halved or table.has_waiting or table.has_sharing):
            return math.inf
        pace = _TRIAL if self.packs.is_trying else _QUIET if self.is_quiet else _BUSY
        return self.looked_s + max(_LEAST_S, pace * plan_every_s)

    def without(self, before: OrderColocation, refused: Set[int], barred: Set[int] = frozenset()) -> OrderColocation:
        """Return the state after the master has rejected changes.

        Args:
            before: State before the changes were planned.
            refused: Numbers of the jobs whose changes were rejected.
            barred: Those among them whose changes would be rejected again.
        """
        return replace(self, packs=with_refusals(before.packs, self.packs, refused, barred))


class ColocationStage:
    """The stage, with its state. It plans where no earlier stage has changes."""

    def __init__(self, packing: OrderColocation | None = None) -> None:
        self.packing = self._before = packing or OrderColocation()

    def plan(self, context: PlanContext) -> None:
        table, now, every_s = context.jobs, context.now, context.settings.pace.every_s
        self._before = self.packing
        if not context.draft.changes and now >= self.packing.next_look_s(table, every_s):
            changes, self.packing, findings = plan_packing(self.packing, context)
            context.draft = replace(context.draft, changes=changes)
            context.findings.extend(findings)
        context.come_back(max(now, self.packing.next_look_s(table, every_s)))

    def is_idle(self, context: PlanContext) -> bool:
        return context.now < self.packing.next_look_s(context.jobs, context.settings.pace.every_s)

    def settle(self, outcome: PlanOutcome) -> None:
        self.packing = self.packing.without(self._before, outcome.refused, outcome.barred)

    @property
    def on_trial(self) -> frozenset[int]:
        return self.packing.packs.on_trial

    @property
    def memory(self) -> Mapping[str, Any]:
        return {"packing": self.packing}


def plan_packing(
    packing: OrderColocation, context: PlanContext
) -> tuple[tuple[PlanChange, ...], OrderColocation, tuple[TrialFinding, ...]]:
    """Return the changes to propose now, the state if they are proposed, and the findings of trials. `packing`: the
    state of the last pass. The stage runs when the other stages have no changes."""
    table, room, now = context.jobs, context.room, context.now
    room.follow()
    pending = _PendingDemand(context)
    is_oversubscribed = pending.longest_wait_s(now) > max(_LEAST_S, _LONG * context.settings.pace.every_s)
    before = packing.packs
    changes, packs, findings = plan_packs(before, context, is_oversubscribed, False, pending.missing_devices)
    # A guest that was parked waits in the queue like other jobs, so the end of its co-location needs no follow-up.
    packs = replace(packs, parting=())
    if not (pending.jobs or changes):
        changes, packs = _separate(packs, context)
    left = {pack.numbers for pack in packs.packs}
    parted = [number for pack in before.packs if pack.numbers not in left for number in pack.numbers]
    # A tuning gives hosts their cores back.
    hosts = [] if context.policy.has(Tune) else sorted({*packing.halved, *parted})
    halved = tuple([number for number in hosts if _lacks_cores(table, room.view, number)])
    return changes, OrderColocation(packs, now, not changes, halved), findings


class _PendingDemand:
    """Pending jobs that more free devices could start, and the devices that they lack."""

    def __init__(self, context: PlanContext) -> None:
        view, excluded = context.room.view, context.excluded
        self._table, self._view = context.jobs, view
        self._missing: dict[tuple[str, int], int] = {}
        types = {made.device_type for made in view.sets.values()}
        hopeless = {*excluded.not_started, *excluded.unplaced}
        self.jobs = [
            job
            for job in context.jobs.waiting_at_most(context.capacity.gpus)
            if job.gpus and job.number not in hopeless and any(accepts_type(job.spec.device_type, one) for one in types)
        ]

    def longest_wait_s(self, now: float) -> float:
        """Return the longest time for which one of the jobs has been pending."""
        return now - min([job.pending_since for job in self.jobs], default=math.inf)

    def missing_devices(self, guest: Berth) -> float:
        """Return the devices of the guest's type that jobs of at least its priority lack.

        Free devices are subtracted: too few for a pending job now, they may suffice once more are free.
        """
        found = self._table.get(guest.residents[0].number)
        key = guest.device_type, found[0].spec.priority if found is not None else 0
        if key not in self._missing:
            self._missing[key] = self._count_missing(*key)
        return self._missing[key]

    def _count_missing(self, device_type: str, least_priority: int) -> int:
        requested = [
            job.gpus
            for job in self.jobs
            if job.spec.priority >= least_priority and accepts_type(job.spec.device_type, device_type)
        ]
        return sum(requested) - self._free(device_type)

    def _free(self, device_type: str) -> int:
        view = self._view
        return sum(
            [
                free.bit_count()
                for free, topology, available in zip(view.free, view.topologies, view.available, strict=True)
                if available and free and topology.configuration_set.device_type == device_type
            ]
        )


def _lacks_cores(table: LiveTable, view: View, number: int) -> bool:
    """Whether a running job has fewer cores than its shape demands."""
    job, gang = table.get(number) or (None, None)
    if job is None or gang is None or gang.intent is not GangIntent.RUN:
        return False
    wanted = [
        (claim, demand(view.topology(claim.node).configuration_set, job.shape, claim.tasks).millicores)
        for claim in gang.claims
        if claim.node in view
    ]
    return any(sum(claim.millicores) < millicores for claim, millicores in wanted)


def _separate(packs: Colocations, context: PlanContext) -> tuple[tuple[PlanChange, ...], Colocations]:
    """Move guests to devices of their own, as far as there are free ones."""
    table, room = context.jobs, context.room
    room.follow()
    trying = Trial(room)
    changes, left = [], []
    for pack in packs.packs:
        job, gang = table.get(pack.guest) or (None, None)
        claims = None
        if pack.is_kept and job is not None and gang is not None and is_settled(job, gang) and can_hand_over(job):
            claims = context.policy.placement.place(room, PlacementRequest(as_held(job.shape, gang), math.inf))
        if job is None or claims is None:
            left.append(pack)
            continue
        trying.take(claims)
        changes.append(MoveChange(job.number, job.revision, claims, purpose=_ROOM_AGAIN))
    trying.undo()
    return tuple(changes), replace(packs, packs=tuple(left))


_ROOM_AGAIN: Final = Purpose(Goal.UNPACK, detail="no job waits for the devices that it goes to")
