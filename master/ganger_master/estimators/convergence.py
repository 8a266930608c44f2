"""Where a training loss is heading: l(k) = 1/(b0*k + b1) + b2 with all b >= 0 (Optimus, EuroSys 2018, section 3.1).

For each of a grid of b2 the rest is linear in 1/(l - b2), and solved by non-negative least squares, weighted by (l -
b2)^2. Curves that the points do not distinguish are kept: they give the range of an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ganger_master.estimators.fitting import Floats

# b2 is looked for on so many values from 0 to just below the least loss.
_FLOORS = 40
_NEAREST_FLOOR = 0.999
# More points than this are averaged, a few neighbours each: 100 say as much as 100,000, and a fit stays cheap.
MOST_POINTS = 100
# A point further from the curve (or its neighbours' median) than so many typical distances is an outlier.
_OUTLIER = 4.0
_NEIGHBOURS = 2
# Up to so many points each is left out once to find the outlier: each costs a fit.
_FEW = 12
# Fits after which the set of outliers is taken as it is; it settles in two or three.
_ROUNDS = 5
# A median distance times this is a standard deviation, for normal scatter.
_MEDIAN_TO_DEVIATION = 1.4826
# A curve whose alternatives are this likely together belongs to the range of the estimate.
_CONFIDENCE = 0.9
# The curve goes through as many points as it has numbers: their scatter, and so its range, is unknown.
_NUMBERS = 3
# Real losses stray from the law: with a range this far each way, as a share of the estimate, the end of 95 % of the
# published validation curves lies in it (experiment B2).
_STRAY = 0.25
# Of a curve over losses whose largest is one: keeps losses of a million times the largest out of a fit.
_LEAST_DENOMINATOR = 1e-6
# Steps and losses beyond belong to a run that has diverged.
_MOST = 1e18
# Losses that scatter less than this share of the largest are taken to scatter by it: no real loss is exact.
_NOISE = 1e-6


@dataclass(frozen=True, slots=True)
class LossPoint:
    """The loss after so many steps (or epochs: any unit that grows with training)."""

    step: float
    loss: float


@dataclass(frozen=True, slots=True)
class Curve:
    """1/(b0*k + b1) + b2, in the unit of the loss."""

    b0: float
    b1: float
    b2: float

    def loss(self, step: float) -> float:
        return 1.0 / max(self.b0 * step + self.b1, 1e-300) + self.b2

    def slow_from(self, least_decrease: float, stride: float) -> float:
        """Return the first step from which a stride lowers the loss by at most `least_decrease`, or infinity. With u =
        b0*k + b1 and d = b0*stride the fall is d / (u * (u + d)): a quadratic in u."""
        fall = self.b0 * stride
        if fall <= 0.0:
            return 0.0
        if least_decrease <= 0.0:
            return math.inf
        u = (-fall + math.sqrt(fall * fall + 4.0 * fall / least_decrease)) / 2.0
        return max(0.0, (u - self.b1) / self.b0)


@dataclass(frozen=True, slots=True)
class ConvergenceModel:
    """The best curve, and curves that the points do not distinguish from it at 90 %: `plausible` by another b2, `axes`
    as pairs along the axes of the error ellipsoid. `points` were fitted; steps up to `last_step` were seen."""

    best: Curve
    plausible: tuple[Curve, ...]
    axes: tuple[tuple[Curve, Curve], ...]
    points: int
    last_step: float
    largest_loss: float


@dataclass(frozen=True, slots=True)
class StepsLeftEstimate:
    """A number of steps with a range of nominal 90 % (some 80 % where the noise grows with the loss, see the tests);
    infinite where nothing bounds it."""

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether the range is bounded and within a factor of two of the value."""
        return math.isfinite(self.high) and self.high <= 2.0 * self.value and self.low >= 0.5 * self.value


def fit_convergence(points: Iterable[LossPoint]) -> ConvergenceModel | None:
    """Fit the curve; return None with fewer than three usable points at different steps: it has three parameters.
    Points that are not finite, below zero or before step zero are left out, repeats of a step averaged. A loss that is
    flat, or rises, gives b0 = 0: it is not converging, or has. A loss of zero throughout is flat."""
    steps, losses = _prepared(points)
    if len(steps) < _NUMBERS:
        return None
    largest = float(np.max(without_outliers(losses)))
    if largest <= 0.0:
        flat = Curve(0.0, math.inf, 0.0)
        return ConvergenceModel(flat, (flat,), (), len(steps), float(steps[-1]), 0.0)
    span = float(steps[-1] - steps[0])
    x, y = steps / span, losses / largest
    best, cost, kept, found = _robust(x, y)
    freedom = max(1, int(kept.sum()) - _NUMBERS)
    noise = max(cost / freedom, _NOISE**2)
    from scipy.stats import f as f_distribution

    width = float(f_distribution.ppf(_CONFIDENCE, 1, freedom))
    plausible = [curve for curve, found_cost in found if found_cost <= cost + noise * width]
    axes = _axes(x[kept], best, math.sqrt(noise * width))
    return ConvergenceModel(
        _scaled(best, span, largest),
        tuple(_scaled(curve, span, largest) for curve in plausible),
        tuple((_scaled(one, span, largest), _scaled(other, span, largest)) for one, other in axes),
        int(kept.sum()),
        float(steps[-1]),
        largest,
    )


def steps_to_convergence(
    model: ConvergenceModel, least_decrease: float, stride: float, patience: int = 1
) -> StepsLeftEstimate:
    """Return the steps from the start until the loss has fallen by less than `least_decrease` (a share of the largest
    loss seen) in each of `patience` consecutive strides (steps of an epoch). Optimus's definition, with thresholds of
    1-5 %."""
    if not (stride > 0.0 and patience >= 1):
        raise ValueError(f"stride {stride} and patience {patience} must be positive")
    fall = least_decrease * model.largest_loss
    return _estimate(model, lambda curve: curve.slow_from(fall, stride) + patience * stride)


def _estimate(model: ConvergenceModel, steps: Callable[[Curve], float]) -> StepsLeftEstimate:
    value = steps(model.best)
    if model.points <= _NUMBERS:
        return StepsLeftEstimate(value, 0.0, math.inf)
    if math.isinf(value):
        return StepsLeftEstimate(value, min([value, *map(steps, model.plausible)]), value)
    # Independent axes add up in quadrature.
    sides = [(steps(one) - value, steps(other) - value) for one, other in model.axes]
    up = math.hypot(*(max(0.0, *side) for side in sides)) if sides else 0.0
    down = math.hypot(*(max(0.0, -min(side)) for side in sides)) if sides else 0.0
    others = [steps(curve) for curve in model.plausible]
    others += [value * (1.0 - _STRAY), value * (1.0 + _STRAY)]
    return StepsLeftEstimate(value, max(0.0, min([value - down, *others])), max([value + up, *others]))


def _prepared(points: Iterable[LossPoint]) -> tuple[Floats, Floats]:
    by_step: dict[float, list[float]] = {}
    for point in points:
        if 0.0 <= point.step <= _MOST and 0.0 <= point.loss <= _MOST:
            by_step.setdefault(point.step, []).append(point.loss)
    steps = np.array(sorted(by_step), float)
    losses = np.array([sum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)], float)
    if len(steps) <= MOST_POINTS:
        return steps, losses
    # Before averaging, since one outlier would spoil its whole group.
    losses = without_outliers(losses)
    groups = np.array_split(np.arange(len(steps)), MOST_POINTS)
    return np.array([steps[group].mean() for group in groups]), np.array([losses[group].mean() for group in groups])


def without_outliers(losses: Floats) -> Floats:
    """Return the losses; one that lies far from the median of the two before and the two after it becomes that median.
    Far is four times the median such distance of the whole curve. Optimus names its rule no further than "replaced by
    the mean of its neighbours"; a median is not dragged by a second outlier. The two points at each end stay."""
    count = len(losses)
    if count < 2 * _NEIGHBOURS + 1:
        return losses
    windows = np.lib.stride_tricks.sliding_window_view(losses, 2 * _NEIGHBOURS + 1)
    expected = losses.copy()
    expected[_NEIGHBOURS : count - _NEIGHBOURS] = np.median(np.delete(windows, _NEIGHBOURS, axis=1), axis=1)
    distance = np.abs(losses - expected)
    typical = float(np.median(distance[_NEIGHBOURS : count - _NEIGHBOURS]))
    far = distance > _OUTLIER * max(typical, _NOISE * float(np.max(losses)))
    return np.asarray(np.where(far, expected, losses), float)


def _robust(x: Floats, y: Floats) -> tuple[Curve, float, NDArray[np.bool_], list[tuple[Curve, float]]]:
    """Fit the points that lie near the curve. Return (curve, squared error, mask of the points, fits of other b2). The
    search starts from a curve that no single outlier can drag. Its errors separate the outliers from points that only
    lie on a steep part. At least three quarters of the points stay."""
    kept = np.ones(len(x), bool)
    curve = _undragged(x, y)
    most_far = len(x) // 4
    # The numbers fitted make the residuals of few points smaller than the noise.
    few = math.sqrt(len(x) / max(1, len(x) - _NUMBERS))
    for _ in range(_ROUNDS):
        distance = np.abs(_losses(x, curve) - y)
        typical = max(_MEDIAN_TO_DEVIATION * few * float(np.median(distance)), _NOISE)
        near = distance <= max(_OUTLIER * typical, float(np.sort(distance)[len(x) - 1 - most_far]))
        changed = bool(np.any(near != kept))
        kept = near
        curve, cost, found = _fit(x[kept], y[kept])
        if not changed:
            break
    return curve, cost, kept, found


def _undragged(x: Floats, y: Floats) -> Curve:
    """Return the curve through the neighbour-wise cleaned points. With too few points for that, return the fit without
    some single point that has the least median distance."""
    if not _NUMBERS + 2 <= len(x) <= _FEW:
        return _fit(x, without_outliers(y))[0]
    curves = [_fit(np.delete(x, i), np.delete(y, i))[0] for i in range(len(x))]
    return min([_fit(x, y)[0], *curves], key=lambda curve: float(np.median(np.abs(_losses(x, curve) - y))))


def _fit(x: Floats, y: Floats) -> tuple[Curve, float, list[tuple[Curve, float]]]:
    found = [_rest(x, y, float(floor)) for floor in np.linspace(0.0, _NEAREST_FLOOR * float(y.min()), _FLOORS)]
    start, cost = min(found, key=lambda fit: fit[1])
    return *_polished(x, y, start, cost), found


def _axes(x: Floats, curve: Curve, radius: float) -> list[tuple[Curve, Curve]]:
    """Return the curve moved to both ends of each axis of the ellipsoid of its coefficients, kept at zero or above."""
    if not math.isfinite(curve.b1) or len(x) <= _NUMBERS:
        return []
    u = np.maximum(curve.b0 * x + curve.b1, _LEAST_DENOMINATOR)
    jacobian = np.stack([-x / u**2, -1.0 / u**2, np.ones_like(x)], axis=1)
    _, sizes, directions = np.linalg.svd(jacobian, full_matrices=False)
    middle = np.array([curve.b0, curve.b1, curve.b2])
    reach = radius * directions / np.maximum(sizes, 1e-9 * sizes[0])[:, None]
    return [
        (Curve(*np.maximum(middle + step, 0.0).tolist()), Curve(*np.maximum(middle - step, 0.0).tolist()))
        for step in reach
    ]


def _rest(x: Floats, y: Floats, floor: float) -> tuple[Curve, float]:
    from scipy.optimize import nnls

    above = y - floor
    weights = above**2
    (b0, b1), _ = nnls(np.stack([x, np.ones_like(x)], axis=1) * weights[:, None], above)
    if b0 <= 0.0 and b1 <= 0.0:
        return Curve(0.0, math.inf, floor), float(np.sum((y - floor) ** 2))
    return Curve(float(b0), float(b1), floor), float(np.sum((_losses(x, Curve(b0, b1, floor)) - y) ** 2))


def _polished(x: Floats, y: Floats, start: Curve, cost: float) -> tuple[Curve, float]:
    """Return the grid's best, moved to the exact least squares in loss space (the weights are right only near it)."""
    from scipy.optimize import least_squares

    if not math.isfinite(start.b1) or start.b1 <= 0.0 or len(x) <= _NUMBERS:
        return start, cost
    bounds = ([0.0, _LEAST_DENOMINATOR, 0.0], [np.inf, np.inf, max(float(y.min()), 1e-12)])
    begin = np.clip([start.b0, start.b1, start.b2], bounds[0], bounds[1])
    # On curves that are all corner the solver's own trust region overflows; its answer is compared with the start's.
    with np.errstate(all="ignore"):
        found = least_squares(lambda b: _losses(x, Curve(*b)) - y, begin, bounds=bounds, max_nfev=50)
    if 2.0 * found.cost >= cost:
        return start, cost
    return Curve(*(float(value) for value in found.x)), 2.0 * float(found.cost)


def _losses(x: Floats, curve: Curve) -> Floats:
    if math.isinf(curve.b1):
        return np.full_like(x, curve.b2)
    return np.asarray(1.0 / np.maximum(curve.b0 * x + curve.b1, _LEAST_DENOMINATOR) + curve.b2, float)


def _scaled(curve: Curve, span: float, largest: float) -> Curve:
    return Curve(curve.b0 / span / largest, curve.b1 / largest, curve.b2 * largest)
