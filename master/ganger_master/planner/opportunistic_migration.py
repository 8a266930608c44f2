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
from ganger_master.planner.job_table import is_shared
from ganger_master.planner.migration_context import MOST_AT_ONCE, MigrationContext
from ganger_master.planner.migration_outcomes import MigrationOutcomes
from ganger_master.planner.migration_plans import is_free
from ganger_master.policies.interference_relief import Crowded, relieved
from ganger_master.policies.make_room import Displacement, Hole, Movable
from ganger_master.policies.migration_choice import (
    GangDistance,
    MigrationProposal,
    MigrationReason,
    Packed,
    capped,
    closer,
    defragmented,
    exchanged,
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
        acting: MigrationContext,
        brought: MigrationOutcomes,
        moved_at: Mapping[int, float],
        closer_s: float,
        closer_again_s: float,
    ) -> None:
        self._acting = acting
        self._brought = brought
        self._moved_at = moved_at
        self.closer_s = closer_s
        self.closer_again_s = closer_again_s

    def go_back(self) -> None:
        """Revert migrations that made a job slower, where its old place is free."""
        acting = self._acting
        busy = acting.busy | acting.changed
        for number, owed in self._brought.owed.items():
            got = acting.gangs.get(number)
            if got is None or number in busy or self._left <= 0 or not is_free(acting.room.view, owed.source):
                continue
            saves = (1.0 - owed.gain) * acting.ran_s(got[0]) * got[2].shape.gpus - got[2].move_cost
            if saves > 0.0:
                acting.begin(Goal.UNDO, Hole((), (Displacement(got[2], owed.source),)), saved=saves)

    def closer(self) -> None:
        """Move gangs over several nodes closer together, where the locality model of their kind predicts a gain."""
        acting, next_s = self._acting, self.closer_s + CLOSER_S
        if acting.now < next_s and self.closer_again_s <= next_s:
            return
        apart = [(job, gang) for job, gang in acting.running if len(gang.pieces) > 1 and job.spec.movable]
        if acting.now < next_s:
            # The next search considers what has happened since.
            self.closer_again_s = next_s if apart else self.closer_again_s
            return
        gangs = acting.movable(apart).values()
        self.closer_again_s = math.inf
        if not gangs:
            return
        self.closer_s = acting.now
        spreads = self._spreads(gangs)
        # A gang for which any closer place would pay already is searched again only after an event.
        waits = [_MOVES * pays_anywhere_s(one.gang) - one.remaining_s for one in spreads]
        again_s = acting.now + min([one for one in waits if one > 0.0], default=math.inf)
        failed, placement = self._brought.failed, acting.terms.placement
        proposals = closer(acting.room, spreads, now=acting.now, failed=failed, placement=placement)
        again_s = min(again_s, self._propose(proposals))
        if not acting.errands:
            # Without a measurement no gain is known that would be worth two moves.
            known = [one for one in spreads if one.locality.error != NOT_FITTED]
            if known:
                others = self._spreads(
                    [found for found in acting.gangs.values() if found[2].shape.gpus > 1 and found[0].spec.movable]
                )
                proposals = exchanged(acting.room, known, others, now=acting.now, failed=failed, placement=placement)
                again_s = min(again_s, self._propose(proposals))
        self.closer_again_s = max(again_s, acting.now + CLOSER_S)

    def unpack(self) -> None:
        """Move gangs out of co-locations that are slower than the gangs alone, onto devices that no pending job
        wants."""
        acting, rated = self._acting, self._acting.terms.rated
        if not acting.free:
            return
        groups: dict[frozenset[int], list[tuple[JobRecord, Gang]]] = {}
        for job, gang in acting.running:
            if is_shared(gang) and (mates := rated.beside(job.number)):
                groups.setdefault(mates | {job.number}, []).append((job, gang))
        packs: list[Packed] = []
        horizon_s = math.inf
        for group, pairs in groups.items():
            if len(pairs) < len(group) or group & acting.terms.on_trial:
                continue
            rates = [TrialRates(rated.alone(number), rated.present(number)[-_WINDOWS:]) for number in sorted(group)]
            if not all(len(one.before) > 1 and len(one.after) >= FIRST_WINDOWS for one in rates):
                continue
            horizon_s = min(horizon_s, *[acting.ran_s(job) for job, _ in pairs])
            pack = Packed(_most_gain(tuple(rates)), len(group), ())
            # Most co-locations need no search for movable gangs.
            if pack.is_slow:
                movable = [one for job, _, one in acting.movable(pairs, packed=True).values() if job.spec.movable]
                packs.append(replace(pack, movable=tuple(movable)))
        if packs:
            failed, placement = self._brought.failed, acting.terms.placement
            self._propose(unpacked(acting.room, packs, horizon_s, placement, now=acting.now, failed=failed))

    def balance(self) -> None:
        """Move gangs that measurably suffer from other gangs on their node to emptier nodes."""
        acting, rated = self._acting, self._acting.terms.rated
        seen = {job.number: rated.crowd(job.number) for job, gang in acting.running if len(gang.pieces) == 1}
        seen = {number: crowd for number, crowd in seen.items() if len(crowd[1]) > 1}
        if not seen:
            return
        # Measurements are no event that would start a pass.
        acting.come_back(acting.now + _BALANCE_S)
        pairs = [(job, gang) for job, gang in acting.running if job.number in seen and job.spec.movable]
        gangs = [Crowded(one, *seen[job.number], acting.ran_s(job)) for job, _, one in acting.movable(pairs).values()]
        failed, placement = self._brought.failed, acting.terms.placement
        self._propose(relieved(acting.room, gangs, now=acting.now, failed=failed, placement=placement))

    def _spreads(self, gangs: Iterable[tuple[JobRecord, Gang, Movable]]) -> list[GangDistance]:
        models: dict[str, LocalityModel] = {}
        found = []
        for job, _, one in gangs:
            if one.kind not in models:
                models[one.kind] = self._brought.locality(one.kind)
            found.append(GangDistance(one, models[one.kind], self._acting.ran_s(job), job.shape.locality.widest))
        return found

    def defragment(self) -> None:
        acting = self._acting
        gangs = [one for job, _, one in acting.gangs.values() if job.spec.movable]
        if self._left > 0:
            failed = self._brought.failed
            self._propose(defragmented(acting.room, gangs, most_moves=self._left, now=acting.now, failed=failed))

    @property
    def _left(self) -> int:
        """The number of opportunistic moves that may still begin."""
        acting = self._acting
        if acting.terms.per_hour is None:
            most = float(max(_LEAST_AN_HOUR, acting.movable_gpus))
        else:
            most = acting.terms.per_hour * len(acting.room.view)
        begun = sum(len(errand.legs) for errand in acting.errands if errand.began_s == acting.now)
        return min(MOST_AT_ONCE, int(most - len(self._moved_at) - begun))

    def _propose(self, proposals: Sequence[MigrationProposal]) -> float:
        """Begin the migrations that may begin. If none may now, return when the first one may without any event."""
        if not proposals:
            return math.inf
        acting = self._acting
        chosen = capped(proposals, acting.now, self._moved_at, (), max(0, self._left))
        for proposal in chosen:
            goal, moves = _GOALS[proposal.why], Hole((), proposal.moves)
            last = Goal.LOCALITY if proposal.why is MigrationReason.EXCHANGE else None
            acting.begin(goal, moves, saved=proposal.saves, last_goal=last)
        if chosen:
            # The end of a migration plan is an event.
            return math.inf
        # Once the last hour has one move less.
        allowed_s = min(self._moved_at.values(), default=math.inf) + HOUR_S
        rests = [rested_s(proposal, self._moved_at) for proposal in proposals]
        when_s = min([rest_s if acting.now < rest_s else allowed_s for rest_s in rests], default=math.inf)
        acting.come_back(when_s)
        return when_s


# Co-locations are judged again and again, mostly by the same windows.
@lru_cache(4096)
def _most_gain(rates: tuple[TrialRates, ...]) -> float:
    """Return the upper bound of what a co-location gains, so that chance does not end co-locations."""
    return normalised(rates).bounds(DOUBT)[1]
