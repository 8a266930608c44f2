"""The migration pass, around another pass that starts and preempts jobs: room for gangs that fit nowhere, drained
nodes, parked gangs, and opportunistic migrations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from ganger.cluster.capacity_index import Trial
from ganger.cluster.search import PlacementRequest
from ganger.cluster.view import LoadMode
from msgspec.structs import replace as replace_of

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import (
    Goal,
    MoveChange,
    Purpose,
    ResumeChange,
    StartChange,
    SuspendChange,
    TrialFinding,
)
from ganger_master.planner.context import NOTHING_TO_DO, PlanContext, PlanDraft, PlanOutcome, PlanStage
from ganger_master.planner.device_groups import is_free, shares_devices
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migration_outcomes import MeasuredPlaces, MigrationOutcomes
from ganger_master.planner.migration_plans import (
    MOST_AT_ONCE,
    MigrationContext,
    MigrationMemory,
    MigrationPlan,
    carry_on,
    keep,
)
from ganger_master.planner.migration_searches import CLOSER_S, HOUR_S, MakeRoomSearch, OpportunisticMigration
from ganger_master.planner.plan_pace import NONE_EXCLUDED
from ganger_master.policies.make_room import RoomPlan
from ganger_master.policies.migration_choice import MigrationTerms, drained

if TYPE_CHECKING:
    from ganger_master.planner.order_stage import OrderStage

_ON_THE_WAY: Final = (GangPhase.MOVING, GangPhase.RESIZING)


def drain(migration: MigrationContext, node: str) -> None:
    """Move gangs off a draining node, also into room that other gangs make. Others are parked on storage, unless plans
    may not suspend them."""
    busy = migration.busy
    gangs = [one for number, (_, _, one) in migration.gangs.items() if number not in busy]
    terms = MigrationTerms(migration.room, placement=migration.placement)
    proposals, stuck = drained(terms, node, gangs, migration.others(busy))
    for proposal in proposals:
        numbers = [move.number for move in proposal.moves]
        if migration.under_way + len(numbers) > MOST_AT_ONCE or not migration.busy.isdisjoint(numbers):
            break
        migration.begin(Goal.DRAIN, RoomPlan((), proposal.moves))
    if not migration.plans and not _is_any_job_moving(migration.table):
        # A job on its way could still leave room. A gang on two draining nodes has one change.
        changed = {change.number for change in migration.changes}
        for job in (*[migration.gangs[number][0] for number in stuck], *_sharing(migration, node)):
            if job.number not in changed and job.preemptible and job.capabilities.checkpoint:
                level, purpose = SuspendLevel.CHECKPOINT, Purpose(Goal.DRAIN)
                migration.changes.append(SuspendChange(job.number, job.revision, level=level, purpose=purpose))


def _is_any_job_moving(table: LiveTable) -> bool:
    gangs = zip(table.jobs, table.gangs, strict=True)
    return any((job and job.next_epoch) or (gang and gang.phase in _ON_THE_WAY) for job, gang in gangs)


def _sharing(migration: MigrationContext, node: str) -> list[JobRecord]:
    """Return the jobs that share devices on a node, at once or in time slices. The master has moved those for which
    devices are free, and time slicing has moved those that can be time-sliced elsewhere. Once all jobs that share
    devices run, no other job makes room for them."""
    sharing = [(job, gang) for job, gang in migration.running if shares_devices(gang)]
    if any(gang.phase is not GangPhase.RUNNING for _, gang in sharing):
        return []
    return [
        job
        for job, gang in sharing
        if any(claim.node == node for claim in gang.claims)
        and gang.intent is GangIntent.RUN
        and job.ending is None
        and job.preemptible
        and job.number not in migration.busy | migration.context.on_trial
    ]


def parked(migration: MigrationContext) -> list[tuple[JobRecord, Gang]]:
    """Return the jobs that a plan has parked in host memory, without those of migration plans, first job first."""
    busy = migration.busy
    found = [pair for pair in migration.table.offloaded if pair[0].number not in busy]
    return sorted(found, key=lambda one: (-one[0].priority, one[0].number))


def bring_back(migration: MigrationContext, pairs: Sequence[tuple[JobRecord, Gang]]) -> None:
    """Resume parked jobs in place if it is free, else move them out of host memory to free devices."""
    for job, gang in pairs:
        purpose = Purpose(Goal.RETURN, pause_s=migration.costs.pause_s(job, gang))
        own = tuple([replace_of(claim, memory_bytes=0, arena_bytes=0) for claim in gang.claims])
        if is_free(migration.room.view, own):
            migration.changes.append(ResumeChange(job.number, job.revision, purpose=purpose))
            migration.trying.take(own)
            continue
        request = PlacementRequest(job.shape, math.inf)
        claims = migration.placement.place(migration.room, request) if job.capabilities.can_hand_over else None
        if claims is not None:
            migration.changes.append(MoveChange(job.number, job.revision, claims, purpose=purpose))
            migration.trying.take(claims)


# A pass that starts and preempts jobs.
Inner: TypeAlias = Callable[[PlanContext], PlanDraft]


class MigrationStage(PlanStage):
    """The stage, with its state, around the stage that starts and preempts jobs; `around` None: beside stages that
    share devices, where it plans only if these have no change."""

    def __init__(self, around: OrderStage | None, moving: MigrationMemory | None) -> None:
        self._around = around
        self.moving = moving or MigrationMemory()

    def plan(self, context: PlanContext) -> None:
        around, present = self._around, context.draft
        if around is not None:
            planned = plan_moves(around.found, context, self.moving, resting=around.resting(context))
        elif not (present.changes or context.findings):
            beside = replace_of(context, excluded=NONE_EXCLUDED, may_preempt=False, is_news=True)
            planned = plan_moves(lambda _: present, beside, self.moving, makes_room=False)
            context.draft = NOTHING_TO_DO
        else:
            context.kept_places = self.moving.kept_places
            return
        found, self.moving, findings, again_s = planned
        context.add(found)
        context.findings.extend(findings)
        context.come_back(again_s)
        context.kept_places = self.moving.kept_places
        context.migrating = frozenset().union(*[plan.numbers for plan in self.moving.plans])

    def is_idle(self, context: PlanContext) -> bool:
        if context.may_preempt or self._around is None or not self._around.is_idle(context):
            return False
        return moves_no_job(self.moving, context)

    def settle(self, outcome: PlanOutcome) -> None:
        if self._around is not None:
            self._around.settle(outcome)

    @property
    def memory(self) -> Mapping[str, Any]:
        return {"moving": self.moving, **(self._around.memory if self._around is not None else {})}


def plan_moves(
    inner: Inner,
    context: PlanContext,
    moving: MigrationMemory,
    makes_room: bool = True,
    resting: frozenset[int] = frozenset(),
) -> tuple[PlanDraft, MigrationMemory, tuple[TrialFinding, ...], float]:
    """Return the changes to propose now, with those of `inner`; the state if they are proposed; the findings of earlier
    migrations; and when the next pass is due without any event, in Unix seconds.

    `inner` plans with the room that migrations leave, and its context excludes the jobs that it must not start or
    preempt. Without news its last result still holds. `makes_room`: as in `MigrationContext`; `resting`: numbers of
    pending jobs for which no room is made now.
    """
    context.room.follow()
    trying = Trial(context.room)
    planned = _Pass(MigrationContext(context, trying, makes_room), moving, resting).run(inner)
    trying.undo()
    return planned


def moves_no_job(moving: MigrationMemory, context: PlanContext) -> bool:
    """Return whether a pass without preemption would certainly move no job and find nothing, because every pending job
    needs more than is free. Cheaper than the pass itself."""
    table, now, room = context.jobs, context.now, context.room
    room.follow()
    if not table.has_waiting or table.least_waiting_gpus <= room.free_devices:
        return False
    if moving.plans or moving.outcomes.pending_reverts or context.cluster.draining or now >= moving.outcomes.look_s:
        return False
    urgent, least = table.most_urgent_waiting, table.least_urgent_running
    if table.parked or urgent is None or (least is not None and urgent > least):
        return False
    next_s = moving.closer_s + CLOSER_S
    if now < next_s and moving.closer_again_s <= next_s:
        return True
    return all(len(gang.pieces) < 2 for _, gang in table.running)


class _Pass:
    def __init__(self, migration: MigrationContext, moving: MigrationMemory, resting: frozenset[int]) -> None:
        self._migration = migration
        self._old = moving
        now = migration.now
        self._moved_at = {number: at for number, at in moving.moved_at.items() if now < at + HOUR_S}
        self._make_room = MakeRoomSearch(migration, moving.searches, resting)

    def run(self, inner: Inner) -> tuple[PlanDraft, MigrationMemory, tuple[TrialFinding, ...], float]:
        migration, table, context = self._migration, self._migration.table, self._migration.context
        now, may_preempt = migration.now, context.may_preempt
        carried = carry_on(self._old.plans, table, migration.trying, migration.now)
        self._make_room.given_up(carried.given_up)
        migration.plans, migration.changes = carried.plans, carried.changes
        resting = parked(migration) if migration.makes_room else []
        urgent = table.most_urgent_waiting
        bring_back(migration, [one for one in resting if urgent is None or one[0].priority >= urgent])
        for node in context.cluster.draining:
            drain(migration, node)
        old = self._old.outcomes.with_live_reverts(table, migration.now)
        outcomes, findings = old.judged(table, migration.room.view, migration.rates, migration.now, self._takes)
        wishes = MeasuredPlaces(context, outcomes, self._old.found_until_s)
        migration.context = replace_of(context, terms=wishes.terms)
        is_new = context.is_news or may_preempt or bool(migration.changes or carried.given_up)
        makes_holes = migration.makes_room and self._make_room.are_possible
        found = self._old.found if now < self._old.found_until_s else None
        if found is None or is_new:
            found = inner(self._within(may_preempt and not makes_holes))
        mark, known = migration.trying.mark, len(migration.plans)
        self._take_starts(found)
        if makes_holes:
            self._make_room.make(found)
            if may_preempt or len(migration.plans) > known:
                # Neither starts nor cores are planned into the places that are kept from now on.
                migration.trying.undo(mark)
                self._keep_for(migration.plans[known:])
                found = inner(self._within(may_preempt))
                self._take_starts(found)
        bring_back(migration, [one for one in resting if urgent is not None and one[0].priority < urgent])
        opportunistic = OpportunisticMigration(
            migration, outcomes, self._moved_at, self._old.closer_s, self._old.closer_again_s
        )
        opportunistic.revert()
        if not migration.plans and not found.changes:
            opportunistic.closer()
        if not table.has_waiting and not migration.plans:
            opportunistic.separate()
            if not migration.plans:
                opportunistic.balance()
            if migration.room.view.mode is LoadMode.PACK and not migration.plans:
                opportunistic.defragment()
        outcomes = self._begun(outcomes)
        migration.come_back(min(outcomes.look_s, wishes.ends_s))
        if opportunistic.closer_again_s > migration.now:
            # Else a migration plan or a change blocks it, whose end is an event.
            migration.come_back(opportunistic.closer_again_s)
        plain = None if found.changes else found
        moving = MigrationMemory(
            plans=tuple(migration.plans),
            searches=self._make_room.results,
            moved_at=self._moved_at,
            outcomes=outcomes,
            closer_s=opportunistic.closer_s,
            closer_again_s=opportunistic.closer_again_s,
            found=plain,
            found_until_s=wishes.ends_s,
        )
        return self._with_own(found), moving, findings, migration.again_s

    def _begun(self, outcomes: MigrationOutcomes) -> MigrationOutcomes:
        """Return the outcomes with trials of moves that begin now. A gang parked on its way is measured before."""
        migration = self._migration
        bound_for = {step.number: step.claims for plan in migration.plans for step in plan.steps}
        for change in migration.changes:
            number, got = change.number, migration.table.get(change.number)
            match change:
                case MoveChange(claims=claims):
                    self._moved_at[number] = migration.now
                case SuspendChange():
                    claims = bound_for.get(number, ())
                case _:
                    continue
            if claims and got is not None and got[1] is not None:
                outcomes = outcomes.begun(number, change.purpose.goal, got[1], claims, migration.rates, migration.now)
        return outcomes

    def _takes(self, job: JobRecord, gang: Gang) -> tuple[float, float]:
        return self._migration.left_s(job), self._migration.costs.pause_s(job, gang)

    def _with_own(self, found: PlanDraft) -> PlanDraft:
        own = self._migration.changed
        if not own:
            return found
        others = tuple([change for change in found.changes if change.number not in own])
        starts = np.array(
            [c.number for c in self._migration.changes if isinstance(c, StartChange) and c.number not in found.line],
            np.int64,
        )
        line = np.concatenate((starts, found.line)) if len(starts) else found.line
        return replace(found, changes=(*self._migration.changes, *others), line=line)

    def _within(self, may_preempt: bool) -> PlanContext:
        context = self._migration.context
        excluded, numbers = context.excluded, self._migration.busy | self._migration.changed | self._make_room.soon
        if numbers:
            not_stopped = frozenset((*excluded.not_stopped, *numbers))
            excluded = replace_of(excluded.resting(numbers), not_stopped=not_stopped)
        kept_on = {claim.node for plan in self._migration.plans if plan.waiting for claim in plan.place}
        return replace_of(context, excluded=excluded, may_preempt=may_preempt, kept_on=frozenset(kept_on))

    def _keep_for(self, plans: Iterable[MigrationPlan]) -> None:
        """Take the places that new migration plans need, after the index was reset to before them."""
        for plan in plans:
            for step in plan.steps:
                keep(self._migration.trying, step.claims)
            keep(self._migration.trying, plan.place)

    def _take_starts(self, found: PlanDraft) -> None:
        migration = self._migration
        starts = [change for change in found.changes if isinstance(change, StartChange)]
        for change in [change for change in starts if change.number not in migration.changed]:
            if is_free(migration.room.view, change.claims):
                migration.trying.take(change.claims)
