"""Seconds that running jobs need still, each with a range, and how often the truth has lain in such ranges.

A forecast holds for the tasks that a job has. It is judged when the job succeeds, by the time that it ran since, unless
it has had other tasks in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Final

from ganger.job_state import JobState

from ganger_master.core.job_model import JobRecord
from ganger_master.estimators.server_speed import ServerSpeed
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.planner.job_measurements import RunCondition, server_role
from ganger_master.policies.optimus_sizes import OptimusEstimate

# Nine of ten values of a normal distribution are within so many deviations.
_DEVIATIONS: Final = 1.64
# Rates to come differ by as much from those measured, at least, and at most as far as a range can show.
_LEAST_SPREAD, _MOST_SPREAD = 0.1, 0.9
# The last report is older by then, and the end of a program takes as long.
_AROUND_S: Final = 3.0
# A forecast is kept for its judgement whenever the job has run for so much longer, up to a number.
_LATER, _LATER_S, _KEPT_MOST = 1.2, 5.0, 24


@dataclass(frozen=True, slots=True)
class RemainingTime:
    """Seconds that a job needs still with the tasks that it has. The range from `low_s` to `high_s` is to hold the
    truth in nine of ten cases; `high_s`: infinite where nothing bounds it. `is_guess`: no end is predictable yet."""

    number: int
    value_s: float
    low_s: float
    high_s: float
    is_guess: bool = False


def remaining_time(
    number: int, estimate: OptimusEstimate, rates: Sequence[float], fitted: float
) -> RemainingTime | None:
    """Return the remaining time of a job; None without a rate. `rates`: windows with the tasks that it has, in steps/s;
    `fitted`: what its speed model gives for these; NaN without one."""
    rate = fmean(rates) if rates else fitted
    if not rate > 0.0 or not estimate.steps_left >= 0.0:
        return None
    spread = _LEAST_SPREAD if rates else 2.0 * _LEAST_SPREAD
    if len(rates) > 1:
        spread = min(max(spread, _DEVIATIONS * stdev(rates) / rate), _MOST_SPREAD)
    value_s = estimate.steps_left / rate
    low_s = max(0.0, min(estimate.low, estimate.steps_left) / (rate * (1.0 + spread)) - _AROUND_S)
    high_s = max(estimate.high, estimate.steps_left) / (rate * (1.0 - spread)) + _AROUND_S
    return RemainingTime(number, value_s, low_s, high_s, estimate.is_young)


def fitted_rate(job: JobRecord, estimate: OptimusEstimate, run: RunCondition, gpus_per_node: int) -> float:
    """Return the steps/s that the speed model gives for the tasks of a run; NaN without one."""
    servers, speed = server_role(job.spec), estimate.speed
    if isinstance(speed, ServerSpeed) and servers is not None and len(run.tasks) == 2:
        return speed.steps_per_second(run.tasks[servers], run.tasks[1 - servers])
    if isinstance(speed, AllReduceModel) and run.gpus:
        return 1.0 / speed.step_s(run.gpus, -(-run.gpus // max(1, gpus_per_node)), 1.0 / run.gpus)
    return math.nan


@dataclass(frozen=True, slots=True)
class Calibration:
    """Forecasts that were judged, and those of them whose range held the truth."""

    judged: int = 0
    held: int = 0


NO_FORECASTS: Final = Calibration()


@dataclass(frozen=True, slots=True)
class _Forecast:
    """`ran_s`: how long the job had run in all."""

    ran_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class _JobForecasts:
    """Forecasts under one condition, oldest first."""

    condition: tuple[int, ...]
    forecasts: tuple[_Forecast, ...] = ()


@dataclass(frozen=True, slots=True)
class ForecastLedger:
    """Forecasts that are not judged yet, by job number, and the record of those that are."""

    calibration: Calibration = NO_FORECASTS
    by_job: Mapping[int, _JobForecasts] = field(default_factory=dict)

    def noted(self, job: JobRecord, tasks: tuple[int, ...], found: RemainingTime, now: float) -> ForecastLedger:
        """Return the ledger with a forecast of a job that runs with these tasks; guesses are not judged."""
        known = self.by_job.get(job.number)
        if known is None or known.condition != tasks:
            known = _JobForecasts(tasks)
        ran_s = job.ran_s(now)
        is_due = not known.forecasts or ran_s >= _LATER * known.forecasts[-1].ran_s + _LATER_S
        if is_due and not found.is_guess and math.isfinite(found.high_s):
            one = _Forecast(ran_s, found.low_s, found.high_s)
            known = replace(known, forecasts=(*known.forecasts, one)[-_KEPT_MOST:])
        if known is self.by_job.get(job.number):
            return self
        return replace(self, by_job={**self.by_job, job.number: known})

    def settled(self, job: JobRecord) -> ForecastLedger:
        """Return the ledger without a job that is no longer live; its forecasts are judged if it has succeeded."""
        known = self.by_job.get(job.number)
        if known is None:
            return self
        by_job = {number: one for number, one in self.by_job.items() if number != job.number}
        if job.state is not JobState.SUCCEEDED:
            return replace(self, by_job=by_job)
        held = sum([one.low_s <= job.run_s - one.ran_s <= one.high_s for one in known.forecasts])
        before = self.calibration
        return ForecastLedger(Calibration(before.judged + len(known.forecasts), before.held + held), by_job)
