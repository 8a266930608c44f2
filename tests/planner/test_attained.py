"""For how long a job has stepped, by its reports."""

from __future__ import annotations

import pytest
from ganger_master.planner.job_measures import AttainedService


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
    attained = AttainedService()
    for step, time_s in reports:
        attained.record(7, step, time_s)
    assert attained.received_s == {7: pytest.approx(seconds)}


def test_a_job_that_has_ended_is_dropped() -> None:
    attained = AttainedService()
    for number in (7, 8):
        attained.record(number, 1, 1.0)
    attained.forget(7)
    assert attained.received_s.keys() == {8}
    attained.keep(lambda number: False)
    assert attained.received_s == {}
