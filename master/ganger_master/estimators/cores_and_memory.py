"""How fast a job runs with so many cores, or so much host memory for its file caches, for each of its GPUs; and at
which amounts to measure it.

S(C) = P0*log C + P1*C below the sweet point theta, P2 from theta on (Xiao et al., "Scheduling CPU for GPU-based deep
learning jobs", SoCC 2018 poster). A `Shelf` is a second knee, as in Synergy's profiles of AlexNet and ShuffleNet.

Caches of a kernel keep what was used last. A loop over more data than fits finds nothing of it there, a random order
finds as large a part as fits. So no shape of the curve over memory is assumed: an amount counts as the largest
measured one below. Synergy (OSDI 2022, section 3) derives this curve from a cache of fixed hits instead, which a job
would have to use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from ganger_master.estimators.fitting import NOT_FITTED, FitError, Floats, fit_error, is_usable

# A smaller gain or loss of a trial cannot be told from noise within a minute.
LEAST_DIFFERENCE: Final = 0.02
# Sweet points are tried this far apart; finer than a core cannot be allocated to a rank anyway.
THETA_STEP = 0.5
# Rates closer than this, relative, are the same (Synergy's fixed threshold).
SAME_RATE = 0.1
# Weight of the wish that both branches meet at theta: decides theta between two measured points, yields to them else.
_CONTINUITY = 0.3
# Weight of a preference for a straight line (P0 = 0) with too few points: one measured 3 % off outweighs it.
_STRAIGHTNESS = 0.03
# Residuals below this are measurement noise; a shelf must not be bought to explain it.
_NOISE = 0.02
# A shelf adds a knee and a level to the four numbers of the plain curve: below this it could explain anything.
_SHELF_POINTS = 7
# Most sweet points tried: a 256-core server is searched in steps of a core or two.
_MOST_THETAS = 128


@dataclass(frozen=True, slots=True)
class CpuPoint:
    """A measurement: `cores` per GPU (> 0), `rate` in any unit per second (> 0). `memory_bytes`: of host memory per
    GPU; infinite: all that the job had."""

    cores: float
    rate: float
    memory_bytes: float = math.inf


@dataclass(frozen=True, slots=True)
class Shelf:
    """Past `begins` cores the rate rises again, in a line, to `rate` at `ends`."""

    begins: float
    ends: float
    rate: float


@dataclass(frozen=True, slots=True)
class CpuModel:
    """The fitted curve. `rate` never falls with cores; below one core it goes to zero in proportion."""

    log_coefficient: float
    linear_coefficient: float
    plateau: float
    sweet_point: float
    shelf: Shelf | None = None
    error: FitError = NOT_FITTED

    @property
    def peak(self) -> float:
        """The rate no number of cores exceeds."""
        return self.plateau if self.shelf is None else self.shelf.rate

    @property
    def knee(self) -> float:
        """The cores from which more do not help: the sweet point, or the end of the shelf."""
        return self.sweet_point if self.shelf is None else self.shelf.ends

    def rate(self, cores: float) -> float:
        """Return the rate with `cores` for each GPU; zero for zero cores and below."""
        if not cores > 0.0:
            return 0.0
        if self.shelf is not None and cores > self.shelf.begins:
            share = min(1.0, (cores - self.shelf.begins) / (self.shelf.ends - self.shelf.begins))
            return self.plateau + share * (self.shelf.rate - self.plateau)
        # What less than a core runs is a share of what one runs.
        above = max(cores, 1.0)
        if above >= self.sweet_point:
            return self.plateau * min(1.0, cores)
        rising = self.log_coefficient * math.log(above) + self.linear_coefficient * above
        return min(rising, self.plateau) * min(1.0, cores)

    def rates(self, cores: ArrayLike) -> Floats:
        """Return `rate` for an array of any shape."""
        counts = np.asarray(cores, float)
        above = np.maximum(counts, 1.0)
        rising = self.log_coefficient * np.log(above) + self.linear_coefficient * above
        found = np.where(above < self.sweet_point, np.minimum(rising, self.plateau), self.plateau)
        if self.shelf is not None:
            shelf = self.shelf
            share = np.clip((counts - shelf.begins) / (shelf.ends - shelf.begins), 0.0, 1.0)
            found = np.where(counts > shelf.begins, self.plateau + share * (shelf.rate - self.plateau), found)
        return np.asarray(found * np.clip(counts, 0.0, 1.0), float)


def fit_cpu(points: Iterable[CpuPoint]) -> CpuModel | None:
    """Return the curve of least relative error through the points, with that error; None if no point is usable.

    Points that are not finite and above zero are left out, repeats at one number of cores averaged. One point c:
    proportional up to c, flat beyond (more cores are promised nothing). Points that fall with cores give the flattest
    curve that does not fall, and a large error.
    """
    measured = averaged(points)
    if not measured:
        return None
    if len(measured) == 1:
        return _proportional(measured[0])
    cores = np.array([point.cores for point in measured])
    rates = np.array([point.rate for point in measured])
    plain, cost = _best_curve(cores, rates)
    unexplained = cost > len(measured) * _NOISE**2
    shelved = _shelved(cores, rates) if unexplained and len(measured) >= _SHELF_POINTS else None
    best = plain
    if shelved is not None and _criterion(shelved[1], len(measured), 6) < _criterion(cost, len(measured), 4):
        best = shelved[0]
    return replace(best, error=fit_error(best.rates(cores), rates))


def averaged(points: Iterable[CpuPoint]) -> tuple[CpuPoint, ...]:
    """Return the usable points by cores ascending, repeats averaged."""
    by_cores: dict[float, list[float]] = {}
    for point in points:
        if is_usable(point.cores, point.rate):
            by_cores.setdefault(point.cores, []).append(point.rate)
    return tuple(CpuPoint(cores, sum(rates) / len(rates)) for cores, rates in sorted(by_cores.items()))


def sweet_point_bracket(points: Sequence[CpuPoint]) -> tuple[float, float]:
    """Return the interval of cores that contains theta by the measurements alone: (most cores still short of the best
    rate by more than `SAME_RATE`, fewest cores within it). It is (0, c) if even the fewest measured cores c are
    enough."""
    measured = averaged(points)
    if not measured:
        return (0.0, math.inf)
    best = max(point.rate for point in measured)
    short = [point.cores for point in measured if point.rate < (1.0 - SAME_RATE) * best]
    low = max(short, default=0.0)
    return (low, min(point.cores for point in measured if point.cores > low) if low < measured[-1].cores else math.inf)


# Quantile of chi-squared with one degree of freedom: a likelihood ratio beyond it has a probability of 5 %.
_CHI_SQUARED: Final = 3.84


def sweet_point_bounds(points: Iterable[CpuPoint]) -> tuple[float, float]:
    """Return bounds between which the sweet point lies with 95 % confidence, by the profile likelihood.

    All sweet points count whose best curve is not significantly worse than the best of all, where a rate scatters by
    the residuals of that one, and by 2 % at least. Fewer than two points bound nothing, and the upper bound is infinite
    where a curve that rises up to the most cores is as good.
    """
    measured = averaged(points)
    if len(measured) < 2:
        return (0.0, math.inf)
    cores = np.array([point.cores for point in measured])
    rates = np.array([point.rate for point in measured])
    thetas = _sweet_points(float(cores[-1]))
    costs = np.array([_curve(cores, rates, theta)[1] for theta in thetas])
    least = float(costs.min())
    variance = max(_NOISE**2, least / max(1, len(measured) - 3))
    likely = thetas[costs <= least + _CHI_SQUARED * variance]
    return (float(likely[0]), math.inf if likely[-1] >= cores[-1] else float(likely[-1]))


def _sweet_points(most: float) -> Floats:
    steps = min(_MOST_THETAS, max(1, round((most - 1.0) / THETA_STEP) + 1))
    return np.linspace(min(1.0, most), most, steps)


def _proportional(point: CpuPoint) -> CpuModel:
    plateau = point.rate / min(1.0, point.cores)
    whole = max(1.0, point.cores)
    return CpuModel(0.0, plateau / whole, plateau, whole, error=FitError(1, 0.0, 0.0))


def _best_curve(cores: Floats, rates: Floats) -> tuple[CpuModel, float]:
    found = [_curve(cores, rates, float(theta)) for theta in _sweet_points(float(cores[-1]))]
    return min(found, key=lambda fit: (round(fit[1], 9), fit[0].sweet_point))


def _curve(cores: Floats, rates: Floats, theta: float) -> tuple[CpuModel, float]:
    # In the basis (log C, C - log C) with coefficients >= 0 the curve cannot fall: P0 >= -P1.
    above = np.maximum(cores, 1.0)
    below = above < theta
    log = np.log(above)
    line = above - log
    fraction = np.minimum(cores, 1.0)
    rows = np.stack([below * log, below * line, ~below * 1.0], axis=1) * (fraction / rates)[:, None]
    scale = float(rates[-1])
    at_theta = max(theta, 1.0)
    meets = _CONTINUITY / scale * np.array([math.log(at_theta), at_theta - math.log(at_theta), -1.0])
    straight = _STRAIGHTNESS / scale * np.array([1.0, -1.0, 0.0])
    # Loading it takes longer than a short simulation, which only reads profiles.
    from scipy.optimize import nnls

    solution, _ = nnls(np.vstack([rows, meets, straight]), np.concatenate([np.ones(len(rates)), [0.0, 0.0]]))
    log_part, line_part, plateau = (float(value) for value in solution)
    model = CpuModel(log_part - line_part, line_part, plateau, theta)
    wishes = float((meets @ solution) ** 2 + (straight @ solution) ** 2)
    return model, float(np.sum((model.rates(cores) / rates - 1.0) ** 2)) + wishes


def _shelved(cores: Floats, rates: Floats) -> tuple[CpuModel, float] | None:
    """Return the best curve whose last points stand on a higher level, reached in a line from the one before."""
    found: list[tuple[CpuModel, float]] = []
    for first_high in range(3, len(cores)):
        low, cost = _best_curve(cores[:first_high], rates[:first_high])
        high = rates[first_high:]
        level = float(np.sum(1.0 / high) / np.sum(1.0 / high**2))
        if low.sweet_point > cores[first_high - 1] or level <= low.plateau:
            continue
        shelf = Shelf(float(cores[first_high - 1]), float(cores[first_high]), level)
        found.append((replace(low, shelf=shelf), cost + float(np.sum((level / high - 1.0) ** 2))))
    return min(found, key=lambda fit: fit[1], default=None)


def _criterion(cost: float, points: int, parameters: int) -> float:
    """Return Schwarz's criterion, with residuals no smaller than the noise of a rate."""
    return points * math.log(max(cost / points, _NOISE**2)) + parameters * math.log(points)


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
        """Return the rates as an array (cores, memory)."""
        return np.array(self.rates, float)

    def rate(self, cores: float, memory_bytes: float) -> float:
        """Return the rate: linear between measured cores, and down to zero below the least of them. Memory is rounded
        down to a measured amount, since a cache model's knee may lie anywhere before the next. Below the least measured
        amount the rate is in proportion."""
        if not (cores > 0.0 and memory_bytes > 0.0):
            return 0.0
        column = int(np.searchsorted(self.memory_bytes, memory_bytes * (1 + 1e-9), side="right")) - 1
        share = 1.0 if column >= 0 else memory_bytes / self.memory_bytes[0]
        rates = self.table[:, max(column, 0)]
        if cores <= self.cores[0]:
            return share * float(rates[0]) * cores / self.cores[0]
        return share * float(np.interp(cores, self.cores, rates))


def next_cores(points: Sequence[CpuPoint], most_cores: int) -> int | None:
    """Return the number of cores that Synergy's optimistic profiling measures next, at full memory; None: no more. All
    cores, then one; then the middle of the interval whose ends differ most. It stops when the ends differ by at most
    `SAME_RATE` of the higher rate, when no whole number of cores lies between them, or after eight points."""
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
    wide = [step for step in steps if -step[0] > SAME_RATE]
    return min(wide)[1] if wide else None


# Keeps the trace finite while fewer probes than coefficients were made.
_RIDGE = 1e-3
# Relative change of predicted rates that is worth no further probe.
_PRECISION = 0.05


def most_telling(candidates: Iterable[int], model: CpuModel, known: Sequence[CpuPoint]) -> int:
    """Return the A-optimal number of cores to probe after the `known` ones: with the smallest trace of (X^T X)^-1, the
    summed variance of the fitted (P0, P1, P2) in relative error. Ties go to the first."""

    def row(cores: float) -> Floats:
        """Return the derivatives of the relative rate."""
        if cores >= model.sweet_point:
            return np.array([0.0, 0.0, 1.0 / model.plateau])
        return np.array([math.log(max(cores, 1.0)), cores, 0.0]) / model.rate(cores)

    made = np.array([row(point.cores) for point in averaged(known)]).reshape(-1, 3)
    base = made.T @ made + _RIDGE * np.eye(3)
    traces = {count: np.trace(np.linalg.inv(base + np.outer(row(count), row(count)))) for count in candidates}
    return min(traces, key=lambda count: round(float(traces[count]), 9))


def next_probe(points: Sequence[CpuPoint], most_cores: int) -> int | None:
    """Return the next number of cores to measure, given `points` in the order of measurement; None: enough is known.

    All cores, then one, then inside the bracket of the sweet point: where the fit places it, or in the middle if the
    fit places it elsewhere. This ends when the bracket is one core wide, or the last probe changed no predicted rate by
    more than `_PRECISION`. The last probe is an A-optimal one of the lower slope, if it has none. A curve that the fit
    misses by twice that has another shape and is measured by Synergy's bisection.
    """
    measured = {round(point.cores) for point in averaged(points)}
    if most_cores < 1:
        return None
    for count in (most_cores, 1):
        if count not in measured:
            return count
    low, high = sweet_point_bracket(points)
    model = fit_cpu(points)
    if model is None or model.error.worst > 2.0 * _PRECISION or len(measured) > MOST_POINTS:
        return next_cores(points, most_cores)
    if high - low > 1.0 and (len(measured) <= 3 or _moved(points, most_cores) > _PRECISION):
        inside = [c for c in range(math.floor(low) + 1, math.ceil(min(high, most_cores))) if c not in measured]
        if inside:
            sees = low < model.sweet_point < high and len(inside) > 2
            nearest = min(inside, key=lambda count: (abs(count - model.sweet_point), count))
            return nearest if sees else inside[(len(inside) - 1) // 2]
    slope = range(2, math.floor(2.0 * low / 3.0) + 1)
    if slope and measured.isdisjoint(slope):
        return most_telling(slope, model, points)
    return None


def _moved(points: Sequence[CpuPoint], most_cores: int) -> float:
    cores = np.arange(1, most_cores + 1)
    before, after = fit_cpu(points[:-1]), fit_cpu(points)
    if before is None or after is None:
        return math.inf
    was, now = before.rates(cores), after.rates(cores)
    ratio = np.divide(now, was, out=np.full(len(cores), np.inf), where=was > 0.0)
    return float(np.max(np.abs(ratio - 1.0)))


# Amounts closer than this part of what is used are not told apart.
_RESOLUTION: Final = 1 / 16
# Speed at which a cache that was emptied is filled again: a network file system, or one disk.
REFILL_BYTES_PER_S: Final = 100e6


def is_full_rate(point: CpuPoint, points: Sequence[CpuPoint]) -> bool:
    """Return whether a point is as fast as the one of most memory, which is the last."""
    return point.rate >= (1.0 - LEAST_DIFFERENCE) * points[-1].rate


def enough_memory(points: Sequence[CpuPoint]) -> float:
    """Return the least measured memory from which on no point is slower; infinite without points. `points`: by memory,
    ascending, the last one with all that the job had."""
    enough = math.inf
    for point in reversed(points):
        if not is_full_rate(point, points):
            break
        enough = point.memory_bytes
    return enough


def next_memory(points: Sequence[CpuPoint], used: float, least: float, affordable: float) -> float | None:
    """Return the memory to measure next; None: enough is known, or no more is affordable.

    The least is tried first: a job that loses nothing with it needs no other trial. Else the middle between what costs
    something and what costs nothing. All arguments are in bytes for each GPU. `points`: as above. `used`: what the job
    uses with all its caches; `least`: what it needs without any; `affordable`: how much of a cache that it may need
    may be emptied.
    """
    high = min(used, enough_memory(points))
    low = max([point.memory_bytes for point in points if point.memory_bytes < high], default=0.0)
    wanted = max(least, (low + high) / 2 if low else 0.0, high - affordable)
    return wanted if high - wanted >= _RESOLUTION * used > 0.0 else None
