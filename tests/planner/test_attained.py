"""For how long a job has stepped, by its reports."""

from __future__ import annotations

import pytest
from ganger_master.planner.job_measurements import AttainedTime
from ganger_master.planner.rate_registry import ProgressReport, RateRegistry
from planner.test_colocation_rates import job


@pytest.mark.parametrize(
    ("reports", "seconds"),
    [
        ([(10, 1.0)], 0.0),
        ([(10, 1.0), (20, 2.0), (30, 3.0)], 2.0),
        # Ten steps a second; it rested, and did five steps around that, which may be a little slower.
        ([(10, 1.0), (20, 2.0), (25, 10.5)], 1.55),
        # A step takes four seconds.
        ([(1, 4.0), (2, 8.0), (3, 12.0)], 8.0),
        ([(1, 4.0), (2, 8.0), (3, 52.0)], 8.4),
        # What an old report says is no news, and it steps again from a checkpoint.
        ([(10, 1.0), (20, 2.0), (20, 2.0), (5, 3.0), (15, 4.0)], 2.0),
    ],
    ids=["one report", "steps all the time", "rests between", "steps that take long", "and rests", "goes back"],
)
def test_only_the_time_in_which_it_stepped_counts(reports: list[tuple[int, float]], seconds: float) -> None:
    attained = AttainedTime(*reports[0])
    for step, time_s in reports[1:]:
        attained.follow(step, time_s)
    assert attained.received_s == pytest.approx(seconds)


def test_a_job_that_has_ended_is_dropped() -> None:
    registry = RateRegistry()
    for number in (7, 8):
        registry.put(job(number), None, 0, 1.0)
        registry.record(number, ProgressReport(1, 1.0), 1.0)
    registry.forget(7, 2.0)
    assert registry.received_s == {8: 0.0}
    registry.keep(lambda number: False, 2.0)
    assert registry.received_s == {}
