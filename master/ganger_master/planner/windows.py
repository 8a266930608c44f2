"""The rate of a job as it runs now, window by window, from the steps that it reports.

A window is so long and of so many steps that one says little about the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from ganger_master.policies.trial_test import FIRST_WINDOWS, MOST_WINDOWS

# Times of one clock are told with so much of an error.
_CLOCK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """Steps that were done at a time, in seconds of any clock. `since_s`: when the first one was done since the job
    last began to run or went on, by the same clock; NaN where nobody says."""

    time_s: float
    step: int
    since_s: float = float("nan")

    def goes_on_from(self, began: ProgressSample) -> bool:
        """Whether neither the job nor its clock has gone back, nor has it rested in between."""
        if self.step < began.step or self.time_s < began.time_s - _CLOCK_S:
            return False
        return not began.time_s < self.since_s - _CLOCK_S


@dataclass(frozen=True, slots=True)
class RateWindows:
    """`open`: where the window began that is not full yet; `rates`: of the last full ones, in steps per second."""

    open: ProgressSample | None = None
    rates: tuple[float, ...] = ()

    def after(self, look: ProgressSample, least_s: float, least_steps: int) -> RateWindows:
        """With one look more. Who rested, or went back (it was started again, or its clock was set), begins its window
        anew."""
        began = self.open
        if began is None or not look.goes_on_from(began):
            return replace(self, open=look)
        seconds, steps = look.time_s - began.time_s, look.step - began.step
        if seconds < least_s or seconds <= 0.0 or steps < least_steps:
            return self
        return RateWindows(look, (*self.rates, steps / seconds)[-MOST_WINDOWS:])

    @property
    def is_enough(self) -> bool:
        """For a first judgement."""
        return len(self.rates) >= FIRST_WINDOWS

    @property
    def rate(self) -> float:
        """The usual one: an evaluation or a checkpoint in some window does not count. NaN without any."""
        return median(self.rates) if self.rates else float("nan")
