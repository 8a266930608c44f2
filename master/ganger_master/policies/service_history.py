"""GPU-seconds of ended jobs, and Gittins's index of live jobs from them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from ganger_master.policies.job_facts import Floats
from ganger_master.policies.sorting import counted_below


@dataclass(frozen=True, slots=True, eq=False)
class ServiceHistory:
    """GPU-seconds of ended jobs, ascending. Construction sorts them all, so callers renew it once the new ends would
    shift it (about a twentieth more), not at every end."""

    services: Floats
    _sums: Floats = field(repr=False)

    @classmethod
    def of(cls, services: ArrayLike) -> ServiceHistory:
        """Make a history of GPU-seconds in any order; values that are not positive and finite are ignored."""
        given = np.asarray(services, float).ravel()
        known = np.sort(given[np.isfinite(given) & (given > 0)])
        return cls(known, np.concatenate(((0.0,), np.cumsum(known))))

    def index(self, attained: Floats, quantum: Floats) -> Floats:
        """Return Gittins's index of each job, in 1 / GPU-seconds. `attained` and `quantum` > 0, which may be infinite,
        are in GPU-seconds."""
        first = counted_below(self.services, attained)
        last = counted_below(self.services, attained + quantum)
        ending = last - first
        longer = len(self.services) - last
        taken = self._sums[last] - self._sums[first] - attained * ending
        # Avoids infinite x 0 where the quantum is infinite and no job is longer.
        taken += np.where(longer > 0, quantum, 0.0) * longer
        index: Floats = np.divide(ending, taken, out=np.zeros(len(attained)), where=taken > 0)
        return index


NO_HISTORY = ServiceHistory.of(())
