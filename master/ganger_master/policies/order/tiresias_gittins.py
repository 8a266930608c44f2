"""Tiresias with a history (2D-Gittins): as `tiresias`, and in a queue who most probably ends soon goes first.

Gu et al., NSDI 2019, section 3.3, after Gittins 1989: with S the GPU-seconds of jobs that have ended, a those a job has
attained and D those it may take until it falls into the next queue (no limit in the last),

    G(a, D) = P(S - a <= D | S > a) / E[min(S - a, D) | S > a].

Different from the authors' simulator, whose expectation sums S instead of S - a, so that long-served jobs look worse
than they are. A job that has outlived all of the history has index 0; ties are ranked as in `tiresias`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ganger_master.policies.facts import Capacity, Facts, Floats
from ganger_master.policies.order import Order
from ganger_master.policies.order.tiresias import THRESHOLDS, Queues
from ganger_master.policies.sorting import counted_below


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """GPU-seconds of jobs that have ended, ascending. Making one sorts them all: make a new one once the jobs that
    ended since would shift it (a twentieth more, say), not at every end."""

    services: Floats
    _sums: Floats = field(repr=False)

    @classmethod
    def of(cls, services: ArrayLike) -> History:
        """In any order; what is not above zero or not finite says nothing and is left out."""
        given = np.asarray(services, float).ravel()
        known = np.sort(given[np.isfinite(given) & (given > 0)])
        return cls(known, np.concatenate(((0.0,), np.cumsum(known))))

    def index(self, attained: Floats, quantum: Floats) -> Floats:
        """G of each job, in 1 / GPU-seconds; `quantum` > 0 may be infinite."""
        first = counted_below(self.services, attained)
        last = counted_below(self.services, attained + quantum)
        ending = last - first
        longer = len(self.services) - last
        taken = self._sums[last] - self._sums[first] - attained * ending
        # No time is taken beyond a quantum without end, by nobody: not infinite x 0.
        taken += np.where(longer > 0, quantum, 0.0) * longer
        index: Floats = np.divide(ending, taken, out=np.zeros(len(attained)), where=taken > 0)
        return index


NO_HISTORY = History.of(())


@dataclass(frozen=True, slots=True, eq=False)
class GittinsQueues:
    queues: Queues
    history: History

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        index = self.history.index(facts.service, self.queues.until_demotion(facts))
        return (self.queues.queue(facts), -index, ~facts.is_running, facts.started_s)


def tiresias_gittins(
    history: History, thresholds: tuple[float, ...] = THRESHOLDS, promote_knob: float | None = None
) -> Order:
    queues = Queues(thresholds, promote_knob)
    return Order("tiresias-gittins", GittinsQueues(queues, history).keys, next_change=queues.next_change)
