"""The migration pass, around another pass that starts and preempts jobs.

Its goals in order: make room for a gang that fits nowhere though enough devices are free (`make_room`); move gangs off
draining nodes and resume gangs that a plan has parked; when no job waits, opportunistic migrations
(`opportunistic_migration`). Meanwhile it judges earlier migrations (`migration_outcomes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import LoadMode
from msgspec.structs import replace as replace_of

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.moves import can_hand_over
from ganger_master.core.plan_changes import (
    Goal,
    MoveChange,
    Purpose,
    ResumeChange,
    StartChange,
    SuspendChange,
    TrialFinding,
)
from ganger_master.planner.context import PlanContext, PlanDraft, PlanOutcome
from ganger_master.planner.job_table import LiveTable, shares_devices
from ganger_master.planner.make_room import MakeRoomSearch
from ganger_master.planner.migration_context import MOST_AT_ONCE, MigrationContext, MigrationMemory, MigrationTerms
from ganger_master.planner.migration_outcomes import MigrationOutcomes
from ganger_master.planner.migration_plans import MigrationPlan, carry_on, is_free, keep
from ganger_master.planner.opportunistic_migration import CLOSER_S, HOUR_S, OpportunisticMigration
from ganger_master.planner.refusal_backoff import NONE_EXCLUDED, ExcludedJobs
from ganger_master.policies.make_room import Hole
from ganger_master.policies.migration_choice import drained

if TYPE_CHECKING:
    from ganger_master.planner.order_stage import OrderStage

_ON_THE_WAY: Final = (GangPhase.MOVING, GangPhase.RESIZING)


def drain(acting: MigrationContext, node: str) -> None:
    """Move gangs off a draining node, also into room that other gangs make. Gangs that fit nowhere are parked on
    storage."""
    busy = acting.busy
    gangs = [one for number, (_, _, one) in acting.gangs.items() if number not in busy]
    proposals, stuck = drained(acting.room, node, gangs, acting.others(busy), acting.terms.placement)
    for proposal in proposals:
        if acting.under_way + len(proposal.moves) > MOST_AT_ONCE or acting.busy & {m.number for m in proposal.moves}:
            break
        acting.begin(Goal.DRAIN, Hole((), proposal.moves))
    if not acting.errands and not _is_any_job_moving(acting.table):
        # A job on its way could still leave room.
        for job in (*[acting.gangs[number][0] for number in stuck], *_sharing(acting, node)):
            if job.capabilities.checkpoint:
                level, purpose = SuspendLevel.CHECKPOINT, Purpose(Goal.DRAIN)
                acting.changes.append(SuspendChange(job.number, job.revision, level=level, purpose=purpose))


def _is_any_job_moving(table: LiveTable) -> bool:
    """Return whether any job is changing its place; also one that hands over its state now."""
    gangs = zip(table.jobs, table.gangs, strict=True)
    return any((job and job.next_epoch) or (gang and gang.phase in _ON_THE_WAY) for job, gang in gangs)


def _sharing(acting: MigrationContext, node: str) -> list[JobRecord]:
    """Return the jobs that share devices on a node, at once or in time slices. The master has moved those for which
    devices are free, and time slicing has moved those that can be time-sliced elsewhere. Once all jobs that share
    devices run, no other job makes room for them."""
    sharing = [(job, gang) for job, gang in acting.running if shares_devices(gang)]
    if any(gang.phase is not GangPhase.RUNNING for _, gang in sharing):
        return []
    return [
        job
        for job, gang in sharing
        if any(claim.node == node for claim in gang.claims)
        and gang.intent is GangIntent.RUN
        and job.ending is None
        and job.spec.preemptible
        and job.number not in acting.busy | acting.terms.on_trial
    ]


def parked(acting: MigrationContext) -> list[tuple[JobRecord, Gang]]:
    """Return the jobs that a plan has parked in host memory, without those of migration plans, first job first."""
    busy = acting.busy
    found = [
        (job, gang)
        for job, gang in acting.table.parked
        if job.number not in busy and gang.park_level is SuspendLevel.OFFLOAD and job.ending is None
    ]
    return sorted(found, key=lambda one: (-one[0].spec.priority, one[0].number))


def bring_back(acting: MigrationContext, pairs: Sequence[tuple[JobRecord, Gang]]) -> None:
    """Resume parked jobs in place if it is free, else move them out of host memory to free devices."""
    for job, gang in pairs:
        purpose = Purpose(Goal.RETURN, pause_seconds=acting.costs.pause_s(job, gang))
        own = tuple([replace_of(claim, memory_bytes=0, arena_bytes=0) for claim in gang.claims])
        if is_free(acting.room.view, own):
            acting.changes.append(ResumeChange(job.number, job.revision, purpose=purpose))
            acting.trying.take(own)
            continue
        claims = (
            acting.terms.placement.place(acting.room, PlacementRequest(job.shape, math.inf))
            if can_hand_over(job)
            else None
        )
        if claims is not None:
            acting.changes.append(MoveChange(job.number, job.revision, claims, purpose=purpose))
            acting.trying.take(claims)


Inner = Callable[[ExcludedJobs, bool], PlanDraft]


class MigrationStage:
    """The stage, with its state, around the stage that starts and preempts jobs; `around` None: beside stages that
    share devices, where it plans only if these have no change."""

    def __init__(self, around: OrderStage | None, moving: MigrationMemory | None = None) -> None:
        self._around = around
        self.moving = moving or MigrationMemory()

    def plan(self, context: PlanContext) -> None:
        context.reservations = self.moving.promises
        if self._around is None and (context.draft.changes or context.findings):
            return
        excluded = context.excluded if self._around is not None else NONE_EXCLUDED
        found, self.moving, findings, again_s = plan_moves(
            lambda kept_out, may_stop: self._inner(context, kept_out, may_stop),
            self._terms(context),
            context.jobs,
            context.now,
            context.room,
            self.moving,
            excluded,
            context.may_preempt and self._around is not None,
            context.is_news or self._around is None,
        )
        if self._around is None:
            context.draft = found
        else:
            context.add(found)
        context.findings.extend(findings)
        context.come_back(again_s)
        context.reservations = self.moving.promises
        context.migrating = frozenset().union(*[errand.numbers for errand in self.moving.errands])

    def _terms(self, context: PlanContext) -> MigrationTerms:
        return MigrationTerms(
            context.policy.placement,
            context.cluster.draining,
            holes=self._around is not None,
            is_strict=context.order.is_strict,
            per_hour=context.cluster.moves_per_hour,
            rated=context.measured.together,
            on_trial=context.on_trial,
        )

    def is_idle(self, context: PlanContext) -> bool:
        if context.may_preempt or self._around is None or not self._around.is_idle(context):
            return False
        return moves_no_job(self.moving, self._terms(context), context.jobs, context.now, context.room)

    def _inner(self, context: PlanContext, kept_out: ExcludedJobs, may_stop: bool) -> PlanDraft:
        if self._around is None:
            return context.draft
        return self._around.found(replace(context, excluded=kept_out, may_preempt=may_stop))

    def settle(self, outcome: PlanOutcome) -> None:
        if self._around is not None:
            self._around.settle(outcome)

    @property
    def on_trial(self) -> frozenset[int]:
        return frozenset()

    @property
    def memory(self) -> Mapping[str, Any]:
        return {"moving": self.moving, **(self._around.memory if self._around is not None else {})}


def plan_moves(
    inner: Inner,
    terms: MigrationTerms,
    table: LiveTable,
    now: float,
    room: CapacityIndex,
    moving: MigrationMemory,
    kept_out: ExcludedJobs,
    may_stop: bool,
    is_news: bool = True,
) -> tuple[PlanDraft, MigrationMemory, tuple[TrialFinding, ...], float]:
    """Return the changes to propose now, with those of `inner`; the state if they are proposed; the findings of earlier
    migrations; and when the next pass is due without any event, in Unix seconds.

    `inner` plans with the room that migrations leave, and gets the jobs that it must not start or preempt. Without
    `is_news` its last result still holds. `room` is left unchanged.
    """
    room.follow()
    trying = Trial(room)
    planner = _Pass(MigrationContext(terms, table, now, trying), moving)
    try:
        return planner.run(inner, kept_out, may_stop, is_news)
    finally:
        trying.undo()


def moves_no_job(
    moving: MigrationMemory, terms: MigrationTerms, table: LiveTable, now: float, room: CapacityIndex
) -> bool:
    """Return whether a pass without preemption would certainly move no job and find nothing, because every pending job
    needs more than is free. Cheaper than the pass itself."""
    room.follow()
    if not table.has_waiting or table.least_waiting_gpus <= room.free_devices:
        return False
    if moving.errands or moving.brought.owed or terms.draining or now >= moving.brought.look_s or table.parked:
        return False
    urgent, least = table.most_urgent_waiting, table.least_urgent_running
    if urgent is None or (least is not None and urgent > least):
        return False
    next_s = moving.closer_s + CLOSER_S
    if now < next_s and moving.closer_again_s <= next_s:
        return True
    return all(len(gang.pieces) < 2 for _, gang in table.running)


class _Pass:
    def __init__(self, acting: MigrationContext, moving: MigrationMemory) -> None:
        self._acting = acting
        self._old = moving
        now = acting.now
        self._moved_at = {number: at for number, at in moving.moved_at.items() if now < at + HOUR_S}
        self._holes = MakeRoomSearch(acting, moving.looked)

    def run(
        self, inner: Inner, kept_out: ExcludedJobs, may_stop: bool, is_news: bool
    ) -> tuple[PlanDraft, MigrationMemory, tuple[TrialFinding, ...], float]:
        acting, table, terms = self._acting, self._acting.table, self._acting.terms
        carried = carry_on(self._old.errands, table, acting.trying, acting.now)
        self._holes.given_up(carried.given_up)
        acting.errands, acting.changes = carried.errands, carried.changes
        resting = parked(acting) if terms.holes else []
        urgent = table.most_urgent_waiting
        bring_back(acting, [one for one in resting if urgent is None or one[0].spec.priority >= urgent])
        for node in terms.draining:
            drain(acting, node)
        old = self._old.brought.still_owed(table, acting.now)
        brought, findings = old.looked(table, acting.room.view, terms.rated, acting.now, self._takes)
        is_new = is_news or may_stop or bool(acting.changes or carried.given_up)
        makes_holes = terms.holes and self._holes.are_possible
        found = self._old.found
        if found is None or is_new:
            found = inner(self._kept_out(kept_out), may_stop and not makes_holes)
        mark, known = acting.trying.mark, len(acting.errands)
        self._take_starts(found)
        if makes_holes:
            self._holes.make(found)
            if may_stop:
                acting.trying.undo(mark)
                self._keep_for(acting.errands[known:])
                found = inner(self._kept_out(kept_out), True)
                self._take_starts(found)
        bring_back(acting, [one for one in resting if urgent is not None and one[0].spec.priority < urgent])
        tidying = OpportunisticMigration(acting, brought, self._moved_at, self._old.closer_s, self._old.closer_again_s)
        tidying.go_back()
        if not acting.errands and not found.changes:
            tidying.closer()
        if not table.has_waiting and not acting.errands:
            tidying.unpack()
            if not acting.errands:
                tidying.balance()
            if acting.room.view.mode is LoadMode.PACK and not acting.errands:
                tidying.defragment()
        brought = self._begun(brought)
        acting.come_back(brought.look_s)
        if tidying.closer_again_s > acting.now:
            # Else a migration plan or a change blocks it, whose end is an event.
            acting.come_back(tidying.closer_again_s)
        plain = None if found.changes else found
        moving = MigrationMemory(
            errands=tuple(acting.errands),
            looked=self._holes.looked,
            moved_at=self._moved_at,
            brought=brought,
            closer_s=tidying.closer_s,
            closer_again_s=tidying.closer_again_s,
            found=plain,
        )
        return self._with_own(found), moving, findings, acting.again_s

    def _begun(self, brought: MigrationOutcomes) -> MigrationOutcomes:
        """Return the outcomes with trials of the moves that begin now. A gang that is parked on its way is measured
        before that."""
        acting = self._acting
        bound_for = {leg.number: leg.claims for errand in acting.errands for leg in errand.legs}
        for change in acting.changes:
            number, got = change.number, acting.table.get(change.number)
            match change:
                case MoveChange(claims=claims):
                    self._moved_at[number] = acting.now
                case SuspendChange():
                    claims = bound_for.get(number, ())
                case _:
                    continue
            if claims and got is not None and got[1] is not None:
                brought = brought.begun(number, change.purpose.goal, got[1], claims, acting.terms.rated, acting.now)
        return brought

    def _takes(self, job: JobRecord, gang: Gang) -> tuple[float, float]:
        return self._acting.ran_s(job), self._acting.costs.pause_s(job, gang)

    def _with_own(self, found: PlanDraft) -> PlanDraft:
        own = self._acting.changed
        others = tuple([change for change in found.changes if change.number not in own])
        starts = np.array(
            [c.number for c in self._acting.changes if isinstance(c, StartChange) and c.number not in found.line],
            np.int64,
        )
        line = np.concatenate((starts, found.line)) if len(starts) else found.line
        return replace(found, changes=(*self._acting.changes, *others), line=line)

    def _kept_out(self, kept_out: ExcludedJobs) -> ExcludedJobs:
        """Exclude the jobs of migration plans from the inner pass."""
        numbers = self._acting.busy | self._acting.changed | self._holes.soon
        if not numbers:
            return kept_out
        not_started = frozenset(kept_out.not_started) | numbers
        return replace(kept_out, not_started=not_started, not_stopped=frozenset(kept_out.not_stopped) | numbers)

    def _take_starts(self, found: PlanDraft) -> None:
        acting = self._acting
        own = acting.changed
        for change in found.changes:
            if (
                isinstance(change, StartChange)
                and change.number not in own
                and is_free(acting.room.view, change.claims)
            ):
                acting.trying.take(change.claims)

    def _keep_for(self, errands: Iterable[MigrationPlan]) -> None:
        """Take the places that new migration plans need, after the index was reset to before them."""
        for errand in errands:
            for leg in errand.legs:
                keep(self._acting.trying, leg.claims)
            keep(self._acting.trying, errand.hole)
