"""Remaining times of running jobs: their ranges, and how often the truth lay in them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from core.drive import job_of
from ganger.job_state import JobState
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.remaining_time import ForecastLedger, RemainingTime, remaining_time
from ganger_master.policies.optimus_sizes import NOTHING, OptimusEstimate
from msgspec.structs import replace

EXACT = OptimusEstimate(100.0, is_young=False, low=100.0, high=100.0)


def job(ran_s: float = 0.0, state: JobState = JobState.HOLDING) -> JobRecord:
    return replace(JobRecord(1, "", "", job_of(1), 0.0), state=state, run_s=ran_s)


def forecast(low_s: float, high_s: float, is_guess: bool = False) -> RemainingTime:
    return RemainingTime(1, (low_s + high_s) / 2, low_s, high_s, is_guess)


def test_known_steps_at_a_steady_rate_have_a_narrow_range_and_scattered_rates_a_wide_one() -> None:
    steady, scattered = (remaining_time(1, EXACT, rates, math.nan) for rates in ([2.0] * 8, [1.0, 3.0] * 4))
    assert steady is not None
    assert scattered is not None
    assert steady.value_s == scattered.value_s == 50.0
    assert 35.0 < steady.low_s < 50.0 < steady.high_s < 65.0
    assert scattered.low_s < steady.low_s
    assert scattered.high_s > 2.0 * steady.high_s


def test_a_rate_that_was_not_measured_is_the_fitted_one_with_a_wider_range() -> None:
    measured, fitted = remaining_time(1, EXACT, [2.0] * 4, 9.0), remaining_time(1, EXACT, [], 2.0)
    assert measured is not None
    assert fitted is not None
    assert fitted.value_s == 50.0
    assert fitted.low_s < measured.low_s
    assert fitted.high_s > measured.high_s


@pytest.mark.parametrize("rates", [[], [0.0], [math.nan]])
def test_without_a_rate_or_steps_nothing_is_estimated(rates: list[float]) -> None:
    assert remaining_time(1, EXACT, rates, math.nan) is None
    assert remaining_time(1, NOTHING, [1.0], 1.0) is None


def test_forecasts_are_judged_by_the_time_that_the_job_ran_since_when_it_has_succeeded() -> None:
    ledger = ForecastLedger()
    ledger = ledger.noted(job(10.0), (1,), forecast(80.0, 100.0), 0.0)
    ledger = ledger.noted(job(40.0), (1,), forecast(10.0, 20.0), 0.0)
    judged = ledger.settled(job(100.0, JobState.SUCCEEDED))
    assert (judged.calibration.judged, judged.calibration.held) == (2, 1)
    assert judged.settled(job(100.0, JobState.SUCCEEDED)) == judged
    assert ledger.settled(job(100.0, JobState.FAILED)).calibration == ForecastLedger().calibration


def test_forecasts_with_other_tasks_and_guesses_are_not_judged() -> None:
    ledger = ForecastLedger().noted(job(10.0), (1, 2), forecast(80.0, 100.0), 0.0)
    ledger = ledger.noted(job(40.0), (2, 2), forecast(50.0, 70.0), 0.0)
    ledger = ledger.noted(job(90.0), (2, 2), forecast(1.0, 2.0, is_guess=True), 0.0)
    ledger = ledger.noted(job(95.0), (2, 2), forecast(0.0, math.inf), 0.0)
    assert ledger.settled(job(100.0, JobState.SUCCEEDED)).calibration.judged == 1


def test_forecasts_close_together_count_once() -> None:
    ledger = ForecastLedger()
    for ran_s in range(10, 100):
        ledger = ledger.noted(job(float(ran_s)), (1,), forecast(0.0, 1_000.0), 0.0)
    assert 4 <= ledger.settled(job(100.0, JobState.SUCCEEDED)).calibration.judged <= 9


def test_nine_of_ten_ranges_hold_the_truth_where_rates_scatter_as_measured() -> None:
    random = np.random.default_rng(0)
    ledger = ForecastLedger()
    for number in range(200):
        rates = 2.0 * (1.0 + 0.1 * random.standard_normal(1_000))
        ends_s = float(np.searchsorted(np.cumsum(rates), 1_000.0)) + 1.0
        one = replace(job(), number=number, run_s=50.0)
        left = 1_000.0 - float(rates[:50].sum())
        estimate = OptimusEstimate(left, is_young=False, low=left, high=left)
        found = remaining_time(number, estimate, rates[40:50].tolist(), math.nan)
        assert found is not None
        ledger = ledger.noted(one, (1,), found, 0.0)
        ledger = ledger.settled(replace(one, state=JobState.SUCCEEDED, run_s=ends_s))
    assert ledger.calibration.judged == 200
    assert ledger.calibration.held >= 180
