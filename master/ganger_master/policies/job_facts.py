"""Facts about live jobs that a policy may read, as columns; their sorting; and the service of ended jobs.

Seconds are on the master's clock. A job is live from its submission to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import fields, replace
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Resources of the nodes that accept gangs."""

    gpus: int
    cores: float
    memory_bytes: float
    # Of the largest node.
    gpus_per_node: int


class Facts(Struct, frozen=True, eq=False, gc=False):
    """One entry per live job, in any order."""

    number: Integers
    arrival_s: Floats
    # The gang that it has or asks for.
    gpus: Integers
    cores: Floats
    memory_bytes: Floats
    priority: Integers
    weight: Floats
    # The same number for the jobs of one user.
    user: Integers
    # Infinite: none.
    deadline_s: Floats
    # Holds a gang that it has not been ordered to release.
    is_running: Flags
    is_preemptible: Flags
    # Seconds that it has run, over all stretches.
    attained_s: Floats
    # Seconds since it last ran, or since it was submitted; zero while it runs.
    waited_s: Floats
    # When it first held a gang; infinite: never yet.
    started_s: Floats
    # Length of the present stretch of running, and of the wait before it; zero while the job is pending.
    stretch_s: Floats
    waited_before_s: Floats
    # Estimate from its own progress or similar jobs, at the rate of its whole gang alone; NaN: no estimate.
    expected_remaining_s: Floats
    # Gittins's index from similar jobs, in 1 / GPU-seconds; NaN: the order does not learn.
    index: Floats
    # An oracle's value, at the rate of its whole gang alone; NaN where the order has none (`JobOrder.knows_durations`),
    # so that no other order can read it.
    remaining_s: Floats

    def __len__(self) -> int:
        return len(self.number)

    @property
    def service(self) -> Floats:
        """Attained GPU-seconds."""
        return self.attained_s * self.gpus

    def take(self, jobs: NDArray[Any]) -> Facts:
        """Return the jobs at these positions, or where this mask is true."""
        return replace(self, **{column.name: getattr(self, column.name)[jobs] for column in fields(type(self))})


def sorted_by(*columns: NDArray[Any]) -> Integers:
    """Return positions, smallest first: the first column decides, then the next. Complete ties keep their order; NaN
    comes last."""
    return np.lexsort(columns[::-1])


def behind(columns: Sequence[NDArray[Any]], at: int) -> Flags:
    """Return which rows sort after the one at this position; a row that equals it in all columns does not."""
    found, is_tied = np.zeros(len(columns[0]), bool), np.ones(len(columns[0]), bool)
    for column in columns:
        value = column[at]
        if value != value:
            is_tied &= column != column
        else:
            found |= is_tied & ~(column <= value)
            is_tied &= column == value
        if np.count_nonzero(is_tied) == 1:
            # Only the row itself is still tied.
            break
    return found


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
        first = np.searchsorted(self.services, attained, side="right")
        last = np.searchsorted(self.services, attained + quantum, side="right")
        ending = last - first
        longer = len(self.services) - last
        taken = self._sums[last] - self._sums[first] - attained * ending
        # Avoids infinite x 0 where the quantum is infinite and no job is longer.
        taken += np.where(longer > 0, quantum, 0.0) * longer
        return np.asarray(np.divide(ending, taken, out=np.zeros(len(attained)), where=taken > 0), float)


NO_HISTORY = ServiceHistory.of(())
# Ended jobs that a history is made from, and the share of them by which it may lag behind.
_HISTORY, _STALE = 20_000, 0.05


class RecentServices:
    """The service history of the jobs that ended last, renewed after every twentieth part of them."""

    def __init__(self) -> None:
        self._services: deque[float] = deque(maxlen=_HISTORY)
        self._history, self._since = NO_HISTORY, 0

    def add(self, gpu_seconds: float) -> None:
        """Record a job that has ended."""
        self._services.append(gpu_seconds)
        self._since += 1

    @property
    def history(self) -> ServiceHistory:
        if self._since > _STALE * len(self._history.services):
            self._history, self._since = ServiceHistory.of(self._services), 0
        return self._history
