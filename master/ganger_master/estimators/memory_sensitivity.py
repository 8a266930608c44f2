"""W[c, m]: the rate of a job with c cores and m memory for each of its GPUs, and where to measure the cores.

Synergy (OSDI 2022), optimistic profiling: only the cores are measured, at full memory, and only where the rate still
changes. The cell of a job's fair share is the floor that no scheduler may take the job below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ganger_master.estimators.cpu import CpuPoint, averaged
from ganger_master.estimators.fitting import Floats

# Ends of an interval closer than this need no point between them (Synergy's fixed threshold).
SAME_RATE = 0.1
# What Synergy's profiler needs at most on a 24-core server; each costs the job about a minute.
MOST_POINTS = 8


@dataclass(frozen=True)
class SensitivityMatrix:
    """`rates[i][j]`: rate with `cores[i]` cores and `memory_bytes[j]` bytes per GPU; both axes ascending."""

    cores: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    rates: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.cores or not self.memory_bytes:
            raise ValueError("a sensitivity matrix needs at least one number of cores and one amount of memory")
        if list(self.cores) != sorted(set(self.cores)) or list(self.memory_bytes) != sorted(set(self.memory_bytes)):
            raise ValueError("the axes of a sensitivity matrix must ascend")
        if len(self.rates) != len(self.cores) or any(len(row) != len(self.memory_bytes) for row in self.rates):
            raise ValueError(f"rates must be {len(self.cores)} rows of {len(self.memory_bytes)}")

    @cached_property
    def table(self) -> Floats:
        """The rates as an array (cores, memory)."""
        return np.array(self.rates, float)

    def rate(self, cores: float, memory_bytes: float) -> float:
        """Between measured cores a straight line, towards no cores down to zero. Memory counts as the largest measured
        amount that is there, since a cache model's knee may lie anywhere before the next; less than the least measured
        counts in proportion."""
        if not (cores > 0.0 and memory_bytes > 0.0):
            return 0.0
        column = int(np.searchsorted(self.memory_bytes, memory_bytes * (1 + 1e-9), side="right")) - 1
        share = 1.0 if column >= 0 else memory_bytes / self.memory_bytes[0]
        rates = self.table[:, max(column, 0)]
        if cores <= self.cores[0]:
            return share * float(rates[0]) * cores / self.cores[0]
        return share * float(np.interp(cores, self.cores, rates))


def next_cores(points: Sequence[CpuPoint], most_cores: int, same_rate: float = SAME_RATE) -> int | None:
    """Where optimistic profiling measures next, at full memory; None when it is done.

    All cores, then one; then the middle of the interval whose ends differ most, as long as they differ by more than
    `same_rate` of the higher and it holds a whole number of cores; at most eight points in all.
    """
    measured = averaged(points)
    counts = [round(point.cores) for point in measured]
    if most_cores < 1:
        return None
    for count in (most_cores, 1):
        if count not in counts:
            return count
    if len(measured) >= MOST_POINTS:
        return None
    steps = [
        (-abs(high.rate - low.rate) / max(high.rate, low.rate), (round(low.cores) + round(high.cores)) // 2)
        for low, high in pairwise(measured)
        if round(high.cores) - round(low.cores) > 1
    ]
    wide = [step for step in steps if -step[0] > same_rate]
    return min(wide)[1] if wide else None
