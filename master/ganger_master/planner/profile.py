"""What is known of what cores do to one job: what was measured of it, and before that what those before it tell.

People submit series of the same program, so the next one begins with the curve of the last one. How fast it is may
differ (another batch size), how it depends on cores hardly: the curve is brought to the height of the first rate that
is measured of the job itself, and what is measured replaces it point by point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from ganger_master.estimators.cpu import CpuModel, CpuPoint, fit_cpu

# A rate this far from what was measured or expected before says that the job is another one now, or never was like
# those before it.
SURPRISE: Final = 0.2


@dataclass(frozen=True, slots=True)
class CoreProfile:
    """Points with cores for each GPU and steps per second, in the order in which they were measured."""

    own: tuple[CpuPoint, ...] = ()
    # Of the last job of the series.
    inherited: tuple[CpuPoint, ...] = ()

    @property
    def points(self) -> tuple[CpuPoint, ...]:
        """All there is to go by, at most one for each number of cores."""
        known = {point.cores for point in self.own}
        height = self._height
        others = [CpuPoint(one.cores, height * one.rate) for one in self.inherited if one.cores not in known]
        return (*others, *self.own)

    @property
    def model(self) -> CpuModel | None:
        """None before there are two points: of one nobody knows whether more cores help."""
        points = self.points
        return fitted(points) if len(points) > 1 else None

    @property
    def least_cores(self) -> float:
        """That were measured; infinite for none."""
        return min([point.cores for point in self.points], default=math.inf)

    def at(self, cores: float) -> float | None:
        """What was measured with so many."""
        return next((point.rate for point in self.own if point.cores == cores), None)

    def measured(self, point: CpuPoint) -> CoreProfile:
        """With one point more. One that is a surprise makes those before it void."""
        known = self.at(point.cores)
        if known is not None:
            return self if _is_like(point.rate, known) else CoreProfile((point,))
        if self.own and self.inherited and not _is_like(point.rate, self._rate(point.cores)):
            return replace(self, own=(*self.own, point), inherited=())
        return replace(self, own=(*self.own, point))

    @property
    def _height(self) -> float:
        """Of this job against the one before it: the geometric mean over what was measured of it."""
        model = fitted(self.inherited) if self.inherited else None
        if model is None or not self.own:
            return 1.0
        ratios = [math.log(point.rate / rate) for point in self.own if (rate := model.rate(point.cores)) > 0.0]
        return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0

    def _rate(self, cores: float) -> float:
        model = fitted(self.points)
        return 0.0 if model is None else model.rate(cores)


@lru_cache(4096)
def fitted(points: tuple[CpuPoint, ...]) -> CpuModel | None:
    """Jobs of one series ask for the same curve."""
    return fit_cpu(points)


def _is_like(rate: float, other: float) -> bool:
    return abs(rate - other) <= SURPRISE * max(rate, other)
