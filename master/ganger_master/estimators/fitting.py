"""How far a fit is from what was measured, always as a share of the measured value.

Relative, because a model that is 0.2 steps/s off is useless for a slow job and perfect for a fast one.

What measurements say about the numbers of a law, given what was believed before: mode and spread.

The law predicts logarithms of rates or times, so that errors are relative and scales multiply. The mode is a
least-squares problem (MINPACK's Levenberg-Marquardt, by SciPy); the spread is the curvature there (Laplace). With no
measurements the belief comes back as it was; with fewer than numbers, what they leave open keeps its prior: nothing is
ever under-determined.

All estimators leave out measured values that are not finite and above zero; a fit without a usable point is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Point = TypeVar("Point")


@dataclass(frozen=True, slots=True)
class FitError:
    """Mean and worst |predicted / measured - 1| over `points` measured values (0.1 is 10 %)."""

    points: int
    mean: float
    worst: float


# No rate, time or size of a job lies outside; fits square what lies inside.
_LEAST, _MOST = 1e-100, 1e100
# Of a model that was stated, not fitted.
NOT_FITTED = FitError(0, 0.0, 0.0)


def fit_error(predicted: ArrayLike, measured: ArrayLike) -> FitError:
    """Both of shape (n,), measured > 0. No points: no error, and `points` says so."""
    expected, actual = np.asarray(predicted, float), np.asarray(measured, float)
    if expected.shape != actual.shape:
        raise ValueError(f"{expected.shape} predictions for {actual.shape} measurements")
    if actual.size == 0:
        return NOT_FITTED
    relative = np.abs(expected / actual - 1.0)
    return FitError(actual.size, float(relative.mean()), float(relative.max()))


def left_out_error(
    points: Sequence[Point], rate: Callable[[Point], float], predict: Callable[[Sequence[Point], Point], float]
) -> FitError:
    """Each point predicted from the others: what the fit is worth where nothing was measured.

    `predict(others, point)` fits the others and evaluates at the point; needs two points, else nothing can be left out.
    """
    if len(points) < 2:
        return NOT_FITTED
    predicted = [predict([*points[:i], *points[i + 1 :]], point) for i, point in enumerate(points)]
    return fit_error(predicted, [rate(point) for point in points])


def is_usable(*values: float) -> bool:
    """Finite and above zero (1e-100 to 1e100): a failed run reports 0, a broken one NaN; neither says how fast a job
    is."""
    return all(_LEAST < value < _MOST for value in values)


# Evaluations of the law, those for derivatives included: twenty numbers settle in ten steps of twenty-one; the bound is
# for laws that are flat around their start.
_MOST_EVALUATIONS = 600
# Step of the numerical derivative, in units of the prior deviation.
_STEP = 1e-4


@dataclass(frozen=True, eq=False)
class Belief:
    """Normal over the numbers of a law: mean (k,), covariance (k, k), symmetric and positive definite."""

    mean: Floats
    covariance: Floats

    @classmethod
    def independent(cls, mean: Floats, deviations: Floats) -> Belief:
        """Every number on its own; deviations (k,) > 0."""
        return cls(np.asarray(mean, float), np.diag(np.asarray(deviations, float) ** 2))

    @property
    def deviations(self) -> Floats:
        return np.asarray(np.sqrt(np.diag(self.covariance)), float)


def posterior(prior: Belief, law: Callable[[Floats], Floats], measured: Floats, noise: Floats) -> Belief:
    """`law(numbers)` and `measured`: logarithms (n,); `noise`: covariance of their difference (n, n)."""
    if len(measured) == 0:
        return prior
    # numbers the law does not use at these measurements are left alone: most of a long law, most of the time
    root = np.linalg.cholesky(prior.covariance)
    used = np.any(jacobian(prior, law) != 0.0, axis=0)
    moves = np.any(root[used] != 0.0, axis=0)
    reach = root[:, moves]
    whiten = np.linalg.inv(np.linalg.cholesky(noise))

    def residuals(z: Floats) -> Floats:
        return np.concatenate([whiten @ (law(prior.mean + reach @ z) - measured), z])

    # in units of the prior deviation every number has the same scale, and a step of one is a plausible one
    start = np.zeros(reach.shape[1])
    if len(start) == 0:
        return prior
    # loading it takes longer than a short simulation, which only reads profiles
    from scipy.optimize import least_squares

    found = least_squares(
        residuals, start, method="lm", diff_step=1e-6, ftol=1e-3, xtol=1e-3, max_nfev=_MOST_EVALUATIONS
    )
    curvature = np.asarray(found.jac.T @ found.jac, float)
    spread = np.eye(len(prior.mean))
    spread[np.ix_(moves, moves)] = np.linalg.inv(curvature)
    covariance = root @ spread @ root.T
    return Belief(prior.mean + reach @ found.x, (covariance + covariance.T) / 2.0)


def jacobian(belief: Belief, law: Callable[[Floats], Floats]) -> Floats:
    """Derivatives of the law at the mean, (n, k)."""
    columns = []
    for i, deviation in enumerate(belief.deviations):
        step = np.zeros(len(belief.mean))
        step[i] = _STEP * deviation
        columns.append((law(belief.mean + step) - law(belief.mean - step)) / (2.0 * step[i]))
    return np.stack(columns, axis=1)
