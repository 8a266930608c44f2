"""Make-room search: moves, or preemptions, that let a pending gang fit though no free place is large enough.

Room is made by moves once the gang has waited as long as these cost other jobs, in GPU-seconds: a gang that has waited
so long may have to wait as long again. Free parts of a place that was found are reserved meanwhile. A gang that
outranks others preempts them: into host memory, where they lose no steps, or onto storage where host memory would take
more victims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from ganger.cluster.resources import GangShape
from ganger.cluster.search import widest_now
from msgspec.structs import replace as replace_of

from ganger_master.core.colocation import has_arenas
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, StartChange
from ganger_master.planner.context import PlanDraft
from ganger_master.planner.migration_context import MOST_AT_ONCE, MakeRoomLook, MigrationContext
from ganger_master.planner.migration_plans import MigrationPlan, is_waiting
from ganger_master.policies.make_room import Hole, Movable, Movables, hole_for
from ganger_master.policies.orders import SLACK_S
from ganger_master.policies.park_and_move import badness, swap_for

# Pending jobs of one pass that are searched for, first job first: a search takes as long as many placements.
_MOST_HOLES: Final = 4
# No job is preempted for a gang that moves will make room for within this time.
_SOON_S: Final = 60.0
# Victims have the lowest priority that makes room.
_LOWEST: Final = -1000
# A failed search is repeated when more devices are free, or when the gang has waited this many times as long.
_LOOK_AGAIN: Final = 2.0
_LEAST_LOOK_S: Final = 5.0
_NEVER: Final = MakeRoomLook(-math.inf, 0)


class MakeRoomSearch:
    """The searches of one pass. `looked`: their results in the last pass, by job number; `resting`: numbers of pending
    jobs that are passed over."""

    def __init__(
        self, migration: MigrationContext, looked: Mapping[int, MakeRoomLook], resting: frozenset[int] = frozenset()
    ) -> None:
        self._migration, self._resting = migration, resting
        self._looked = dict(looked)
        # Numbers of jobs whose moves will be worth their cost soon: no job is preempted for them meanwhile.
        self.soon: set[int] = set()

    @property
    def looked(self) -> dict[int, MakeRoomLook]:
        """The results that pending jobs keep for the next pass."""
        return {number: looked for number, looked in self._looked.items() if is_waiting(self._migration.table, number)}

    @property
    def are_possible(self) -> bool:
        """Return whether moves or preemptions could make room for any pending job."""
        table = self._migration.table
        if not table.has_waiting:
            return False
        least = table.least_urgent_running
        if least is None:
            return False
        urgent = table.most_urgent_waiting
        return table.least_waiting_gpus <= self._migration.free or (urgent is not None and urgent > least)

    def given_up(self, plans: Iterable[MigrationPlan]) -> None:
        for plan in plans:
            self._look_later(plan.waiting)

    def make(self, found: PlanDraft) -> None:
        """Begin migration plans for the first pending jobs that the inner pass did not start."""
        migration = self._migration
        started = {change.number for change in found.changes if isinstance(change, StartChange)}
        numbers = found.line.tolist()
        out = started | migration.busy | migration.changed | self._resting
        if migration.context.order.is_strict:
            first = next((n for n in numbers if n not in out and is_waiting(migration.table, n)), None)
            numbers = [] if first is None else [first]
        vain: set[GangShape] = set()
        looks = 0
        # All others want more devices than are free and outrank no running job.
        for number in migration.table.asking(numbers, migration.free, migration.table.least_urgent_running):
            if number in out:
                continue
            got = migration.table.get(number)
            if got is None or (shape := got[0].shape) in vain:
                continue
            looked = self._looked.get(number, _NEVER)
            if migration.now < looked.again_s and migration.free <= looked.free:
                migration.come_back(looked.again_s)
                if looked.is_found:
                    self.soon.add(number)
            else:
                looks += 1
                self._make(got[0])
            vain.add(shape)
            if looks == _MOST_HOLES:
                break

    def _make(self, job: JobRecord) -> None:
        migration = self._migration
        waited = max(0.0, migration.now - job.pending_since)
        wished = replace_of(job.shape, locality=migration.context.terms.shape(job).locality)
        shape = replace_of(wished, locality=replace_of(wished.locality, widest=widest_now(wished, waited), wish=None))
        stay = migration.busy
        hole, worth_s, level = self._by_moves(job, shape, stay), 0.0, SuspendLevel.OFFLOAD
        if hole is not None:
            worth_s = hole.cost / max(1, shape.gpus)
        elif self._outranks(job) and shape.locality.widest == widest_now(job.shape, waited):
            # No job is parked for a place that is only better than a free one.
            hole, level = self._by_stops(job, shape, stay)
        if hole is None or not hole.moves:
            self._look_later(job.number)
            return
        if waited + SLACK_S < worth_s:
            is_soon = worth_s <= waited + _SOON_S
            if is_soon:
                self.soon.add(job.number)
            self._looked[job.number] = MakeRoomLook(job.pending_since + worth_s, migration.free, is_soon)
            migration.come_back(job.pending_since + worth_s)
            return
        if migration.under_way + len(hole.moves) > MOST_AT_ONCE:
            self._look_later(job.number)
            return
        saved = waited * shape.gpus - (hole.cost if worth_s else 0.0)
        migration.begin(Goal.HOLE, hole, job.number, max(0.0, saved), level=level)

    def _by_moves(self, job: JobRecord, shape: GangShape, stay: frozenset[int]) -> Hole | None:
        migration = self._migration
        if migration.free < shape.gpus:
            return None
        movables = Movables(
            migration.room.view, [one for other, _, one in migration.gangs.values() if _may_go(other, job)]
        )
        hole = hole_for(migration.room, movables, shape, placement=migration.placement, stay=stay)
        return hole if hole is not None and hole.moves else None

    def _by_stops(self, job: JobRecord, shape: GangShape, stay: frozenset[int]) -> tuple[Hole | None, SuspendLevel]:
        """Return the hole that costs least, and the level at which its victims rest: OFFLOAD if both cost the same."""
        best, at = None, SuspendLevel.OFFLOAD
        for level in (SuspendLevel.OFFLOAD, SuspendLevel.CHECKPOINT):
            gangs = self._stoppable(job, level)
            hole = swap_for(self._migration.room, gangs, shape, placement=self._migration.placement, stay=stay)
            if hole is not None and (best is None or badness(hole) < badness(best)):
                best, at = hole, level
        return best, at

    def _outranks(self, job: JobRecord) -> bool:
        least = self._migration.table.least_urgent_running
        return least is not None and least < job.spec.priority

    def _stoppable(self, job: JobRecord, level: SuspendLevel) -> list[Movable]:
        """Return gangs that may move for a job; those of lower priority may also rest at this level."""
        found = []
        for other, gang, one in self._migration.gangs.values():
            if not _may_go(other, job):
                continue
            if other.spec.priority < job.spec.priority and _can_rest(other, gang, level):
                claims = one.claims
                if level is SuspendLevel.OFFLOAD:
                    # A gang parked in host memory returns none of it.
                    claims = tuple([replace_of(claim, memory_bytes=0, arena_bytes=0) for claim in claims])
                cost = (1.0 + other.spec.priority - _LOWEST) * max(1, other.gpus)
                one = Movable(one.number, one.shape, claims, one.move_cost, cost)
            found.append(one)
        return found

    def _look_later(self, number: int) -> None:
        migration = self._migration
        got = migration.table.get(number) if number else None
        if got is not None:
            waited = max(_LEAST_LOOK_S, migration.now - got[0].pending_since)
            again_s = migration.now + (_LOOK_AGAIN - 1.0) * waited
            self._looked[number] = MakeRoomLook(max(again_s, migration.now + _LEAST_LOOK_S), migration.free)
            migration.come_back(self._looked[number].again_s)


def _can_rest(job: JobRecord, gang: Gang, level: SuspendLevel) -> bool:
    if level is SuspendLevel.CHECKPOINT:
        return job.capabilities.checkpoint
    return job.capabilities.offload and has_arenas(gang)


def _may_go(other: JobRecord, job: JobRecord) -> bool:
    """Return whether `other` may be moved for `job`, which must not rank below it."""
    return other.spec.movable and other.spec.priority <= job.spec.priority
