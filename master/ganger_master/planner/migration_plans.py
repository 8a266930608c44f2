"""Migration plans: several moves that belong together, some of them with gangs parked on the way; and the pass that
begins them. Every pass derives a plan's next changes from the present state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Final, TypeAlias

from ganger.cluster.capacity_index import Claims, Trial
from ganger.cluster.fit import fit
from ganger.cluster.resources import Claim
from ganger.cluster.view import View
from ganger.job_state import JobState

from ganger_master.core.colocation import has_arenas
from ganger_master.core.commands import KeepPlace
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase
from ganger_master.core.gang_orders import same_place
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, MoveChange, PlanChange, Purpose, StartChange, SuspendChange
from ganger_master.planner.context import PlanContext, PlanDraft
from ganger_master.planner.device_groups import is_free, is_shared
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.migration_outcomes import MigrationOutcomes
from ganger_master.policies.make_room import Displacement, Movable, Movables, RoomPlan, in_order
from ganger_master.policies.migration_choice import movable

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
    """Migration steps for one goal. `waiting`: number of the pending job that they make room for, at `place`; zero if
    there is none. `saved`: expected gain in GPU-seconds."""

    goal: Goal
    steps: tuple[MigrationStep, ...]
    began_s: float
    waiting: int = 0
    place: Claims = ()
    saved: float = 0.0

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset([step.number for step in self.steps] + [self.waiting] * bool(self.waiting))


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
    """The changes to propose now, with their places taken, and the plans that continue or are given up."""

    changes: list[PlanChange] = field(default_factory=list)
    plans: list[MigrationPlan] = field(default_factory=list)
    given_up: list[MigrationPlan] = field(default_factory=list)


def carry_on(plans: Iterable[MigrationPlan], table: LiveTable, trying: Trial, now: float) -> CarriedPlans:
    """Return the next changes of all plans. Places that they use or need are taken in `trying`, as far as free."""
    done = CarriedPlans()
    plans = list(plans)
    if not plans:
        return done
    # Masks by node of the devices that jobs leave.
    leaving: Counter[str] = Counter()
    for claim in [claim for plan in plans for step in plan.steps for claim in step.source]:
        leaving[claim.node] |= claim.device_mask
    for plan in plans:
        steps = [(step, stage_of(step, table)) for step in plan.steps]
        if _are_done(steps) if not plan.waiting else not is_waiting(table, plan.waiting):
            continue
        mark, count = trying.mark, len(done.changes)
        followed = _follow(plan, steps, table, trying, now, leaving, done.changes)
        if followed is None:
            trying.undo(mark)
            del done.changes[count:]
            done.given_up.append(plan)
        else:
            done.plans.append(followed)
    hold(done.plans, table, trying, {change.number for change in done.changes})
    return done


def hold(plans: Iterable[MigrationPlan], table: LiveTable, trying: Trial, begun: Collection[int] = ()) -> None:
    """Take the free parts of the places that plans still need. `begun`: jobs whose changes have taken theirs."""
    for plan in plans:
        for step in plan.steps:
            stage = stage_of(step, table)
            has_none_yet = stage in (Stage.TO_BEGIN, Stage.RESTS) and step.number not in begun
            if stage is Stage.UNDER_WAY and step.is_parked:
                found = table.get(step.number)
                has_none_yet = found is None or not found[0].next_epoch
            if has_none_yet:
                keep(trying, step.claims)
        if plan.waiting and plan.waiting not in begun:
            keep(trying, plan.place)


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
        free = view.bandwidth.get(slot, ())
        bandwidth = tuple([max(0, min(want, have)) for want, have in zip(claim.bandwidth, free, strict=False)])
        trying.take((Claim(claim.node, mask, cores, memory, bandwidth=bandwidth),))


def is_waiting(table: LiveTable, number: int) -> bool:
    """Return whether the job could start."""
    found = table.get(number)
    if found is None:
        return False
    job, gang = found
    return job.state is JobState.PENDING and job.ending is None and not job.next_epoch and gang is None


def _follow(
    plan: MigrationPlan,
    stages: Sequence[tuple[MigrationStep, Stage]],
    table: LiveTable,
    trying: Trial,
    now: float,
    leaving: Mapping[str, int],
    changes: list[PlanChange],
) -> MigrationPlan | None:
    """Return the plan after appending its next changes to `changes`; None if it is to be given up."""
    view = trying.room.view
    if now >= plan.began_s + LONGEST_S or any(stage is Stage.ASTRAY for _, stage in stages):
        return None
    if not _may_come_free(view, plan.place, leaving):
        return None
    steps = []
    for step, stage in stages:
        found = table.get(step.number)
        change: PlanChange | None = None
        if found is not None and stage in (Stage.TO_BEGIN, Stage.RESTS):
            if not _may_come_free(view, step.claims, leaving):
                return None
            purpose = Purpose(step.goal or plan.goal, plan.waiting, plan.saved, step.pause_s)
            if step.claims and is_free(view, step.claims):
                change = MoveChange(step.number, found[0].revision, step.claims, purpose=purpose)
            elif stage is Stage.TO_BEGIN and (step.is_parked or not step.claims):
                change = SuspendChange(step.number, found[0].revision, level=step.level, purpose=purpose)
        if change is None:
            steps.append(step)
            continue
        if step.tries >= _MOST_TRIES:
            return None
        steps.append(replace(step, tries=step.tries + 1))
        changes.append(change)
        if isinstance(change, MoveChange):
            trying.take(step.claims)
    if plan.waiting and (_are_done(stages) or is_free(view, plan.place)):
        found = table.get(plan.waiting)
        is_open = found is not None and found[0].closed_nodes.isdisjoint([claim.node for claim in plan.place])
        if found is not None and is_open and not fit(view, found[0].shape, plan.place, retune=True):
            changes.append(StartChange(plan.waiting, found[0].revision, plan.place))
            trying.take(plan.place)
    return replace(plan, steps=tuple(steps))


def _are_done(steps: Iterable[tuple[MigrationStep, Stage]]) -> bool:
    return all(stage is Stage.DONE or (stage is Stage.RESTS and not step.claims) for step, stage in steps)


def _may_come_free(view: View, claims: Claims, leaving: Mapping[str, int]) -> bool:
    """Return whether every device of the claims is free or held by jobs that leave (`leaving`: masks by node)."""
    for claim in claims:
        slot = view.slots.get(claim.node)
        if slot is None or not view.available[slot]:
            return False
        if claim.device_mask & ~view.free[slot] & ~leaving.get(claim.node, 0):
            return False
    return True


# Bytes of state, and seconds that its move took.
_Measured: TypeAlias = tuple[float, float]
# Assumed before any measurement, as `ganger bench move` promises: 0.3 s, and 1 GB per second. Counts as one measurement
# at either end of the line.
_UNMEASURED: Final[tuple[_Measured, ...]] = ((0.0, 0.3), (1e9, 1.3))
# The latest moves that count.
_MOST: Final = 64


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """Seconds that a move stops a job: for any move, and for each byte of state."""

    base_s: float
    byte_s: float

    def pause_s(self, job: JobRecord, gang: Gang) -> float:
        """Return the expected pause of the gang's next move in seconds; that of its own last move if there was one."""
        return job.move_pause_s or self.base_s + self.byte_s * state_bytes(job, gang)


def move_costs(pairs: Iterable[tuple[JobRecord, Gang]]) -> MoveCosts:
    """Fit the pauses of running jobs that were moved: least squares over bytes of state, neither part below zero."""
    moved = [(job, gang) for job, gang in pairs if job.move_pause_s][-_MOST:]
    points = (*_UNMEASURED, *[(state_bytes(job, gang), job.move_pause_s) for job, gang in moved])
    count = len(points)
    mean_x, mean_y = sum([x for x, _ in points]) / count, sum([y for _, y in points]) / count
    spread = sum([(x - mean_x) ** 2 for x, _ in points])
    slope = max(0.0, sum([(x - mean_x) * (y - mean_y) for x, y in points]) / spread)
    return MoveCosts(max(0.0, mean_y - slope * mean_x), slope)


def state_bytes(job: JobRecord, gang: Gang) -> float:
    """Return the most bytes that one node sends. All nodes send at once."""
    most = max([claim.device_mask.bit_count() for claim in gang.claims], default=0)
    return float(most * job.used_device_bytes)


# Moves under way at once: each loads hosts and the network.
MOST_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class SearchResult:
    """When the make-room search for a gang is repeated: at `again_s`, or once more than `free` devices are free.
    `is_found`: moves that make room exist, and will be worth their cost soon."""

    again_s: float
    free: int
    is_found: bool = False


@dataclass(frozen=True, slots=True)
class MigrationMemory:
    """The state between two passes. Without it some moves are made twice."""

    plans: tuple[MigrationPlan, ...] = ()
    searches: Mapping[int, SearchResult] = field(default_factory=dict)
    # When each job was last moved, for an hour.
    moved_at: Mapping[int, float] = field(default_factory=dict)
    outcomes: MigrationOutcomes = field(default_factory=MigrationOutcomes)
    # When gangs that are spread too far were searched last, and when they are again without any event.
    closer_s: float = -math.inf
    closer_again_s: float = math.inf
    # The result of the inner pass if it had no changes, and when it ends to hold without any event.
    found: PlanDraft | None = None
    found_until_s: float = math.inf

    @property
    def kept_places(self) -> tuple[KeepPlace, ...]:
        """Return the places that the master is to keep for pending jobs."""
        return tuple([KeepPlace(one.waiting, one.place) for one in self.plans if one.waiting])


class MigrationContext:
    """One migration pass. `trying` is the capacity index with the places of everything begun so far. `makes_room`: for
    pending gangs, and it resumes parked jobs; no other pass does."""

    def __init__(self, context: PlanContext, trying: Trial, makes_room: bool) -> None:
        self.context, self.trying, self.makes_room = context, trying, makes_room
        self.table, self.now, self.placement = context.jobs, context.now, context.policy.placement
        self.rates = context.job_rates
        self.room = trying.room
        self.plans: list[MigrationPlan] = []
        self.changes: list[PlanChange] = []
        self.again_s = math.inf

    def come_back(self, when_s: float) -> None:
        """Request the next pass at `when_s` at the latest, without any event."""
        self.again_s = min(self.again_s, when_s)

    @property
    def free(self) -> int:
        """Return the number of devices on available nodes that are neither held nor kept."""
        return self.room.free_devices

    @cached_property
    def running(self) -> list[tuple[JobRecord, Gang]]:
        return self.table.running

    @cached_property
    def costs(self) -> MoveCosts:
        return move_costs(self.table.moved)

    @cached_property
    def gangs(self) -> dict[int, tuple[JobRecord, Gang, Movable]]:
        """The running gangs that can be moved by themselves, by number."""
        return self.movable(self.running)

    def movable(
        self, pairs: Iterable[tuple[JobRecord, Gang]], *, packed: bool = False
    ) -> dict[int, tuple[JobRecord, Gang, Movable]]:
        """Return those of `pairs` that can be moved, by number. Co-located gangs only if `packed`."""
        view, rates = self.room.view, self.rates
        found = {}
        for job, gang in pairs:
            if goes_alone(job, gang) or (packed and _can_move(job, gang)):
                kind = rates.signature(job.number)
                one = movable(view, job.number, job.shape, gang.held, self.costs.pause_s(job, gang), kind)
                found[job.number] = job, gang, one
        return found

    def movable_gpus(self, enough: int) -> int:
        """Return the number of devices of `gangs`, counted without building them, and no further than `enough`."""
        count = 0
        for job, gang in self.table.each_running():
            if count >= enough:
                break
            count += job.gpus if goes_alone(job, gang) else 0
        return count

    @property
    def busy(self) -> frozenset[int]:
        """The numbers of all jobs of migration plans, with those that wait for one."""
        return frozenset().union(*[plan.numbers for plan in self.plans])

    @property
    def changed(self) -> frozenset[int]:
        return frozenset(change.number for change in self.changes)

    @property
    def under_way(self) -> int:
        """The number of unfinished migration steps."""
        stages = [stage_of(step, self.table) for plan in self.plans for step in plan.steps]
        return sum(stage not in (Stage.DONE, Stage.RESTS) for stage in stages)

    def left_s(self, job: JobRecord) -> float:
        """Return the estimate of how long a job will still run, in seconds: as long as it has run."""
        return job.ran_s(self.now)

    def others(self, busy: frozenset[int]) -> Movables:
        """Return the gangs that may be moved for other jobs, without the `busy` ones."""
        return Movables(
            self.room.view, [one for n, (job, _, one) in self.gangs.items() if n not in busy and job.spec.movable]
        )

    def begin(
        self,
        goal: Goal,
        room_plan: RoomPlan,
        waiting: int = 0,
        saved: float = 0.0,
        last_goal: Goal | None = None,
        level: SuspendLevel = SuspendLevel.OFFLOAD,
    ) -> None:
        """Begin a migration plan with its first changes. It does not begin if a gang would have to be parked on its way
        that has no arenas or that plans may not suspend, or if host memory is missing at a destination.

        waiting: number of the job that room is made for; zero if there is none.
        saved: GPU-seconds that the plan saves.
        last_goal: goal of the last move, if another.
        level: the level at which jobs without a new place are parked.
        """
        ordered, parked = in_order(room_plan.moves)
        pairs = {job.number: (job, gang) for job, gang in self.running}
        if not all(job.preemptible and has_arenas(gang) for job, gang in (pairs[move.number] for move in parked)):
            return
        if not _has_memory(self.room.view, ordered, parked):
            return
        steps = []
        for move in ordered:
            job, gang = pairs[move.number]
            pause = self.costs.pause_s(job, gang)
            own = last_goal if move is room_plan.moves[-1] else None
            rest = SuspendLevel.OFFLOAD if move.claims else level
            steps.append(
                MigrationStep(move.number, gang.claims, move.claims, pause, move in parked, goal=own, level=rest)
            )
        plan = MigrationPlan(goal, tuple(steps), self.now, waiting, room_plan.claims if waiting else (), saved)
        carried = carry_on([plan], self.table, self.trying, self.now)
        self.plans.extend(carried.plans)
        self.changes.extend(carried.changes)


def _has_memory(view: View, moves: Sequence[Displacement], parked: Sequence[Displacement]) -> bool:
    """Return whether all destinations have the host memory. A gang parked on its way keeps its own until it arrives."""
    if not parked:
        return True
    needed: Counter[str] = Counter()
    for move in moves:
        for claim in move.claims:
            needed[claim.node] += claim.memory_bytes + claim.arena_bytes
        for claim in move.gang.claims if move.claims and move not in parked else ():
            needed[claim.node] -= claim.memory_bytes + claim.arena_bytes
    return all(needed[node] <= view.memory[view.slots[node]] for node in needed if node in view.slots)


def _can_move(job: JobRecord, gang: Gang) -> bool:
    if gang.intent is not GangIntent.RUN or gang.phase is not GangPhase.RUNNING or job.state is not JobState.HOLDING:
        return False
    if job.next_epoch or job.ending is not None or not job.spec.preemptible or not job.capabilities.known:
        return False
    # Moving a time-sliced gang makes no room: the rest of its group keeps the devices.
    return job.capabilities.can_hand_over and not gang.node_set


def goes_alone(job: JobRecord, gang: Gang) -> bool:
    """Return whether a running gang can be moved by itself."""
    return not is_shared(gang) and _can_move(job, gang)
