"""Which numbers of cores to measure a job at, so that few probes pin its CPU curve down.

Optimal experiment design (Xiao et al., SoCC 2018 poster; the method of Ernest, NSDI 2016): of all sets of probes within
a budget, the one with the smallest trace of (X^T X)^-1 (A-optimal), in relative error. Probes cost a running job time,
so the sequential form looks at what the earlier probes said before it names the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations

import numpy as np

from ganger_master.estimators.cpu import CpuModel, CpuPoint, averaged, fit_cpu, sweet_point_bracket
from ganger_master.estimators.fitting import Floats
from ganger_master.estimators.memory_sensitivity import MOST_POINTS, next_cores

# Sets of probes are compared one by one: C(24, 4) = 10,626. More candidates are thinned, evenly in their logarithm.
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
    """The cores to probe, ascending: of all sets of at most four candidates that together cost no more than `budget`
    (one each unless `cost` says otherwise), the one whose fit of (P0, P1, P2) has the least summed variance.

    `model` is the present belief and weighs every probe by its predicted rate; without one the rate is taken to grow in
    proportion and no plateau is looked for. `known` probes count as made. Ties go to the cheaper, then the smaller set.
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
    """The next number of cores to measure, given `points` in the order they were measured; None: enough is known.

    All cores, then one, then inside the bracket that must hold the sweet point: where the fit sees it, or in the middle
    where the fit sees it elsewhere, until the bracket is a core wide or the last probe moved no predicted rate by more
    than `precision`; last, one A-optimal probe of the lower slope, if it has none. A curve that the fit then misses by
    twice that somewhere has another shape: its points go where Synergy's bisection puts them.
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
    """The largest relative change the last measurement made to the predicted curve."""
    cores = np.arange(1, most_cores + 1)
    before, after = fit_cpu(points[:-1]), fit_cpu(points)
    if before is None or after is None:
        return math.inf
    was, now = before.rates(cores), after.rates(cores)
    ratio = np.divide(now, was, out=np.full(len(cores), np.inf), where=was > 0.0)
    return float(np.max(np.abs(ratio - 1.0)))


def _row(cores: float, model: CpuModel | None) -> Floats:
    """Derivatives of the relative rate by (P0, P1, P2)."""
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
