"""Relative errors of fits, and the posterior of a law's numbers given measurements and a prior.

Laws predict logarithms, so that errors are relative. All estimators leave out measured values that are not finite and
above zero; a fit without a usable point is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


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


def is_usable(*values: float) -> bool:
    """Finite and above zero (1e-100 to 1e100): a failed run reports 0, a broken one NaN."""
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
    # Numbers the law does not use at these measurements are left alone: most of a long law, most of the time.
    root = np.linalg.cholesky(prior.covariance)
    used = np.any(jacobian(prior, law) != 0.0, axis=0)
    moves = np.any(root[used] != 0.0, axis=0)
    reach = root[:, moves]
    whiten = np.linalg.inv(np.linalg.cholesky(noise))

    def residuals(z: Floats) -> Floats:
        return np.concatenate([whiten @ (law(prior.mean + reach @ z) - measured), z])

    # In units of the prior deviation every number has the same scale, and a step of one is a plausible one.
    start = np.zeros(reach.shape[1])
    if len(start) == 0:
        return prior
    # Loading it takes longer than a short simulation, which only reads profiles.
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
