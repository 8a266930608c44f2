"""Migrations that no pending job needs: back to where a job was faster, gangs closer together by moving or exchanging
them, and fewer partly used nodes.

Each must save more than it costs, by measured rates. The operator limits their number per hour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import Goal
from ganger_master.estimators.fitting import NOT_FITTED
from ganger_master.estimators.slowdown import LocalityModel
from ganger_master.planner.device_groups import is_shared
from ganger_master.planner.migration_context import MOST_AT_ONCE, MigrationContext, goes_alone
from ganger_master.planner.migration_outcomes import MigrationOutcomes
from ganger_master.planner.migration_plans import is_free
from ganger_master.policies.interference_relief import Crowded, relieved
from ganger_master.policies.make_room import Displacement, Hole, Movable
from ganger_master.policies.migration_choice import (
    FreeDeviceCounts,
    GangDistance,
    MigrationProposal,
    MigrationReason,
    Packed,
    capped,
    closer,
    defragmented,
    exchanged,
    fragmented_nodes,
    pays_anywhere_s,
    rested_s,
    unpacked,
)
from ganger_master.policies.trials import DOUBT, FIRST_WINDOWS, TrialRates, normalised

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
_GOALS: Final = {
    MigrationReason.LOCALITY: Goal.LOCALITY,
    MigrationReason.HOLE: Goal.HOLE,
    MigrationReason.UNPACK: Goal.UNPACK,
    MigrationReason.DRAIN: Goal.DRAIN,
    MigrationReason.DEFRAGMENT: Goal.DEFRAGMENT,
    MigrationReason.EXCHANGE: Goal.EXCHANGE,
    MigrationReason.UNDO: Goal.UNDO,
    MigrationReason.BALANCE: Goal.BALANCE,
}


class OpportunisticMigration:
    """The opportunistic migrations of one pass. `moved_at`: when each job was last moved; `closer_s`: when spread gangs
    were searched last; `closer_again_s`: when they are again without any event. All in Unix seconds."""

    def __init__(
        self,
        migration: MigrationContext,
        outcomes: MigrationOutcomes,
        moved_at: Mapping[int, float],
        closer_s: float,
        closer_again_s: float,
    ) -> None:
        self._migration = migration
        self._outcomes = outcomes
        self._moved_at = moved_at
        self.closer_s = closer_s
        self.closer_again_s = closer_again_s

    def go_back(self) -> None:
        """Revert migrations that made a job slower, where its old place is free."""
        migration = self._migration
        busy = migration.busy | migration.changed
        for number, owed in self._outcomes.owed.items():
            got = migration.gangs.get(number)
            if got is None or number in busy or self._left <= 0 or not is_free(migration.room.view, owed.source):
                continue
            saves = (1.0 - owed.gain) * migration.ran_s(got[0]) * got[2].shape.gpus - got[2].move_cost
            if saves > 0.0:
                migration.begin(Goal.UNDO, Hole((), (Displacement(got[2], owed.source),)), saved=saves)

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
        apart = [pair for pair in apart if goes_alone(*pair)]
        self.closer_again_s = math.inf
        if not apart:
            return
        self.closer_s = migration.now
        # Most gangs have no closer place: it is quicker to count than to search. Only of a measured kind are gangs
        # exchanged.
        free, measured = FreeDeviceCounts(migration.room.view), self._outcomes.points
        gangs = migration.movable(
            [
                (job, gang)
                for job, gang in apart
                if free.has_closer(gang.claims) or (measured and migration.rates.signature(job.number) in measured)
            ]
        ).values()
        spreads = self._spreads(gangs)
        # A gang for which any closer place would pay already is searched again only after an event.
        waits = [_MOVES * pays_anywhere_s(one.gang) - one.remaining_s for one in spreads]
        again_s = migration.now + min([one for one in waits if one > 0.0], default=math.inf)
        failed, placement = self._outcomes.failed, migration.placement
        proposals = closer(migration.room, spreads, now=migration.now, failed=failed, placement=placement)
        again_s = min(again_s, self._propose(proposals))
        if not migration.plans:
            # Without a measurement no gain is known that would be worth two moves.
            known = [one for one in spreads if one.locality.error != NOT_FITTED]
            if known:
                others = self._spreads(
                    [found for found in migration.gangs.values() if found[2].shape.gpus > 1 and found[0].spec.movable]
                )
                proposals = exchanged(
                    migration.room, known, others, now=migration.now, failed=failed, placement=placement
                )
                again_s = min(again_s, self._propose(proposals))
        self.closer_again_s = max(again_s, migration.now + CLOSER_S)

    def unpack(self) -> None:
        """Move gangs out of co-locations that are slower than the gangs alone, onto devices that no pending job
        wants."""
        migration, rates = self._migration, self._migration.rates
        if not migration.free or not migration.table.has_sharing:
            return
        groups: dict[frozenset[int], list[tuple[JobRecord, Gang]]] = {}
        for job, gang in migration.running:
            if is_shared(gang) and (mates := rates.beside(job.number)):
                groups.setdefault(mates | {job.number}, []).append((job, gang))
        packs: list[Packed] = []
        horizon_s = math.inf
        for group, pairs in groups.items():
            if len(pairs) < len(group) or group & migration.context.on_trial:
                continue
            tried = [TrialRates(rates.alone(number), rates.present(number)[-_WINDOWS:]) for number in sorted(group)]
            if not all(len(one.before) > 1 and len(one.after) >= FIRST_WINDOWS for one in tried):
                continue
            horizon_s = min(horizon_s, *[migration.ran_s(job) for job, _ in pairs])
            pack = Packed(_most_gain(tuple(tried)), len(group), ())
            # Most co-locations need no search for movable gangs.
            if pack.is_slow:
                movable = [one for job, _, one in migration.movable(pairs, packed=True).values() if job.spec.movable]
                packs.append(replace(pack, movable=tuple(movable)))
        if packs:
            failed, placement = self._outcomes.failed, migration.placement
            self._propose(unpacked(migration.room, packs, horizon_s, placement, now=migration.now, failed=failed))

    def balance(self) -> None:
        """Move gangs that measurably suffer from other gangs on their node to emptier nodes."""
        migration, rates = self._migration, self._migration.rates
        seen = {
            number: rates.crowd(number)
            for number in rates.compared
            if (found := migration.table.get(number)) and found[1] is not None and len(found[1].pieces) == 1
        }
        if not seen:
            return
        # Measurements are no event that would start a pass.
        migration.come_back(migration.now + _BALANCE_S)
        pairs = [(job, gang) for job, gang in migration.running if job.number in seen and job.spec.movable]
        gangs = [
            Crowded(one, *seen[job.number], migration.ran_s(job)) for job, _, one in migration.movable(pairs).values()
        ]
        failed, placement = self._outcomes.failed, migration.placement
        self._propose(relieved(migration.room, gangs, now=migration.now, failed=failed, placement=placement))

    def _spreads(self, gangs: Iterable[tuple[JobRecord, Gang, Movable]]) -> list[GangDistance]:
        models: dict[str, LocalityModel] = {}
        found = []
        for job, _, one in gangs:
            if one.kind not in models:
                models[one.kind] = self._outcomes.locality(one.kind)
            found.append(GangDistance(one, models[one.kind], self._migration.ran_s(job), job.shape.locality.widest))
        return found

    def defragment(self) -> None:
        """Move gangs off nodes of which few devices are in use."""
        migration = self._migration
        nodes = fragmented_nodes(migration.room.view)
        pairs = [(job, gang) for job, gang in migration.table.within(nodes) if job.spec.movable]
        if pairs and self._left > 0:
            gangs = [one for _, _, one in migration.movable(pairs).values()]
            failed = self._outcomes.failed
            self._propose(defragmented(migration.room, gangs, most_moves=self._left, now=migration.now, failed=failed))

    @property
    def _left(self) -> int:
        """The number of opportunistic moves that may still begin."""
        migration = self._migration
        if migration.context.cluster.moves_per_hour is None:
            most = float(max(_LEAST_AN_HOUR, migration.movable_gpus))
        else:
            most = migration.context.cluster.moves_per_hour * len(migration.room.view)
        begun = sum(len(plan.steps) for plan in migration.plans if plan.began_s == migration.now)
        return min(MOST_AT_ONCE, int(most - len(self._moved_at) - begun))

    def _propose(self, proposals: Sequence[MigrationProposal]) -> float:
        """Begin the migrations that may begin. If none may now, return when the first one may without any event."""
        if not proposals:
            return math.inf
        migration = self._migration
        chosen = capped(proposals, migration.now, self._moved_at, (), max(0, self._left))
        for proposal in chosen:
            goal, moves = _GOALS[proposal.why], Hole((), proposal.moves)
            last = Goal.LOCALITY if proposal.why is MigrationReason.EXCHANGE else None
            migration.begin(goal, moves, saved=proposal.saves, last_goal=last)
        if chosen:
            # The end of a migration plan is an event.
            return math.inf
        # Once the last hour has one move less.
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
