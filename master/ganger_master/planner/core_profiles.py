"""Measured curves of rate by CPU cores and host memory.

A job starts with the curve of the last job of its series, scaled to its own rates; its points are replaced one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ganger_master.estimators.cores_and_memory import CpuModel, CpuPoint, fit_cpu, is_full_rate
from ganger_master.policies.orders import Integers
from ganger_master.policies.tunings import NOTHING, Known, Profiles

# A relative deviation above this from a measured or predicted rate shows that the job has changed, or differs from the
# earlier jobs of its series.
SURPRISE: Final = 0.2

# (bytes per GPU, highest rate), by bytes ascending.
MemoryLimits: TypeAlias = tuple[tuple[float, float], ...]
# For the restore of a job that is stopped, as the master adds to a working set.
_MEMORY_MARGIN_BYTES: Final = 1 << 30
# What a job needs may grow by this factor before its points are lifted: it creeps.
_CREEP: Final = 1.1


@dataclass(frozen=True, slots=True)
class CoreProfile:
    """Points of one job: cores per GPU and steps/s, in the order in which they were measured."""

    own: tuple[CpuPoint, ...] = ()
    # Of the last job of the series.
    inherited: tuple[CpuPoint, ...] = ()

    @property
    def points(self) -> tuple[CpuPoint, ...]:
        """Own points and scaled inherited ones with all memory, at most one for each number of cores."""
        measured = _by_cores(self.own)
        own = {point.cores for point in measured}
        scale = self._scale
        others = [CpuPoint(one.cores, scale * one.rate) for one in _by_cores(self.inherited) if one.cores not in own]
        return (*others, *measured)

    @property
    def memory_points(self) -> tuple[CpuPoint, ...]:
        """Points with less memory, by memory, the last one with all that the job had: its own, else scaled inherited
        ones."""
        own = [point for point in self.own if point.memory_bytes < math.inf]
        scale = 1.0 if own else self._scale
        found = own or [point for point in self.inherited if point.memory_bytes < math.inf]
        return tuple([replace(one, rate=scale * one.rate) for one in sorted(found, key=lambda one: one.memory_bytes)])

    @property
    def all_points(self) -> tuple[CpuPoint, ...]:
        """What a later job of the series inherits."""
        return (*self.points, *self.memory_points)

    @property
    def model(self) -> CpuModel | None:
        """Curve through the points; None for fewer than two, which do not show whether more cores help."""
        points = self.points
        return fitted(points) if len(points) > 1 else None

    @property
    def least_cores(self) -> float:
        """Least number of cores per GPU among the points; infinite without points."""
        return min([point.cores for point in self.points], default=math.inf)

    def at(self, cores: float) -> float | None:
        """Return the rate measured with this number of cores per GPU and all memory, in steps/s, or None."""
        return next((point.rate for point in _by_cores(self.own) if point.cores == cores), None)

    def with_point(self, point: CpuPoint) -> CoreProfile:
        """Return the profile with one more point. A surprising point makes earlier ones void."""
        rate = self.at(point.cores)
        if rate is not None:
            return self if _is_like(point.rate, rate) else CoreProfile((point,))
        if self.own and self.inherited and not _is_like(point.rate, self._rate(point.cores)):
            return replace(self, own=(*self.own, point), inherited=())
        return replace(self, own=(*self.own, point))

    def with_memory(self, point: CpuPoint, held_bytes: float) -> CoreProfile:
        """Return the profile with one more point of less memory. `held_bytes`: all memory for each GPU."""
        full = self.at(point.cores)
        assert full is not None, "the rate with all memory was measured before"
        kept = [one for one in self.own if one.memory_bytes not in (point.memory_bytes, held_bytes)]
        return replace(self, own=(*kept, CpuPoint(point.cores, full, held_bytes), point))

    def with_least_memory(self, least_bytes: float) -> CoreProfile:
        """Return the profile where no point has less memory for each GPU than the job needed since, file caches apart:
        what is much below is lifted to that."""
        if not any(point.memory_bytes * _CREEP < least_bytes for point in self.own):
            return self
        lifted: dict[tuple[float, float], CpuPoint] = {}
        for point in self.own:
            memory = max(point.memory_bytes, least_bytes)
            known = lifted.get((point.cores, memory))
            if known is None or known.rate < point.rate:
                lifted[point.cores, memory] = replace(point, memory_bytes=memory)
        return replace(self, own=tuple(lifted.values()))

    def limits(self, held_bytes: float) -> MemoryLimits:
        """Return the highest rate with each amount of memory per GPU, margin included; infinite where it costs nothing.

        Empty if that is unknown, and for a job that holds more (`held_bytes` for each GPU; zero: it does not run) than
        it was shown to need: no memory is taken from it while it runs."""
        points = self.memory_points
        if not points:
            return ()
        limits: dict[float, float] = {}
        for point in points:
            amount = min(points[-1].memory_bytes, point.memory_bytes * 5 / 4 + _MEMORY_MARGIN_BYTES)
            limit = math.inf if is_full_rate(point, points) else point.rate
            limits[amount] = max(limits.get(amount, 0.0), limit)
        needed = min([amount for amount, limit in limits.items() if limit == math.inf])
        return () if held_bytes > needed else tuple(sorted(limits.items()))

    @property
    def _scale(self) -> float:
        """Rate of this job relative to the inherited curve: the geometric mean over its own points."""
        inherited, own = _by_cores(self.inherited), _by_cores(self.own)
        model = fitted(inherited) if inherited else None
        if model is None or not own:
            return 1.0
        ratios = [math.log(point.rate / rate) for point in own if (rate := model.rate(point.cores)) > 0.0]
        return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0

    def _rate(self, cores: float) -> float:
        model = fitted(self.points)
        return 0.0 if model is None else model.rate(cores)


def _by_cores(points: tuple[CpuPoint, ...]) -> tuple[CpuPoint, ...]:
    """Return the points with all memory."""
    return tuple([point for point in points if point.memory_bytes == math.inf])


@lru_cache(4096)
def fitted(points: tuple[CpuPoint, ...]) -> CpuModel | None:
    """Return the curve through these points. It is cached, since jobs of one series share points."""
    return fit_cpu(points)


def _is_like(rate: float, other: float) -> bool:
    return abs(rate - other) <= SURPRISE * max(rate, other)


def curves_of(profiles: Iterable[tuple[int, CoreProfile, MemoryLimits]]) -> Known:
    """Return the curves of the jobs with enough points, for a tuning policy. `profiles`: by job number, ascending."""
    found = [
        (number, _Curve(model, profile.least_cores, limits))
        for number, profile, limits in profiles
        if (model := profile.model)
    ]
    if not found:
        return NOTHING
    of_curve: dict[_Curve, int] = {}
    positions = np.array([of_curve.setdefault(curve, len(of_curve)) for _, curve in found], np.int64)
    numbers = np.array([number for number, _ in found], np.int64)

    def position(asked: Integers) -> Integers:
        at = np.minimum(np.searchsorted(numbers, asked), len(numbers) - 1)
        return np.where(numbers[at] == asked, positions[at], -1)

    knows_memory = np.array([bool(curve.limits) for curve in of_curve])
    return Known(_profiles(list(of_curve)), position, knows_memory)


class _Curve(NamedTuple):
    """`least`: the fewest cores measured."""

    model: CpuModel
    least: float
    limits: MemoryLimits


def _profiles(curves: Sequence[_Curve]) -> Profiles:
    """Return the curves at whole numbers of cores and measured amounts of memory, as a tuning policy reads them.

    Below the fewest cores measured the rate is taken to fall in proportion to the cores, and below the least memory in
    proportion to that: only a trial may show that it falls more slowly.
    """
    most = max(int(np.ceil(max(curve.model.knee, curve.least))) for curve in curves)
    cores = np.arange(1.0, max(2, most) + 1.0)
    memory = np.array(sorted({amount for curve in curves for amount, _ in curve.limits}) or [1.0])
    rates = np.empty((len(curves), len(cores), len(memory)))
    for at, (model, least, limits) in enumerate(curves):
        of_cores = model.rates(cores)
        of_cores = np.where(cores < least, np.minimum(of_cores, model.rate(least) * cores / least), of_cores)
        rates[at] = np.maximum.accumulate(of_cores)[:, None]
        if limits:
            amounts, most_rates = (np.array(column) for column in zip(*limits, strict=True))
            below = np.maximum(np.searchsorted(amounts, memory, side="right") - 1, 0)
            rates[at] = np.minimum(rates[at], most_rates[below]) * np.minimum(1.0, memory / amounts[0])
    return Profiles(cores, memory, np.maximum.accumulate(rates, axis=2))
