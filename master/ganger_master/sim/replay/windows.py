"""What is measured of jobs that share GPUs: rates, in windows that scatter, how busy a device is, and who is where."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ganger_master.policies.introspect.trial import MOST_WINDOWS
from ganger_master.sim.replay.footprints import Footprints

# A window is several mini-batches; of the first one after a change, caches and pipelines fill.
WINDOW_S = 5.0
_SCATTER = 0.05
# Of when it ran alone, the last ones.
_MOST_ALONE = 16


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A job trains at one rate, beside the same others."""

    since_s: float
    rate: float
    beside: frozenset[int]
    number: int


class Windows:
    """By job number; `now` is set by whoever asks. What of rates is noise comes from the seed."""

    def __init__(self, footprints: Footprints, seed: int) -> None:
        self.now = 0.0
        self._footprints = footprints
        self._seed = seed
        self._stretches: dict[int, _Stretch] = {}
        self._counted: dict[int, int] = {}
        self._alone: dict[int, tuple[float, ...]] = {}

    def trains(self, number: int, now: float, rate: float, beside: frozenset[int]) -> None:
        """From now on at this rate, beside these."""
        self.rests(number, now)
        count = self._counted[number] = self._counted.get(number, 0) + 1
        self._stretches[number] = _Stretch(now, rate, beside, count)

    def rests(self, number: int, now: float) -> None:
        stretch = self._stretches.pop(number, None)
        if stretch is not None and not stretch.beside:
            self._keep(number, self._windows(number, stretch, now))

    def forget(self, number: int) -> None:
        """It has ended."""
        for known in (self._stretches, self._counted, self._alone):
            known.pop(number, None)

    def alone(self, number: int) -> tuple[float, ...]:
        stretch = self._stretches.get(number)
        if stretch is not None and not stretch.beside:
            self._keep(number, self._windows(number, stretch, self.now))
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

    def _keep(self, number: int, windows: tuple[float, ...]) -> None:
        if len(windows) >= 2:
            self._alone[number] = windows[-_MOST_ALONE:]

    def _windows(self, number: int, stretch: _Stretch, now: float) -> tuple[float, ...]:
        count = min(MOST_WINDOWS, int((now - stretch.since_s) / WINDOW_S) - 1)
        if count < 1:
            return ()
        noise = np.random.default_rng([self._seed, 3, number, stretch.number]).standard_normal(MOST_WINDOWS)[:count]
        return tuple((stretch.rate * (1.0 + _SCATTER * noise).clip(0.1)).tolist())
