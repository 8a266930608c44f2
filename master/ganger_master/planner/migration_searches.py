"""The searches of a migration pass: room for pending gangs, and opportunistic migrations, which no pending job needs.

Migrations make room once the gang's wait, in GPU-seconds, exceeds their cost to other jobs. A gang that outranks others
preempts them: into host memory, or onto storage if parking in host memory needs more victims. An opportunistic
migration must save more than it costs, by measured rates; the operator limits their number per hour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from ganger.cluster.resources import GangShape
from ganger.cluster.search import widest_now
from msgspec.structs import replace as replace_of

from ganger_master.core.colocation import has_arenas
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import Goal, StartChange
from ganger_master.estimators.fitting import NOT_FITTED
from ganger_master.estimators.speed import LocalityModel
from ganger_master.planner.context import PlanDraft
from ganger_master.planner.device_groups import is_free, is_shared
from ganger_master.planner.migration_outcomes import MigrationOutcomes
from ganger_master.planner.migration_plans import (
    MOST_AT_ONCE,
    MigrationContext,
    MigrationPlan,
    SearchResult,
    goes_alone,
    is_waiting,
)
from ganger_master.policies.make_room import Displacement, Movable, Movables, RoomPlan, no_further, room_for
from ganger_master.policies.migration_choice import (
    FreeDeviceCounts,
    GangDistance,
    MeasuredColocation,
    MigrationProposal,
    MigrationTerms,
    SlowedGang,
    capped,
    closer,
    defragmented,
    exchanged,
    fragmented_nodes,
    pays_anywhere_s,
    relieved,
    rested_s,
    separated,
)
from ganger_master.policies.orders import SLACK_S
from ganger_master.policies.park_and_move import cost_key, swap_for
from ganger_master.policies.trials import DOUBT, FIRST_WINDOWS, TrialRates, normalised

# Most searches in one pass, in rank order: one takes as long as many placements.
_MOST_SEARCHES: Final = 4
# No job is preempted for a gang that moves will make room for within this time.
_SOON_S: Final = 60.0
# Lowest priority of a job: the cost of a victim is its priority above this one.
_LOWEST: Final = -1000
# A failed search is repeated when more devices are free, or when the gang has waited this many times as long.
_LOOK_AGAIN: Final = 2.0
_LEAST_LOOK_S: Final = 5.0
_NEVER: Final = SearchResult(-math.inf, 0)


class MakeRoomSearch:
    """The searches of one pass. `results`: of the last pass, by job; `excluded`: pending jobs to pass over."""

    def __init__(
        self, migration: MigrationContext, results: Mapping[int, SearchResult], excluded: frozenset[int] = frozenset()
    ) -> None:
        self._migration, self._excluded = migration, excluded
        self._results = dict(results)
        # Numbers of jobs whose moves will be worth their cost soon: no job is preempted for them meanwhile.
        self.soon: set[int] = set()

    @property
    def results(self) -> dict[int, SearchResult]:
        """The results that pending jobs keep for the next pass."""
        return {number: one for number, one in self._results.items() if is_waiting(self._migration.table, number)}

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
        """Delay the next search for jobs whose migration plan was abandoned."""
        for plan in plans:
            self._look_later(plan.waiting)

    def make(self, found: PlanDraft) -> None:
        """Begin migration plans for the first pending jobs that the inner pass did not start."""
        migration = self._migration
        started = {change.number for change in found.changes if isinstance(change, StartChange)}
        numbers = found.line.tolist()
        out = started | migration.busy | migration.changed | self._excluded
        if migration.context.order.is_strict:
            first = next((n for n in numbers if n not in out and is_waiting(migration.table, n)), None)
            numbers = [] if first is None else [first]
        failed_shapes: set[GangShape] = set()
        searches = 0
        # All others want more devices than are free and outrank no running job.
        for number in migration.table.asking(numbers, migration.free, migration.table.least_urgent_running):
            if number in out:
                continue
            got = migration.table.get(number)
            if got is None or (shape := got[0].shape) in failed_shapes:
                continue
            last = self._results.get(number, _NEVER)
            if migration.now < last.again_s and migration.free <= last.free:
                migration.come_back(last.again_s)
                if last.is_found:
                    self.soon.add(number)
            else:
                searches += 1
                self._make(got[0])
            failed_shapes.add(shape)
            if searches == _MOST_SEARCHES:
                break

    def _make(self, job: JobRecord) -> None:
        migration = self._migration
        waited = max(0.0, migration.now - job.pending_since)
        wished = replace_of(job.shape, locality=migration.context.terms.shape(job).locality)
        shape = no_further(wished, widest_now(wished, waited))
        stay = migration.busy
        room_plan, worth_s, level = self._by_moves(job, shape, stay), 0.0, SuspendLevel.OFFLOAD
        if room_plan is not None:
            worth_s = room_plan.cost / max(1, shape.gpus)
        elif self._outranks(job) and shape.locality.widest == widest_now(job.shape, waited):
            # Preempt no job if a free place exists that is only worse.
            room_plan, level = self._by_stops(job, shape, stay)
        if room_plan is None or not room_plan.moves:
            self._look_later(job.number)
            return
        if waited + SLACK_S < worth_s:
            is_soon = worth_s <= waited + _SOON_S
            if is_soon:
                self.soon.add(job.number)
            self._results[job.number] = SearchResult(job.pending_since + worth_s, migration.free, is_soon)
            migration.come_back(job.pending_since + worth_s)
            return
        if migration.under_way + len(room_plan.moves) > MOST_AT_ONCE:
            self._look_later(job.number)
            return
        saved = waited * shape.gpus - (room_plan.cost if worth_s else 0.0)
        migration.begin(Goal.HOLE, room_plan, job.number, max(0.0, saved), level=level)

    def _by_moves(self, job: JobRecord, shape: GangShape, stay: frozenset[int]) -> RoomPlan | None:
        migration = self._migration
        if migration.free < shape.gpus:
            return None
        movables = Movables(
            migration.room.view, [one for other, _, one in migration.gangs.values() if _may_go(other, job)]
        )
        room_plan = room_for(migration.room, movables, shape, placement=migration.placement, stay=stay)
        return room_plan if room_plan is not None and room_plan.moves else None

    def _by_stops(self, job: JobRecord, shape: GangShape, stay: frozenset[int]) -> tuple[RoomPlan | None, SuspendLevel]:
        """Return the cheapest plan, and the level at which its victims are parked: OFFLOAD if both cost the same."""
        best, at = None, SuspendLevel.OFFLOAD
        for level in (SuspendLevel.OFFLOAD, SuspendLevel.CHECKPOINT):
            gangs = self._stoppable(job, level)
            room_plan = swap_for(self._migration.room, gangs, shape, placement=self._migration.placement, stay=stay)
            if room_plan is not None and (best is None or cost_key(room_plan) < cost_key(best)):
                best, at = room_plan, level
        return best, at

    def _outranks(self, job: JobRecord) -> bool:
        least = self._migration.table.least_urgent_running
        return least is not None and least < job.priority

    def _stoppable(self, job: JobRecord, level: SuspendLevel) -> list[Movable]:
        """Return gangs that may move for a job; those of lower priority may also be parked at this level."""
        found = []
        for other, gang, one in self._migration.gangs.values():
            if not _may_go(other, job):
                continue
            if other.priority < job.priority and other.preemptible and _can_rest(other, gang, level):
                claims = one.claims
                if level is SuspendLevel.OFFLOAD:
                    # Parking at OFFLOAD frees no host memory.
                    claims = tuple([replace_of(claim, memory_bytes=0, arena_bytes=0) for claim in claims])
                cost = (1.0 + other.priority - _LOWEST) * max(1, other.gpus)
                one = Movable(one.number, one.shape, claims, one.move_cost, cost)
            found.append(one)
        return found

    def _look_later(self, number: int) -> None:
        migration = self._migration
        got = migration.table.get(number) if number else None
        if got is not None:
            waited = max(_LEAST_LOOK_S, migration.now - got[0].pending_since)
            again_s = migration.now + (_LOOK_AGAIN - 1.0) * waited
            self._results[number] = SearchResult(max(again_s, migration.now + _LEAST_LOOK_S), migration.free)
            migration.come_back(self._results[number].again_s)


def _can_rest(job: JobRecord, gang: Gang, level: SuspendLevel) -> bool:
    if level is SuspendLevel.CHECKPOINT:
        return job.capabilities.checkpoint
    return job.capabilities.offload and has_arenas(gang)


def _may_go(other: JobRecord, job: JobRecord) -> bool:
    """Return whether `other` may be moved for `job`, which must not rank below it."""
    return other.spec.movable and other.priority <= job.priority


# Seconds between two searches for gangs that are spread too far.
CLOSER_S: Final = 30.0
HOUR_S: Final = 3600.0
# The least limit of opportunistic moves in an hour; else one for each GPU in use.
_LEAST_AN_HOUR: Final = 16
# Seconds between two searches for gangs that other gangs slow down.
_BALANCE_S: Final = 60.0
# A closer place takes one move, or two if gangs exchange places.
_MOVES: Final = 2
# The latest windows of a co-location that count.
_WINDOWS: Final = 16


class OpportunisticMigration:
    """The opportunistic migrations of one pass. `moved_at`: when each job was last moved; `closer_s`: when spread gangs
    were searched last; `closer_again_s`: when they are due again if no event comes before. All in Unix seconds."""

    def __init__(
        self,
        migration: MigrationContext,
        outcomes: MigrationOutcomes,
        moved_at: Mapping[int, float],
        closer_s: float,
        closer_again_s: float,
    ) -> None:
        self._migration, self._outcomes, self._moved_at = migration, outcomes, moved_at
        self._terms = MigrationTerms(migration.room, migration.now, outcomes.failed, migration.placement)
        self.closer_s = closer_s
        self.closer_again_s = closer_again_s

    def revert(self) -> None:
        """Revert migrations that made a job slower, where its old place is free."""
        migration = self._migration
        busy = migration.busy | migration.changed
        for number, reverts in self._outcomes.pending_reverts.items():
            got = migration.gangs.get(number)
            if got is None or number in busy or self._left <= 0 or not is_free(migration.room.view, reverts.source):
                continue
            saves = (1.0 - reverts.gain) * migration.left_s(got[0]) * got[2].shape.gpus - got[2].move_cost
            if saves > 0.0:
                migration.begin(Goal.UNDO, RoomPlan((), (Displacement(got[2], reverts.source),)), saved=saves)

    def closer(self) -> None:
        """Move gangs over several nodes closer together, where the locality model of their kind predicts a gain."""
        migration, next_s = self._migration, self.closer_s + CLOSER_S
        if migration.now < next_s and self.closer_again_s <= next_s:
            return
        apart = [(job, gang) for job, gang in migration.table.apart if job.spec.movable]
        if migration.now < next_s:
            # The next search considers what has happened since.
            self.closer_again_s = next_s if apart else self.closer_again_s
            return
        self.closer_again_s = math.inf
        if not any(goes_alone(*pair) for pair in apart):
            return
        self.closer_s = migration.now
        # Most gangs have no closer place: to count is quicker than to search. Only measured kinds are exchanged.
        free, measured = FreeDeviceCounts(migration.room.view), self._outcomes.points
        gangs = migration.movable(
            [
                (job, gang)
                for job, gang in apart
                if free.has_closer(gang.claims) or (measured and migration.rates.signature(job.number) in measured)
            ]
        ).values()
        spreads = self._spreads(gangs)
        # Gangs for which every closer place pays already need an event for another search.
        waits = [_MOVES * pays_anywhere_s(one.gang) - one.remaining_s for one in spreads]
        again_s = migration.now + min([one for one in waits if one > 0.0], default=math.inf)
        proposals = closer(self._terms, spreads)
        again_s = min(again_s, self._propose(proposals))
        if not migration.plans:
            # An exchange costs two migrations, so it needs a measured gain.
            known = [one for one in spreads if one.locality.error != NOT_FITTED]
            if known:
                others = self._spreads(
                    [found for found in migration.gangs.values() if found[2].shape.gpus > 1 and found[0].spec.movable]
                )
                proposals = exchanged(self._terms, known, others)
                again_s = min(again_s, self._propose(proposals))
        self.closer_again_s = max(again_s, migration.now + CLOSER_S)

    def separate(self) -> None:
        """Move gangs out of co-locations slower than the gangs alone, onto devices that no pending job wants."""
        migration, rates = self._migration, self._migration.rates
        if not migration.free or not migration.table.has_sharing:
            return
        groups: dict[frozenset[int], list[tuple[JobRecord, Gang]]] = {}
        for job, gang in migration.running:
            if is_shared(gang) and (co_located := rates.neighbours(job.number)):
                groups.setdefault(co_located | {job.number}, []).append((job, gang))
        colocations: list[MeasuredColocation] = []
        horizon_s = math.inf
        for group, pairs in groups.items():
            if len(pairs) < len(group) or group & migration.context.on_trial:
                continue
            tried = [TrialRates(rates.alone(number), rates.present(number)[-_WINDOWS:]) for number in sorted(group)]
            if not all(len(one.before) > 1 and len(one.after) >= FIRST_WINDOWS for one in tried):
                continue
            horizon_s = min(horizon_s, *[migration.left_s(job) for job, _ in pairs])
            colocation = MeasuredColocation(_most_gain(tuple(tried)), len(group), ())
            # Most co-locations need no search for movable gangs.
            if colocation.is_slow:
                movable = [one for job, _, one in migration.movable(pairs, packed=True).values() if job.spec.movable]
                colocations.append(replace(colocation, movable=tuple(movable)))
        if colocations:
            self._propose(separated(self._terms, colocations, horizon_s))

    def balance(self) -> None:
        """Move gangs that measurably suffer from other gangs on their node to emptier nodes."""
        migration, rates = self._migration, self._migration.rates
        seen = {
            number: rates.interference(number)
            for number in rates.compared
            if (found := migration.table.get(number)) and found[1] is not None and len(found[1].pieces) == 1
        }
        if not seen:
            return
        # Measurements are no event that would start a pass.
        migration.come_back(migration.now + _BALANCE_S)
        pairs = [(job, gang) for job, gang in migration.running if job.number in seen and job.spec.movable]
        gangs = [
            SlowedGang(one, *seen[job.number], migration.left_s(job))
            for job, _, one in migration.movable(pairs).values()
        ]
        self._propose(relieved(self._terms, gangs))

    def _spreads(self, gangs: Iterable[tuple[JobRecord, Gang, Movable]]) -> list[GangDistance]:
        models: dict[str, LocalityModel] = {}
        found = []
        for job, _, one in gangs:
            if one.kind not in models:
                models[one.kind] = self._outcomes.locality(one.kind)
            found.append(GangDistance(one, models[one.kind], self._migration.left_s(job), job.shape.locality.widest))
        return found

    def defragment(self) -> None:
        """Move gangs off nodes of which few devices are in use."""
        migration = self._migration
        nodes = fragmented_nodes(migration.room.view)
        pairs = [(job, gang) for job, gang in migration.table.within(nodes) if job.spec.movable] if nodes else []
        if pairs and self._left > 0:
            gangs = [one for _, _, one in migration.movable(pairs).values()]
            self._propose(defragmented(self._terms, gangs, self._left))

    @property
    def _left(self) -> int:
        migration = self._migration
        begun = sum([len(plan.steps) for plan in migration.plans if plan.began_s == migration.now])
        counted = len(self._moved_at) + begun
        if migration.context.cluster.moves_per_hour is None:
            most = float(max(_LEAST_AN_HOUR, migration.movable_gpus(MOST_AT_ONCE + counted)))
        else:
            most = migration.context.cluster.moves_per_hour * len(migration.room.view)
        return min(MOST_AT_ONCE, int(most - counted))

    def _propose(self, proposals: Sequence[MigrationProposal]) -> float:
        """Begin the migrations that may begin. If none may now, return when the first one may without any event."""
        if not proposals:
            return math.inf
        migration = self._migration
        chosen = capped(proposals, migration.now, self._moved_at, max(0, self._left))
        for proposal in chosen:
            last = Goal.LOCALITY if proposal.goal is Goal.EXCHANGE else None
            migration.begin(proposal.goal, RoomPlan((), proposal.moves), saved=proposal.saves, last_goal=last)
        if chosen:
            # The end of a migration plan is an event.
            return math.inf
        # When the oldest migration of the last hour no longer counts.
        allowed_s = min(self._moved_at.values(), default=math.inf) + HOUR_S
        rests = [rested_s(proposal, self._moved_at) for proposal in proposals]
        when_s = min([rest_s if migration.now < rest_s else allowed_s for rest_s in rests], default=math.inf)
        migration.come_back(when_s)
        return when_s


# Co-locations are judged again and again, mostly by the same windows.
@lru_cache(4096)
def _most_gain(rates: tuple[TrialRates, ...]) -> float:
    """Return the upper bound of what a co-location gains, so that chance does not end co-locations."""
    return normalised(rates).bounds(DOUBT)[1]
