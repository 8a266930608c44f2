"""What measurements say about the numbers of a law, given what was believed before: mode and spread.

The law predicts logarithms of rates or times, so that errors are relative and scales multiply. The mode is a
least-squares problem (SciPy's trust-region solver); the spread is the curvature there (Laplace). With no measurements
the belief comes back as it was; with fewer than numbers, what they leave open keeps its prior: nothing is ever
under-determined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import least_squares

from ganger_master.models.accuracy import Floats

# A law of a dozen numbers settles in ten evaluations; the bound is for laws that are flat around their start.
_MOST_EVALUATIONS = 60
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
    root = np.linalg.cholesky(prior.covariance)
    whiten = np.linalg.cholesky(noise)

    def residuals(z: Floats) -> Floats:
        away = solve_triangular(whiten, law(prior.mean + root @ z) - measured, lower=True)
        return np.concatenate([np.asarray(away, float), z])

    # in units of the prior deviation every number has the same scale, and a step of one is a plausible one
    start = np.zeros(len(prior.mean))
    found = least_squares(residuals, start, method="trf", diff_step=1e-6, max_nfev=_MOST_EVALUATIONS, x_scale=1.0)
    curvature = np.asarray(found.jac.T @ found.jac, float)
    covariance = root @ cho_solve(cho_factor(curvature), np.eye(len(start))) @ root.T
    return Belief(prior.mean + root @ found.x, (covariance + covariance.T) / 2.0)


def jacobian(belief: Belief, law: Callable[[Floats], Floats]) -> Floats:
    """Derivatives of the law at the mean, (n, k)."""
    columns = []
    for i, deviation in enumerate(belief.deviations):
        step = np.zeros(len(belief.mean))
        step[i] = _STEP * deviation
        columns.append((law(belief.mean + step) - law(belief.mean - step)) / (2.0 * step[i]))
    return np.stack(columns, axis=1)
