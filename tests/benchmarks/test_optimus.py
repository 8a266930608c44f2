"""What `ganger bench optimus` makes of the steps that jobs noted, and of the reasons of resizes."""

from __future__ import annotations

import math

import pytest

from benchmarks.optimus import (
    JOBS,
    OptimusLook,
    PolicyRun,
    foretold_speed,
    overhead,
    rate_at,
    remaining_errors,
    speed_errors,
)

# Two steps a second with one worker, a pause of four seconds, then four steps a second with two.
NOTES = [(step, 0.5 * step, 1, 1) for step in range(1, 11)] + [
    (step, 9.0 + 0.25 * (step - 10), 1, 2) for step in range(11, 31)
]
REASON = "from ps=1 worker=1 to ps=1 worker=2: 2 to 5 steps/s, 20 foreseen left"


def run(looks: tuple[OptimusLook, ...] = ()) -> PolicyRun:
    return PolicyRun("optimus", {"a": 0.0}, {"a": 15.0}, {"a": NOTES}, looks, {"a": [(5.0, REASON)]}, (4, 3))


def test_overhead_is_the_gap_at_a_change_of_size_without_the_step_in_it() -> None:
    share, changes = overhead(run())
    assert changes == 1
    assert share == pytest.approx((9.25 - 5.0 - 0.25) / (14.0 - 0.5))


def test_rates_are_those_of_steps_with_the_same_tasks_before_and_after() -> None:
    assert rate_at(NOTES, 1, 1) == pytest.approx(2.0)
    assert rate_at(NOTES, 1, 2) == pytest.approx(4.0)
    assert math.isnan(rate_at(NOTES, 2, 2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (REASON, (1, 2, 5.0)),
        ("from 1 GPU to 3: 10 steps/s with 1, 27 with 3, 400 foreseen left", (0, 3, 27.0)),
        ("from 1 GPU to 3", None),
    ],
)
def test_a_reason_foretells_a_speed(text: str, expected: tuple[int, int, float] | None) -> None:
    assert foretold_speed(text) == expected


def test_a_foretold_speed_is_compared_with_the_one_that_followed() -> None:
    ((at, error),) = speed_errors(run())
    assert at == pytest.approx(4.5 / 14.5)
    assert error == pytest.approx(0.25)


def test_a_remaining_time_is_compared_with_the_end_and_a_guess_holds_nothing() -> None:
    right = OptimusLook("a", 7.0, 9.0, 7.0, 12.0, False)
    guess = OptimusLook("a", 11.0, 1.0, 0.0, math.inf, True)
    ((error, is_held),) = remaining_errors(run((right, guess)), ["a"], 0.5)
    assert (error, is_held) == (pytest.approx(1.0 / 14.5), True)
    ((error, is_held),) = remaining_errors(run((right, guess)), ["a"], 0.75)
    assert (error, is_held) == (pytest.approx(3.0 / 14.5), False)


def test_the_jobs_are_of_both_kinds_and_no_user_asks_for_the_fastest_size_of_each() -> None:
    assert len(JOBS) >= 6
    assert {bool(job.servers) for job in JOBS} == {True, False}
    assert sum(bool(job.converges) for job in JOBS) >= 2
    sizes = [(servers, workers) for servers in range(1, 4) for workers in range(1, 5)]
    best = [max(job.steps_per_s(p if job.servers else 0, w) for p, w in sizes) for job in JOBS]
    assert any(one > 1.2 * job.steps_per_s(job.servers, job.asked) for job, one in zip(JOBS, best, strict=True))
