"""How far a fit is from what was measured, always as a share of the measured value.

Relative, because a model that is 0.2 steps/s off is useless for a slow job and perfect for a fast one.
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
