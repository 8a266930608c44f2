"""What jobs took that have ended, and what that lets expect of those that live (Gittins, in GPU-seconds)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from ganger_master.policies.job_facts import Floats
from ganger_master.policies.sorting import counted_below


@dataclass(frozen=True, slots=True, eq=False)
class ServiceHistory:
    """GPU-seconds of jobs that have ended, ascending. Making one sorts them all: make a new one once the jobs that
    ended since would shift it (a twentieth more, say), not at every end."""

    services: Floats
    _sums: Floats = field(repr=False)

    @classmethod
    def of(cls, services: ArrayLike) -> ServiceHistory:
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


NO_HISTORY = ServiceHistory.of(())
