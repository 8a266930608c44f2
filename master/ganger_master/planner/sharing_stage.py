"""The whole pass of `gandiva`: trials of co-locations at the end of a quantum, and time slicing.

A time-sliced gang can neither be moved nor given other cores. So the guest of a co-location is first parked in host
memory, which takes it out of its group, and resumes beside its host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.resources import Claim
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import View
from ganger.job_state import JobState
from msgspec.structs import replace as replace_of

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import (
    Goal,
    MoveChange,
    PlanChange,
    Purpose,
    ResumeChange,
    StartChange,
    TrialFinding,
)
from ganger_master.planner.colocations import (
    Colocation,
    Colocations,
    is_resting,
    is_settled,
    move_in,
    parking,
    plan_colocations,
    whole_again,
    with_refusals,
)
from ganger_master.planner.context import PlanContext, PlanDraft, PlanOutcome, PlanStage
from ganger_master.planner.device_groups import Claims, Holder, is_free, thin
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.matrices import SliceMatrices, SliceQuantum, least_memory
from ganger_master.planner.migration_plans import LONGEST_S, MigrationPlan, hold
from ganger_master.planner.timeslice_shares import NOTHING as NOTHING_OWED
from ganger_master.planner.timeslice_shares import Fairness, SlicedJob, can_go, credited, make_room, moved, stayed
from ganger_master.policies.fairness import QUANTUM_S
from ganger_master.policies.orders import ranked
from ganger_master.policies.placements import PlacementPreference

if TYPE_CHECKING:
    from ganger_master.planner.migrate_stage import MigrationStage

# Longer than any boundary and any copy: a job that is not there by then stays time-sliced.
_LONGEST_S: Final = 120.0


def follow(colocations: Colocations, context: PlanContext) -> tuple[tuple[PlanChange, ...], Colocations]:
    """Return the changes to propose now, and the state if they are proposed."""
    table, view, now, changing = context.jobs, context.room.view, context.now, context.cluster.changing
    # A host that has left a group is in its active matrix until all nodes have acknowledged the next one.
    rotating = {node for _, gang in table.running if gang.node_set in changing for node in gang.nodes}
    changes: list[PlanChange] = []
    leaving: list[Colocation] = []
    begun: list[Colocation] = []
    failed = colocations.failed
    for one in colocations.leaving:
        host, guest = _of(table, one.host), _of(table, one.guest)
        if host is None or guest is None:
            # It has ended, or was stopped by another change.
            continue
        if now > one.since_s + _LONGEST_S:
            failed = failed.noted(one.proposal.pair, now)
            continue
        if not (is_resting(*guest) and is_settled(*host) and not host[1].node_set):
            leaving.append(one)
            changes.extend(_next(host, guest, view))
        elif not rotating.isdisjoint(host[1].nodes):
            leaving.append(one)
        elif arrival := move_in(one.proposal, host, guest, view):
            changes.extend(arrival)
            begun.append(Colocation(one.proposal, now))
        else:
            failed = failed.noted(one.proposal.pair, now)
    parting = []
    for going in colocations.parting:
        host, guest = _of(table, going.host), _of(table, going.guest)
        if guest is not None and not is_resting(*guest) and now <= going.since_s + _LONGEST_S:
            parting.append(going)
        elif host is not None:
            changes.extend(whole_again({going.host: host}, (), view, context.job_rates))
    followed = replace(
        colocations, present=(*colocations.present, *begun), leaving=tuple(leaving), parting=tuple(parting)
    )
    return tuple(changes), replace(followed, failed=failed)


def _of(table: LiveTable, number: int) -> Holder | None:
    pair = table.pair(number)
    is_held = pair is not None and pair[0].state is JobState.HOLDING and pair[0].ending is None
    return pair if is_held else None


def _next(host: Holder, guest: Holder, view: View) -> Sequence[PlanChange]:
    leaves, other = (host, guest) if is_resting(*guest) else (guest, host)
    if is_settled(*leaves) and leaves[1].intent is GangIntent.RUN and (leaves is guest or host[1].node_set):
        detail = f"out of its turns, to be tried with {other[0].name} on its devices"
        return [parking(*leaves, Purpose(Goal.PACK, detail=detail))]
    # Another job may have come to its devices meanwhile.
    if leaves is host and is_resting(*host) and is_free(view, host[1].lacking_claims):
        return [ResumeChange(host[0].number, host[0].revision, purpose=Purpose(Goal.PACK))]
    return []


@dataclass(frozen=True, slots=True)
class Shared:
    """The state between two passes. `looked_s`: when trials of co-locations were last judged."""

    looked_s: float = -math.inf
    colocations: Colocations = field(default_factory=Colocations)
    fairness: Fairness = NOTHING_OWED

    def without(self, before: Shared, refused: Set[int]) -> Shared:
        """Return the state after changes of these jobs were refused. `before`: the state before they were planned."""
        colocations = with_refusals(before.colocations, self.colocations, refused)
        return replace(self, colocations=colocations, fairness=stayed(self.fairness, before.fairness, refused))


NOTHING: Final = Shared()
_GOING: Final = (Goal.FAIRNESS, Goal.DRAIN)
# Pending jobs that one pass considers.
_WAITING_MOST: Final = 2_000


class SharingStage(PlanStage):
    """The stage, with its state. `migrations`: the stage whose migration plans keep their places and jobs."""

    def __init__(self, migrations: MigrationStage | None, shared: Shared | None) -> None:
        self._migrations = migrations
        self.shared = self._before = shared or NOTHING
        self._quantum = SliceQuantum()

    def plan(self, context: PlanContext) -> None:
        self._before = self.shared
        if context.is_giving:
            # Shrinking jobs are about to free devices for pending jobs.
            context.add(PlanDraft(line=np.array(context.last_line, np.int64)))
            return
        quantum_s = self._quantum.at(context.cluster.quantum_s, context.now)
        plans = self._migrations.moving.plans if self._migrations is not None else ()
        found, self.shared, findings = plan_shared(context, self.shared, quantum_s, plans)
        context.add(found)
        context.come_back(found.next_change_s)
        context.findings.extend(findings)

    def settle(self, outcome: PlanOutcome) -> None:
        self.shared = self.shared.without(self._before, outcome.refused)
        self._quantum.settle(outcome)

    @property
    def on_trial(self) -> frozenset[int]:
        return self.shared.colocations.on_trial

    @property
    def memory(self) -> Mapping[str, Any]:
        return {"shared": self.shared}


def plan_shared(
    context: PlanContext, remembered: Shared, quantum_s: float | None, migrations: Sequence[MigrationPlan] = ()
) -> tuple[PlanDraft, Shared, tuple[TrialFinding, ...]]:
    """Return the changes to propose now, the state if they are proposed, and the findings of trials.

    quantum_s: seconds of a time slice; None: no time slicing.
    migrations: migration plans under way: their places are kept, and their jobs left as they are.
    """
    table, now, room, settings = context.jobs, context.now, context.room, context.settings
    if table.quotas is not None and table.quotas.are_contested:
        excluded = context.excluded.resting(table.quotas.beyond(table.waiting_jobs(len(table))))
        context = replace_of(context, excluded=excluded)
    look_s = settings.look_s or min(QUANTUM_S, settings.pace.every_s)
    is_due = now >= remembered.looked_s + look_s
    looked_s, colocations, fairness = (
        now if is_due else remembered.looked_s,
        remembered.colocations,
        remembered.fairness,
    )
    tried: tuple[PlanChange, ...] = ()
    findings: tuple[TrialFinding, ...] = ()
    if is_due:
        tried, colocations, findings = plan_colocations(colocations, context, table.has_waiting or _take_turns(table))
    followed, colocations = follow(colocations, context)
    # A plan that has timed out keeps no places.
    migrations = [plan for plan in migrations if now < plan.began_s + LONGEST_S]
    busy = colocations.on_trial.union([change.number for change in (*tried, *followed)], *colocations.groups)
    busy = busy.union(*[plan.numbers for plan in migrations])
    room.follow()
    trying = Trial(room)
    hold(migrations, table, trying)
    if quantum_s is not None:
        _, facts = table.facts(now)
        weights = dict(zip(facts.number.tolist(), facts.weight.tolist(), strict=True))
        received_s = context.job_rates.received_s
        fairness = credited(fairness, table.running, weights, received_s, room.view, now, quantum_s)
    for change in followed:
        pair = _of(table, change.number) if isinstance(change, ResumeChange) else None
        if pair is not None and is_free(room.view, pair[1].lacking_claims):
            trying.take(pair[1].lacking_claims)
    found = plan_matrices(context, quantum_s, busy, fairness)
    fairness = moved(fairness, [change for change in found.changes if change.purpose.goal in _GOING], now)
    trying.undo()
    # Co-locations are watched as long as they last, and time-sliced jobs are measured meanwhile.
    is_watching = bool(colocations.present) or _take_turns(table)
    next_s = min(found.next_change_s, looked_s + look_s) if is_watching else found.next_change_s
    draft = replace(found, changes=(*tried, *followed, *found.changes), next_change_s=max(next_s, now + 1.0))
    return draft, Shared(looked_s, colocations, fairness), findings


def _take_turns(table: LiveTable) -> bool:
    return any(gang is not None and gang.node_set for gang in table.gangs)


# -- time slices -----------------------------------------------------------------------------------------------------


def plan_matrices(
    context: PlanContext, quantum_s: float | None, busy: Collection[int] = (), fairness: Fairness = NOTHING_OWED
) -> PlanDraft:
    """Return the changes to propose now.

    quantum_s: seconds of a time slice; None: no time slicing.
    busy: numbers of jobs that this pass leaves as they are.
    """
    table, now, room, excluded = context.jobs, context.now, context.room, context.excluded
    room.follow()
    filling = _Filling(context.policy.placement, room)
    waiting = _waiting(context)
    parked = [pair for pair in table.offloaded if pair[0].number not in busy]
    running = [pair for pair in table.running if pair[0].number not in busy]
    stranded = filling.bring_back(parked)
    joining = SliceMatrices(room.view, running, excluded, filling.least_memory, filling.kept_memory)
    unserved = filling.start(waiting, joining.may_go_on if quantum_s is not None else None)
    changes = filling.changes
    if quantum_s is not None:
        joining.join((*stranded, *unserved))
        if not (unserved or parked):
            filling.part(joining.sharers)
        joining.leave(context.cluster.draining, fairness)
        # Pending jobs that can join no group do not prevent rebalancing of the existing groups.
        if not (changes or joining.has_news):
            joining.balance(fairness, running, now, quantum_s)
        changes = [*changes, *joining.changes(quantum_s, context.cluster.changing)]
        spared = {*busy, *excluded.not_stopped, *[change.number for change in changes]}
        changes += make_room(joining.shortages, table.running, table.going, spared)
    filling.trial.undo()
    line = np.array([job.number for job, _ in waiting], np.int64)
    shares = quantum_s is not None and any(gang.node_set for _, gang in running)
    # The next pass compares what the time-sliced jobs have received.
    next_s = now + quantum_s if quantum_s is not None and shares else math.inf
    return PlanDraft(tuple(changes), waits=bool(unserved or stranded), line=line, next_change_s=next_s)


def _waiting(context: PlanContext) -> list[tuple[JobRecord, Gang | None]]:
    """Return the first pending jobs, each with the gang in which a user's suspend parked it in host memory, if any."""
    table, excluded = context.jobs, context.excluded
    found: list[tuple[JobRecord, Gang | None]] = []
    for job in table.queue() if table.teams is None else _by_teams(context):
        if len(found) == _WAITING_MOST:
            break
        if job.number not in excluded.not_started:
            known = table.get(job.number) if job.epoch else None
            gang = None if known is None else known[1]
            rests = gang is not None and gang.phase is GangPhase.PARKED and gang.park_level is SuspendLevel.OFFLOAD
            found.append((job, gang if rests else None))
    return found


def _by_teams(context: PlanContext) -> list[JobRecord]:
    """Return the pending jobs in the order of the policy, with the precedence of teams."""
    table = context.jobs
    rows, facts = table.facts(context.now)
    line = ranked(context.order, facts, context.now, context.capacity)
    return table.jobs_at(rows[line[table.is_waiting(rows)[line]]])


class _Filling:
    """Starts and resumes jobs where they fit. Takes their places in the capacity index."""

    def __init__(self, placement: PlacementPreference, room: CapacityIndex) -> None:
        self._placement, self._room = placement, room
        self.changes: list[PlanChange] = []
        self.trial = Trial(room)
        self.least_memory = least_memory(room.view)
        # Host memory in bytes, by node, that is kept for jobs that rest there.
        self.kept_memory: Counter[str] = Counter()

    def start(
        self, pairs: Iterable[tuple[JobRecord, Gang | None]], may_go_on: Callable[[JobRecord, Gang], bool] | None
    ) -> list[tuple[JobRecord, Gang | None]]:
        """Start the jobs that fit, a parked one in place if it can. Return the others. `may_go_on`: whether a parked
        job could be time-sliced where it is; the memory that it lacks is then kept from the jobs after it. None: no
        time slicing."""
        unserved, vain = [], set()
        for job, gang in pairs:
            is_open = gang is not None and job.closed_nodes.isdisjoint(gang.nodes)
            if gang is not None and is_open and is_free(self._room.view, gang.lacking_claims):
                self._change(StartChange(job.number, job.revision, gang.claims), gang.lacking_claims)
                continue
            shape = thin(job.shape, self.least_memory)
            is_bound = gang is not None and not job.capabilities.can_hand_over
            claims = None if shape in vain or is_bound else self._placement.place(self._room, PlacementRequest(shape))
            if claims is None:
                if not is_bound:
                    vain.add(shape)
                unserved.append((job, gang))
                if gang is not None and may_go_on is not None and may_go_on(job, gang):
                    self._keep_memory(gang.lacking_claims)
            else:
                self._change(StartChange(job.number, job.revision, claims), claims)
        return unserved

    def _keep_memory(self, lacking: Claims) -> None:
        view = self._room.view
        for claim in lacking:
            slot = view.slots[claim.node]
            memory = max(0, min(claim.memory_bytes, int(view.memory[slot])))
            kept = (Claim(claim.node, 0, (0,) * len(view.millicores[slot]), memory),)
            self.trial.take(kept)
            self.kept_memory[claim.node] += memory

    def bring_back(self, parked: Iterable[tuple[JobRecord, Gang]]) -> list[tuple[JobRecord, Gang]]:
        """Resume parked jobs in place, or move them to where they fit. Return the others."""
        stranded = []
        view = self._room.view
        for job, gang in parked:
            own = gang.lacking_claims
            if is_free(view, own):
                self._change(ResumeChange(job.number, job.revision), own)
                continue
            shape = thin(job.shape, self.least_memory)
            claims = (
                self._placement.place(self._room, PlacementRequest(shape)) if job.capabilities.can_hand_over else None
            )
            if claims is None:
                stranded.append((job, gang))
            else:
                self._change(MoveChange(job.number, job.revision, claims), claims)
        return stranded

    def part(self, sharers: Mapping[int, SlicedJob]) -> None:
        """Move one gang out of its time-slice group if it fits on free devices."""
        staying = [one for one in sharers.values() if one.gang is not None and one.gang.phase is not GangPhase.MOVING]
        crowds = Counter(device for one in staying for device in one.devices)
        for one in staying:
            is_crowded = any(crowds[device] > 1 for device in one.devices)
            if one.gang is None or not one.gang.node_set or not is_crowded or not can_go(one.job, one.gang):
                continue
            claims = self._placement.place(self._room, PlacementRequest(thin(one.job.shape, self.least_memory)))
            if claims is not None:
                purpose = Purpose(Goal.FAIRNESS, detail="devices are free")
                self._change(MoveChange(one.number, one.job.revision, claims, purpose=purpose), claims)
                return

    def _change(self, change: PlanChange, taken: Claims) -> None:
        self.changes.append(change)
        self.trial.take(taken)
