"""The present rate of a job, window by window, from its progress reports.

A window is long enough, in time and steps, to be independent of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from ganger_master.policies.trials import FIRST_WINDOWS, MOST_WINDOWS

# Reported times of one clock have this error.
_CLOCK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """Steps done at a time, in seconds of one clock. `since_s`: when the first step since the last start or resume was
    done, by that clock; NaN if it was not reported."""

    time_s: float
    step: int
    since_s: float = float("nan")

    def goes_on_from(self, began: ProgressSample) -> bool:
        """Return whether neither the job nor its clock went back since `began`, and the job was not parked
        meanwhile."""
        if self.step < began.step or self.time_s < began.time_s - _CLOCK_S:
            return False
        return not began.time_s < self.since_s - _CLOCK_S


@dataclass(frozen=True, slots=True)
class RateWindows:
    """`open`: where the unfinished window began; `rates`: of the last full ones, in steps per second."""

    open: ProgressSample | None = None
    rates: tuple[float, ...] = ()

    def after(self, look: ProgressSample, least_s: float, least_steps: int) -> RateWindows:
        """Return the windows after one more sample. A window begins anew after a park, a restart or a clock that was
        set."""
        began = self.open
        if began is None or not look.goes_on_from(began):
            return replace(self, open=look)
        seconds, steps = look.time_s - began.time_s, look.step - began.step
        if seconds < least_s or seconds <= 0.0 or steps < least_steps:
            return self
        return RateWindows(look, (*self.rates, steps / seconds)[-MOST_WINDOWS:])

    @property
    def is_enough(self) -> bool:
        """Whether there are enough windows for a first verdict."""
        return len(self.rates) >= FIRST_WINDOWS

    @property
    def rate(self) -> float:
        """The median rate, so that an evaluation or a checkpoint in one window does not count; NaN without windows."""
        return median(self.rates) if self.rates else float("nan")
