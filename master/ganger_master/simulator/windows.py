"""What is measured of jobs that share GPUs: rates, in windows that scatter, how busy a device is, and who is where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from ganger_master.policies.trial_test import FIRST_WINDOWS, MOST_WINDOWS
from ganger_master.simulator.true_rates import Footprints

# A window is several mini-batches; of the first one after a change, caches and pipelines fill.
WINDOW_S = 5.0
_SCATTER = 0.05
# Of when it ran alone, the last ones.
_MOST_ALONE = 16


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A job trains at one rate, with so many GPUs, beside the same others."""

    since_s: float
    rate: float
    beside: frozenset[int]
    number: int
    gpus: int


class ModelledRates:
    """By job number; `now` is set by whoever asks. What of rates is noise comes from the seed."""

    def __init__(self, footprints: Footprints, seed: int) -> None:
        self.now = 0.0
        self._footprints = footprints
        self._seed = seed
        self._stretches: dict[int, _Stretch] = {}
        self._counted: dict[int, int] = {}
        self._alone: dict[int, tuple[float, ...]] = {}
        self._by_size: dict[int, dict[int, tuple[float, ...]]] = {}
        # All of a stretch, by its number, and those that there are by now, as last asked for: they change only with a
        # window more.
        self._whole: dict[int, tuple[int, tuple[float, ...]]] = {}
        self._made: dict[int, tuple[int, tuple[float, ...]]] = {}
        self._kept: dict[int, tuple[float, ...]] = {}

    def trains(self, number: int, now: float, rate: float, beside: frozenset[int], gpus: int) -> None:
        """From now on at this rate, with so many GPUs, beside these."""
        self.rests(number, now)
        count = self._counted[number] = self._counted.get(number, 0) + 1
        self._stretches[number] = _Stretch(now, rate, beside, count, gpus)

    def rests(self, number: int, now: float) -> None:
        stretch = self._stretches.pop(number, None)
        if stretch is not None and not stretch.beside:
            self._keep(number, stretch, now)

    def forget(self, number: int) -> None:
        """It has ended."""
        for known in (
            self._stretches,
            self._counted,
            self._alone,
            self._by_size,
            self._whole,
            self._made,
            self._kept,
        ):
            known.pop(number, None)

    def alone(self, number: int) -> tuple[float, ...]:
        stretch = self._stretches.get(number)
        if stretch is not None and not stretch.beside:
            self._keep(number, stretch, self.now)
        return self._alone.get(number, ())

    def present(self, number: int) -> tuple[float, ...]:
        stretch = self._stretches.get(number)
        return () if stretch is None else self._windows(number, stretch, self.now)

    def beside(self, number: int) -> frozenset[int]:
        stretch = self._stretches.get(number)
        return frozenset() if stretch is None else stretch.beside

    def utilisation(self, number: int) -> float:
        return self._footprints.utilisation(number - 1)

    def signature(self, number: int) -> str:
        return self._footprints.signature(number - 1)

    def windows(self, number: int) -> tuple[float, ...]:
        """Since its number of GPUs changed last: what says whether that helped."""
        return self.present(number)

    def rates(self, number: int) -> Mapping[int, float]:
        """By number of GPUs, as last measured with each."""
        self.alone(number)
        return {gpus: median(windows) for gpus, windows in self._by_size.get(number, {}).items()}

    def next_look_s(self, number: int) -> float:
        """When there will be enough windows for the next look at how it does as it trains now; infinite if there is
        none to come, or it rests."""
        stretch = self._stretches.get(number)
        if stretch is None:
            return math.inf
        count, there_are = FIRST_WINDOWS, len(self._windows(number, stretch, self.now))
        while count <= there_are:
            count *= 2
        # A hair later, so that rounding leaves no window out.
        return stretch.since_s + (count + 1) * WINDOW_S + 1e-3 if count <= MOST_WINDOWS else math.inf

    def crowd(self, number: int) -> tuple[int, Mapping[int, tuple[float, ...]]]:
        """Gangs on one node take nothing from each other here but devices, cores and memory that are counted."""
        return 0, {}

    def _keep(self, number: int, stretch: _Stretch, now: float) -> None:
        windows = self._windows(number, stretch, now)
        if self._kept.get(number) is windows:
            return
        self._kept[number] = windows
        if len(windows) >= 2:
            self._alone[number] = windows[-_MOST_ALONE:]
        if len(windows) >= FIRST_WINDOWS:
            self._by_size.setdefault(number, {})[stretch.gpus] = windows

    def _windows(self, number: int, stretch: _Stretch, now: float) -> tuple[float, ...]:
        count = min(MOST_WINDOWS, int((now - stretch.since_s) / WINDOW_S) - 1)
        if count < 1:
            return ()
        known = self._made.get(number)
        if known is not None and known[0] == stretch.number and len(known[1]) == count:
            return known[1]
        whole = self._whole.get(number)
        if whole is None or whole[0] != stretch.number:
            noise = np.random.default_rng([self._seed, 3, number, stretch.number]).standard_normal(MOST_WINDOWS)
            whole = stretch.number, tuple((stretch.rate * (1.0 + _SCATTER * noise).clip(0.1)).tolist())
            self._whole[number] = whole
        windows = whole[1][:count]
        self._made[number] = stretch.number, windows
        return windows
