"""Quantities over simulated time that keep their value until they change: GPUs in use, jobs waiting, and the like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from ganger_master.simulator.traces.workload import Floats

# Steps kept of a quantity: more than a plot can show, whatever the length of the run.
MOST_STEPS = 8_192


@dataclass(frozen=True, eq=False)
class StepSeries:
    """`values[i]` holds from `times[i]` to before `times[i + 1]`, the last one to `end`. Times ascend strictly.

    Seconds of simulated time; the unit of the values is the quantity's.
    """

    times: Floats
    values: Floats
    end: float

    @classmethod
    def of(cls, times: ArrayLike, values: ArrayLike, end: float) -> Self:
        """ValueError for times that do not ascend, an end before the last of them, or no step at all."""
        made = cls(np.array(times, float), np.array(values, float), float(end))
        if not len(made.times) or made.times.shape != made.values.shape:
            raise ValueError("a series needs as many values as times, and at least one")
        if (np.diff(made.times) <= 0).any() or made.end < made.times[-1]:
            raise ValueError("the times of a series must ascend, up to its end")
        made.times.flags.writeable = made.values.flags.writeable = False
        return made

    @property
    def start(self) -> float:
        return float(self.times[0])

    def at(self, when: ArrayLike) -> Floats:
        """The values at these times; NaN outside the series."""
        moments = np.asarray(when, float)
        step = np.searchsorted(self.times, moments, side="right") - 1
        inside = (step >= 0) & (moments <= self.end)
        return np.where(inside, self.values[np.maximum(step, 0)], np.nan)

    def integral_to(self, when: ArrayLike) -> Floats:
        """Value x seconds from the start to each of these times, which must lie within the series."""
        moments = np.asarray(when, float)
        widths = np.diff(self.times)
        before = np.concatenate(([0.0], np.cumsum(widths * self.values[:-1])))
        step = np.clip(np.searchsorted(self.times, moments, side="right") - 1, 0, None)
        return np.asarray(before[step] + (moments - self.times[step]) * self.values[step])

    def mean(self, first: float | None = None, last: float | None = None) -> float:
        """Time-weighted, over the whole series or the part of it from `first` to `last`; NaN if that has no length."""
        begin = self.start if first is None else max(first, self.start)
        end = self.end if last is None else min(last, self.end)
        if not end > begin:
            return float("nan")
        low, high = self.integral_to([begin, end])
        return float(high - low) / (end - begin)

    def thinned(self, most_steps: int = MOST_STEPS) -> StepSeries:
        """At most so many steps: neighbours merged into their time-weighted mean, so that the mean over the whole stays
        exact."""
        series = self
        while len(series.times) > max(1, most_steps):
            series = series._halved()
        return series

    def _halved(self) -> StepSeries:
        widths = np.diff(np.append(self.times, self.end))
        firsts = np.arange(0, len(self.times), 2)
        width = np.add.reduceat(widths, firsts)
        area = np.add.reduceat(widths * self.values, firsts)
        # The last step may have no width yet: its value stands as it is.
        values = np.divide(area, width, out=self.values[firsts].copy(), where=width > 0)
        return StepSeries.of(self.times[firsts], values, self.end)


class SeriesRecorder:
    """Collects a series while time goes on; what it holds does not grow with the run."""

    def __init__(self, start: float, value: float = 0.0, most_steps: int = MOST_STEPS) -> None:
        self._times = [start]
        self._values = [value]
        self._most_steps = max(2, most_steps)

    def record(self, now: float, value: float) -> None:
        """The quantity has this value from now on; of several at one instant the last counts."""
        assert now >= self._times[-1], f"time went back from {self._times[-1]} to {now}"
        if value == self._values[-1]:
            return
        if now == self._times[-1]:
            self._values[-1] = value
            return
        self._times.append(now)
        self._values.append(value)
        if len(self._times) > 2 * self._most_steps:
            # The newest step is still open: it must not be merged into the past.
            past = StepSeries.of(self._times[:-1], self._values[:-1], now).thinned(self._most_steps)
            self._times = [*past.times.tolist(), now]
            self._values = [*past.values.tolist(), value]

    def series(self, end: float) -> StepSeries:
        return StepSeries.of(self._times, self._values, end)
