"""Moves that nobody waits for, while there is time: gangs closer together, fewer nodes that are neither full nor idle.

Each must save more than it costs, by what was measured; in an hour there are no more than the operator allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ganger_master.core.model import Job
from ganger_master.core.purpose import Goal
from ganger_master.planner.acting import MOST_AT_ONCE, Acting
from ganger_master.planner.brought import Brought
from ganger_master.policies.introspect.hole import Hole
from ganger_master.policies.introspect.migration import Proposal, Spread, Why, capped, closer, defragmented

# Who lies badly is looked for so often.
CLOSER_S: Final = 30.0
# Moves begun in an hour that neither a gang nor an operator waits for, at least: else one for each GPU in use.
_LEAST_AN_HOUR: Final = 16
_GOALS: Final = {
    Why.LOCALITY: Goal.LOCALITY,
    Why.HOLE: Goal.HOLE,
    Why.UNPACK: Goal.UNPACK,
    Why.DRAIN: Goal.DRAIN,
    Why.DEFRAGMENT: Goal.DEFRAGMENT,
}


class Tidying:
    """Of one pass. `moved_at`: when each job was last sent away; `closer_s`: when who lies badly was looked for."""

    def __init__(self, acting: Acting, brought: Brought, moved_at: Mapping[int, float], closer_s: float) -> None:
        self._acting = acting
        self._brought = brought
        self._moved_at = moved_at
        self.closer_s = closer_s

    def closer(self) -> None:
        """Gangs over several nodes that lie further apart than is good for them, as far as is known of their kind, into
        what is free."""
        acting = self._acting
        if acting.now < self.closer_s + CLOSER_S:
            return
        apart = [(job, gang) for job, gang in acting.running if len(gang.pieces) > 1 and job.spec.movable]
        gangs = acting.movable(apart).values()
        if not gangs:
            return
        self.closer_s = acting.now
        kinds = {job.number: acting.terms.rated.signature(job.number) for job, _, _ in gangs}
        models = {kind: self._brought.locality(kind) for kind in sorted(set(kinds.values()))}
        spreads = [Spread(one, models[kinds[job.number]], self._ran_s(job)) for job, _, one in gangs]
        failed, placement = self._brought.failed, acting.terms.placement
        self._propose(closer(acting.room, spreads, now=acting.now, failed=failed, placement=placement))

    def defragment(self) -> None:
        acting = self._acting
        gangs = [one for job, _, one in acting.gangs.values() if job.spec.movable]
        if self._left > 0:
            failed = self._brought.failed
            self._propose(defragmented(acting.room, gangs, most_moves=self._left, now=acting.now, failed=failed))

    def _ran_s(self, job: Job) -> float:
        """As long as it is expected to run yet."""
        return job.run_seconds + (max(0.0, self._acting.now - job.running_since) if job.running_since else 0.0)

    @property
    def _left(self) -> int:
        """Moves that nobody waits for and may still begin."""
        most = self._acting.terms.per_hour
        if most is None:
            most = max(_LEAST_AN_HOUR, sum(one.shape.gpus for _, _, one in self._acting.gangs.values()))
        return min(MOST_AT_ONCE, int(most - len(self._moved_at)))

    def _propose(self, proposals: Iterable[Proposal]) -> None:
        for proposal in capped(proposals, self._acting.now, self._moved_at, (), max(0, self._left)):
            self._acting.begin(_GOALS[proposal.why], Hole((), proposal.moves), saved=proposal.saves)
