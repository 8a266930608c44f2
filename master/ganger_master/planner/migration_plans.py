"""Migration plans: several moves that belong together, some of them with gangs parked on the way.

Every pass derives a plan's next changes from the present state, so losing the plan costs only the moves already made. A
plan is given up when one of its jobs goes elsewhere, or when other jobs hold its places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from ganger.cluster.capacity_index import Claims, Trial
from ganger.cluster.fit import fit
from ganger.cluster.resources import Claim
from ganger.cluster.view import View
from ganger.job_state import JobState

from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.gang_orders import same_place
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, MoveChange, PlanChange, Purpose, StartChange, SuspendChange
from ganger_master.planner.job_table import LiveTable

# A plan that is not done by then is given up; the master waits as long for one move.
LONGEST_S: Final = 600.0
# Orders for one step until the plan is given up.
_MOST_TRIES: Final = 4


@dataclass(frozen=True, slots=True)
class MigrationStep:
    """One job's move from `source` to `claims`; without claims it is parked at `level`. `is_parked`: it is parked in
    host memory on its way, because its old place is needed before the new one is free. `goal`: its own, if not the
    plan's."""

    number: int
    source: Claims
    claims: Claims
    pause_s: float
    is_parked: bool = False
    tries: int = 0
    goal: Goal | None = None
    level: SuspendLevel = SuspendLevel.OFFLOAD


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """`waiting`: number of the job whose place is `hole`; zero if there is none. `saved`: GPU-seconds."""

    goal: Goal
    steps: tuple[MigrationStep, ...]
    began_s: float
    waiting: int = 0
    hole: Claims = ()
    saved: float = 0.0

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset([step.number for step in self.steps] + [self.waiting] * bool(self.waiting))

    def purpose(self, step: MigrationStep) -> Purpose:
        return Purpose(step.goal or self.goal, self.waiting, self.saved, step.pause_s)


class Stage(Enum):
    TO_BEGIN = "to begin"
    UNDER_WAY = "under way"
    RESTS = "rests in host memory"
    DONE = "done"
    ASTRAY = "astray"


def stage_of(step: MigrationStep, table: LiveTable) -> Stage:
    """Return how far a step is. A job that has ended, or that a user has suspended, is done: it blocks no device."""
    found = table.get(step.number)
    if found is None:
        return Stage.DONE
    job, gang = found
    if job.next_epoch or job.ending is not None:
        return Stage.UNDER_WAY
    if gang is None or job.state is not JobState.HOLDING:
        return Stage.DONE
    if gang.intent is GangIntent.PARK:
        rests = gang.phase is GangPhase.PARKED and gang.park_level is SuspendLevel.OFFLOAD
        return Stage.RESTS if rests else Stage.UNDER_WAY
    if step.claims and same_place(gang.claims, step.claims):
        return Stage.DONE
    if not same_place(gang.claims, step.source) or gang.intent is not GangIntent.RUN:
        return Stage.ASTRAY
    return Stage.TO_BEGIN if gang.phase is GangPhase.RUNNING else Stage.UNDER_WAY


@dataclass
class CarriedPlans:
    """The changes to propose now, with their places taken, and the plans that go on or are given up."""

    changes: list[PlanChange] = field(default_factory=list)
    plans: list[MigrationPlan] = field(default_factory=list)
    given_up: list[MigrationPlan] = field(default_factory=list)


def carry_on(plans: Iterable[MigrationPlan], table: LiveTable, trying: Trial, now: float) -> CarriedPlans:
    """Return the next changes of all plans. The places that they use or still need are taken in `trying`, as far as
    free."""
    done = CarriedPlans()
    plans = list(plans)
    leaving = _masks(step.source for plan in plans for step in plan.steps)
    for plan in plans:
        stages = [stage_of(step, table) for step in plan.steps]
        if _is_over(plan, stages, table):
            continue
        mark, count = trying.mark, len(done.changes)
        followed = _follow(plan, stages, table, trying, now, leaving, done.changes)
        if followed is None:
            trying.undo(mark)
            del done.changes[count:]
            done.given_up.append(plan)
        else:
            done.plans.append(followed)
    hold(done.plans, table, trying, {change.number for change in done.changes})
    return done


def hold(plans: Iterable[MigrationPlan], table: LiveTable, trying: Trial, begun: Collection[int] = ()) -> None:
    """Take the free parts of the places that plans still need. `begun`: numbers of jobs whose changes have taken
    theirs."""
    for plan in plans:
        for step in plan.steps:
            stage = stage_of(step, table)
            has_none_yet = stage in (Stage.TO_BEGIN, Stage.RESTS) and step.number not in begun
            if has_none_yet or (stage is Stage.UNDER_WAY and step.is_parked and not _moves(table, step.number)):
                keep(trying, step.claims)
        if plan.waiting and plan.waiting not in begun:
            keep(trying, plan.hole)


def keep(trying: Trial, claims: Claims) -> None:
    """Take the free parts of these claims."""
    view = trying.room.view
    for claim in claims:
        slot = view.slots.get(claim.node)
        if slot is None:
            continue
        mask = claim.device_mask & view.free[slot]
        cores = tuple([min(want, have) for want, have in zip(claim.millicores, view.millicores[slot], strict=True)])
        memory = min(claim.memory_bytes + claim.arena_bytes, max(0, view.memory[slot]))
        trying.take((Claim(claim.node, mask, cores, memory),))


def is_free(view: View, claims: Claims) -> bool:
    """Return whether all of these claims are free, on available nodes."""
    for claim in claims:
        slot = view.slots.get(claim.node)
        if slot is None or not view.available[slot] or claim.device_mask & ~view.free[slot]:
            return False
        if any(want > have for want, have in zip(claim.millicores, view.millicores[slot], strict=True)):
            return False
        if claim.memory_bytes + claim.arena_bytes > view.memory[slot]:
            return False
    return True


def park(job: JobRecord, purpose: Purpose, level: SuspendLevel = SuspendLevel.OFFLOAD) -> PlanChange:
    return SuspendChange(job.number, job.revision, level=level, purpose=purpose)


def _is_over(plan: MigrationPlan, stages: list[Stage], table: LiveTable) -> bool:
    """Return whether the pending job has started or gone; without one, whether all steps are done."""
    if plan.waiting:
        return not is_waiting(table, plan.waiting)
    return all(
        stage is Stage.DONE or (stage is Stage.RESTS and not step.claims) for step, stage in _pairs(plan, stages)
    )


def is_waiting(table: LiveTable, number: int) -> bool:
    """Return whether the job could start."""
    found = table.get(number)
    if found is None:
        return False
    job, gang = found
    return job.state is JobState.PENDING and job.ending is None and not job.next_epoch and gang is None


def _follow(
    plan: MigrationPlan,
    stages: list[Stage],
    table: LiveTable,
    trying: Trial,
    now: float,
    leaving: Mapping[str, int],
    changes: list[PlanChange],
) -> MigrationPlan | None:
    """Return the plan after appending its next changes to `changes`; None if it is to be given up."""
    view = trying.room.view
    if now >= plan.began_s + LONGEST_S or Stage.ASTRAY in stages:
        return None
    if not _may_come_free(view, plan.hole, leaving):
        return None
    steps = []
    for step, stage in _pairs(plan, stages):
        if stage in (Stage.TO_BEGIN, Stage.RESTS) and step.claims and not _may_come_free(view, step.claims, leaving):
            return None
        change = _next_change(plan, step, stage, table, view)
        if change is None:
            steps.append(step)
            continue
        if step.tries >= _MOST_TRIES:
            return None
        steps.append(replace(step, tries=step.tries + 1))
        changes.append(change)
        if isinstance(change, MoveChange):
            trying.take(step.claims)
    all_gone = all(
        stage is Stage.DONE or (stage is Stage.RESTS and not step.claims) for step, stage in _pairs(plan, stages)
    )
    if plan.waiting and (all_gone or not plan.steps or is_free(view, plan.hole)):
        found = table.get(plan.waiting)
        if found is not None and not fit(view, found[0].shape, plan.hole, retune=True):
            changes.append(StartChange(plan.waiting, found[0].revision, plan.hole))
            trying.take(plan.hole)
    return replace(plan, steps=tuple(steps))


def _next_change(
    plan: MigrationPlan, step: MigrationStep, stage: Stage, table: LiveTable, view: View
) -> PlanChange | None:
    found = table.get(step.number)
    if found is None or stage not in (Stage.TO_BEGIN, Stage.RESTS):
        return None
    job, _ = found
    purpose = plan.purpose(step)
    if step.claims and is_free(view, step.claims):
        return MoveChange(job.number, job.revision, step.claims, purpose=purpose)
    if stage is Stage.TO_BEGIN and (step.is_parked or not step.claims):
        return park(job, purpose, step.level)
    return None


def _may_come_free(view: View, claims: Claims, leaving: Mapping[str, int]) -> bool:
    """Return whether every device of the claims is free or held by jobs that leave (`leaving`: masks by node)."""
    for claim in claims:
        slot = view.slots.get(claim.node)
        if slot is None or not view.available[slot]:
            return False
        if claim.device_mask & ~view.free[slot] & ~leaving.get(claim.node, 0):
            return False
    return True


def _moves(table: LiveTable, number: int) -> bool:
    found: tuple[JobRecord, Gang | None] | None = table.get(number)
    return found is not None and found[0].next_epoch != 0


def _masks(claims: Iterable[Claims]) -> dict[str, int]:
    masks: dict[str, int] = {}
    for claim in [claim for some in claims for claim in some]:
        masks[claim.node] = masks.get(claim.node, 0) | claim.device_mask
    return masks


def _pairs(plan: MigrationPlan, stages: list[Stage]) -> list[tuple[MigrationStep, Stage]]:
    return list(zip(plan.steps, stages, strict=True))
