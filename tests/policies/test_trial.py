"""Keeping what helped and undoing what did not: how often chance is taken for gain, and what is found at all. (2 s)"""

from __future__ import annotations

import math

import numpy as np
import pytest
from ganger_master.policies.trials import (
    FIRST_WINDOWS,
    MOST_WINDOWS,
    Judged,
    TrialRates,
    TrialVerdict,
    judge,
    normalised,
)
from scipy import stats


def measured(random: np.random.Generator, mean: float, windows: int, scatter: float = 0.05) -> tuple[float, ...]:
    return tuple((mean * np.exp(scatter * random.standard_normal(windows) - scatter**2 / 2)).tolist())


def followed(
    random: np.random.Generator, speeds: tuple[float, ...], threshold: float, doubt: float = 0.05
) -> TrialVerdict:
    """As a planner would, at every look until it is told."""
    jobs = [(measured(random, 10.0, 16), measured(random, 10.0 * speed, MOST_WINDOWS)) for speed in speeds]
    for windows in (FIRST_WINDOWS << look for look in range(5)):
        verdict = judge([TrialRates(before, after[:windows]) for before, after in jobs], threshold, doubt).verdict
        if verdict is not TrialVerdict.MEASURE:
            return verdict
    raise AssertionError("still open after the last window")


def share(verdicts: list[TrialVerdict], of: TrialVerdict) -> float:
    return sum(verdict is of for verdict in verdicts) / len(verdicts)


def test_change_without_gain_is_hardly_ever_kept_however_often_one_looks() -> None:
    random = np.random.default_rng(0)
    verdicts = [followed(random, (0.525, 0.525), 1.05) for _ in range(400)]
    assert share(verdicts, TrialVerdict.KEEP) <= 0.05


def test_clear_gain_is_kept_and_clear_loss_undone() -> None:
    random = np.random.default_rng(1)
    assert share([followed(random, (0.6, 0.6), 1.05) for _ in range(100)], TrialVerdict.KEEP) >= 0.95
    assert share([followed(random, (0.45, 0.5), 1.05) for _ in range(100)], TrialVerdict.UNDO) >= 0.99


def test_large_gain_is_seen_at_the_first_look_and_a_small_one_later() -> None:
    random = np.random.default_rng(2)
    before = measured(random, 10.0, 16)
    large = TrialRates(before, measured(random, 9.0, MOST_WINDOWS))
    small = TrialRates(before, measured(random, 5.7, MOST_WINDOWS, scatter=0.15))
    assert judge([TrialRates(before, large.after[:FIRST_WINDOWS])] * 2, 1.05).verdict is TrialVerdict.KEEP
    assert judge([TrialRates(before, small.after[:FIRST_WINDOWS])] * 2, 1.05).verdict is TrialVerdict.MEASURE
    assert judge([small, small], 1.05).verdict is TrialVerdict.KEEP


def test_between_two_looks_nothing_is_decided_anew() -> None:
    random = np.random.default_rng(3)
    before, after = measured(random, 10.0, 8), measured(random, 5.3, MOST_WINDOWS)
    at_eight = judge([TrialRates(before, after[:8])] * 2, 1.05)
    assert all(judge([TrialRates(before, after[:windows])] * 2, 1.05) == at_eight for windows in range(9, 16))


def test_what_is_open_after_the_last_look_is_undone() -> None:
    before, after = (10.0, 11.0, 9.0), (0.0, 21.0) * (MOST_WINDOWS // 2)
    found = judge([TrialRates(before, after)], 1.0)
    assert found.verdict is TrialVerdict.UNDO
    assert found.gain.bounds(0.05)[1] > 1.0


def test_rates_without_scatter_are_judged_by_their_sum() -> None:
    steady = TrialRates((2.0, 2.0), (1.2,) * 4)
    assert judge([steady, steady], 1.1).verdict is TrialVerdict.KEEP
    assert judge([steady], 1.1).verdict is TrialVerdict.UNDO
    assert normalised([steady, steady]).value == pytest.approx(1.2)


def test_deviation_of_the_sum_is_that_of_many_repetitions() -> None:
    random = np.random.default_rng(4)
    sums = [
        normalised(
            [
                TrialRates(measured(random, rate, 12), measured(random, rate * speed, 20))
                for rate, speed in ((5, 0.7), (9, 0.4))
            ]
        )
        for _ in range(800)
    ]
    values = [found.value for found in sums]
    assert float(np.mean(values)) == pytest.approx(1.1, abs=0.005)
    assert float(np.mean([found.deviation for found in sums])) == pytest.approx(float(np.std(values)), rel=0.1)


def test_bounds_of_one_job_with_an_exact_past_are_students() -> None:
    after = (0.8, 1.1, 0.9, 1.3, 1.0)
    low, high = normalised([TrialRates((1.0, 1.0), after)]).bounds(0.025)
    theirs = stats.t.interval(0.95, 4, np.mean(after), stats.sem(after))
    assert (low, high) == pytest.approx(theirs)


def test_nothing_is_said_before_the_first_look() -> None:
    found = judge([TrialRates((1.0, 1.1), (1.0,) * (FIRST_WINDOWS - 1))], 1.0)
    assert found.verdict is TrialVerdict.MEASURE
    assert math.isnan(found.gain.value)
    assert found == Judged(TrialVerdict.MEASURE, found.gain)


@pytest.mark.parametrize(
    "jobs",
    [
        [],
        [TrialRates((1.0,), (1.0,) * 4)],
        [TrialRates((0.0, 0.0), (1.0,) * 4)],
        [TrialRates((1.0, 1.0), (math.nan,) * 4)],
        [TrialRates((1.0, 1.0), (-1.0,) * 4)],
        [TrialRates((1.0, math.inf), (1.0,) * 4)],
    ],
)
def test_measurements_that_cannot_be_are_refused(jobs: list[TrialRates]) -> None:
    with pytest.raises(ValueError, match=r"measured|windows"):
        judge(jobs, 1.0)


def test_gain_of_windows_that_were_asked_about_before_is_what_they_say() -> None:
    """Means are cached by the windows alone."""
    random = np.random.default_rng(7)
    some = [measured(random, 10.0, windows) for windows in (4, 8, 8, 16)]
    for _ in range(2):
        for before in some:
            for after in some:
                gain = normalised([TrialRates(before, after)])
                assert gain.value == float(np.mean(after)) / float(np.mean(before))
                errors = [np.std(rates, ddof=1) / np.mean(rates) / len(rates) ** 0.5 for rates in (before, after)]
                assert gain.deviation == pytest.approx(gain.value * float(np.hypot(*errors)))
