"""What several runs that differ only in their seed say together: a mean, and how far off it may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """The mean of `runs` values lies within `half_width` of the true mean with the confidence asked for."""

    mean: float
    half_width: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if math.isnan(self.half_width) else f"{self.mean:.4g} ± {self.half_width:.2g}"


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's t over independent values; of one value the width is NaN. ValueError of none, or of NaN."""
    if not len(values) or any(math.isnan(value) for value in values):
        raise ValueError("an interval needs values that are known")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Interval(mean, math.nan, 1)
    # Loading it takes longer than a short simulation.
    from scipy.special import stdtrit

    factor = float(stdtrit(len(values) - 1, (1.0 + confidence) / 2.0))
    return Interval(mean, factor * float(np.std(values, ddof=1)) / math.sqrt(len(values)), len(values))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> Interval:
    """How many times ours is theirs, seed by seed: the interval of the ratios, since runs of one seed share their jobs
    and vary together. ValueError for different numbers of runs, or theirs not above zero."""
    if len(ours) != len(theirs) or any(not value > 0 for value in theirs):
        raise ValueError("ratios need two runs of each seed, the second above zero")
    return interval([one / other for one, other in zip(ours, theirs, strict=True)], confidence)
