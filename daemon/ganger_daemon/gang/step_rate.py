"""Steps per second and share of time spent waiting, from two looks at the page: at no cost to the job."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageSample:
    """A gang's progress at one time; of several local ranks the slowest step and the longest wait count."""

    time_seconds: float
    step: int
    samples: int
    data_wait_ns: int
    loss: float = math.nan
    restored_step: int = 0  # where this attempt began: what lies before was not done here
    step_age_seconds: float = 0.0  # how long ago the step was done
    since_age_seconds: float | None = None  # and the first one since it began to run or went on; None: not yet
    training_epoch: int = 0  # passes over its data that are behind it
    training_epochs: int = 0  # and in all; 0: it does not say


@dataclass(frozen=True, slots=True)
class Rate:
    steps_per_second: float
    data_wait_share: float


def rate_between(earlier: PageSample | None, later: PageSample) -> Rate:
    """Mean over the interval; zero for an empty one, or after a restart set the counters back."""
    if earlier is None or later.time_seconds <= earlier.time_seconds or later.step < earlier.step:
        return Rate(0.0, 0.0)
    seconds = later.time_seconds - earlier.time_seconds
    waited = max(0, later.data_wait_ns - earlier.data_wait_ns) / 1e9
    steps = later.step - max(earlier.step, min(later.step, later.restored_step))
    return Rate(steps / seconds, min(1.0, waited / seconds))


def iteration_seconds(rate: Rate) -> float:
    """Mean time of one iteration; 0 when it is not known."""
    return 1.0 / rate.steps_per_second if rate.steps_per_second > 0 else 0.0
