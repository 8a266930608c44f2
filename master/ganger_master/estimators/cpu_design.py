"""Numbers of cores at which to measure a job, so that few probes determine its CPU curve, and the rates found there.

Two designs: optimal experiment design for the learned predictor (Xiao et al., SoCC 2018 poster; the method of Ernest,
NSDI 2016), and the bisection of Synergy's optimistic profiling (Mohan et al., OSDI 2022), which measures only the
cores, at full memory, and only where the rate still changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, pairwise

import numpy as np

from ganger_master.estimators.cpu import CpuModel, CpuPoint, averaged, fit_cpu, sweet_point_bracket
from ganger_master.estimators.fitting import Floats

# Ends of an interval closer than this need no point between them (Synergy's fixed threshold).
SAME_RATE = 0.1
# What Synergy's profiler needs at most on a 24-core server; each costs the job about a minute.
MOST_POINTS = 8


@dataclass(frozen=True)
class SensitivityMatrix:
    """Rates of a job: `rates[i][j]` with `cores[i]` cores and `memory_bytes[j]` bytes per GPU; both axes ascending."""

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
        """Return the rate: linear between measured cores, and down to zero below the least of them.

        Memory is rounded down to a measured amount, since a cache model's knee may lie anywhere before the next. Below
        the least measured amount the rate is in proportion.
        """
        if not (cores > 0.0 and memory_bytes > 0.0):
            return 0.0
        column = int(np.searchsorted(self.memory_bytes, memory_bytes * (1 + 1e-9), side="right")) - 1
        share = 1.0 if column >= 0 else memory_bytes / self.memory_bytes[0]
        rates = self.table[:, max(column, 0)]
        if cores <= self.cores[0]:
            return share * float(rates[0]) * cores / self.cores[0]
        return share * float(np.interp(cores, self.cores, rates))


def next_cores(points: Sequence[CpuPoint], most_cores: int, same_rate: float = SAME_RATE) -> int | None:
    """Return the number of cores that Synergy's optimistic profiling measures next, at full memory; None: no more.

    All cores, then one; then the middle of the interval whose ends differ most. It stops when the ends differ by at
    most `same_rate` of the higher rate, when no whole number of cores lies between them, or after eight points.
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


# Sets of probes are compared one by one: C(24, 4) = 10,626. More candidates are thinned evenly in their logarithm.
_CANDIDATES = 24
_MOST_PROBES = 4
# Keeps the trace finite while fewer probes than coefficients were made.
_RIDGE = 1e-3


def a_optimal(
    candidates: Sequence[int],
    budget: float,
    model: CpuModel | None = None,
    known: Sequence[CpuPoint] = (),
    cost: Mapping[int, float] | None = None,
) -> tuple[int, ...]:
    """Return the numbers of cores to probe, ascending: the A-optimal set, with the smallest trace of (X^T X)^-1.

    All sets of at most four candidates within `budget` are compared by the summed variance of the fitted (P0, P1, P2),
    in relative error. Ties go to the cheaper, then the smaller set.

    * `cost`: of each candidate, in the unit of the budget; 1 without it.
    * `model`: the present fit, which weighs each probe by its predicted rate. Without one the rate is assumed to grow
      in proportion, and no plateau is estimated.
    * `known`: probes that are made.
    """
    cores = _thinned(sorted({count for count in candidates if count >= 1}))
    prices = {count: 1.0 if cost is None else cost[count] for count in cores}
    made = np.array([_row(point.cores, model) for point in averaged(known)]).reshape(-1, 3)
    unknowns = slice(0, 3 if model is not None else 2)
    base = made.T @ made + _RIDGE * np.eye(3)
    rows = {count: _row(float(count), model) for count in cores}
    best: tuple[float, float, tuple[int, ...]] = (math.inf, 0.0, ())
    for chosen in chain.from_iterable(combinations(cores, size) for size in range(_MOST_PROBES + 1)):
        price = sum(prices[count] for count in chosen)
        if price > budget:
            continue
        information = base + sum((np.outer(rows[count], rows[count]) for count in chosen), np.zeros((3, 3)))
        variance = float(np.trace(np.linalg.inv(information[unknowns, unknowns])))
        best = min(best, (round(variance, 9), price, chosen))
    return best[2]


def next_probe(points: Sequence[CpuPoint], most_cores: int, precision: float = 0.05) -> int | None:
    """Return the next number of cores to measure, given `points` in the order of measurement; None: enough is known.

    All cores, then one, then inside the bracket of the sweet point: where the fit places it, or in the middle if the
    fit places it elsewhere. This ends when the bracket is one core wide, or the last probe changed no predicted rate by
    more than `precision`. The last probe is an A-optimal one of the lower slope, if it has none. A curve that the fit
    misses by twice `precision` has another shape and is measured by Synergy's bisection.
    """
    measured = {round(point.cores) for point in averaged(points)}
    if most_cores < 1:
        return None
    for count in (most_cores, 1):
        if count not in measured:
            return count
    low, high = sweet_point_bracket(points)
    model = fit_cpu(points)
    if model is None or model.error.worst > 2.0 * precision or len(measured) > MOST_POINTS:
        return next_cores(points, most_cores)
    if high - low > 1.0 and (len(measured) <= 3 or _moved(points, most_cores) > precision):
        inside = [c for c in range(math.floor(low) + 1, math.ceil(min(high, most_cores))) if c not in measured]
        if inside:
            sees = low < model.sweet_point < high and len(inside) > 2
            nearest = min(inside, key=lambda count: (abs(count - model.sweet_point), count))
            return nearest if sees else inside[(len(inside) - 1) // 2]
    slope = range(2, math.floor(2.0 * low / 3.0) + 1)
    if slope and measured.isdisjoint(slope):
        return a_optimal(slope, 1.0, model, points)[0]
    return None


def _moved(points: Sequence[CpuPoint], most_cores: int) -> float:
    """Return the largest relative change that the last measurement made to the predicted curve."""
    cores = np.arange(1, most_cores + 1)
    before, after = fit_cpu(points[:-1]), fit_cpu(points)
    if before is None or after is None:
        return math.inf
    was, now = before.rates(cores), after.rates(cores)
    ratio = np.divide(now, was, out=np.full(len(cores), np.inf), where=was > 0.0)
    return float(np.max(np.abs(ratio - 1.0)))


def _row(cores: float, model: CpuModel | None) -> Floats:
    """Return the derivatives of the relative rate by (P0, P1, P2)."""
    if model is None:
        return np.array([math.log(max(cores, 1.0)) / cores, 1.0, 0.0])
    if cores >= model.sweet_point:
        return np.array([0.0, 0.0, 1.0 / model.plateau])
    return np.array([math.log(max(cores, 1.0)), cores, 0.0]) / model.rate(cores)


def _thinned(cores: list[int]) -> list[int]:
    if len(cores) <= _CANDIDATES:
        return cores
    places = np.unique(np.round(np.geomspace(1, len(cores), _CANDIDATES)).astype(int)) - 1
    return [cores[place] for place in places]
