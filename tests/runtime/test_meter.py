"""What a master counts of its own doing."""

from __future__ import annotations

import random

import pytest
from ganger.cluster.refusals import Reason, Refusal
from ganger_master.core.answers import Approved, ChangeAnswer, PlanAnswer, Rejected
from ganger_master.core.events import HistoryRow
from ganger_master.runtime.telemetry import Distribution, MasterCounters


def test_a_distribution_counts_what_is_at_most_each_bound() -> None:
    bounds, values = (1.0, 5.0, 10.0), [random.Random(1).choice([0.5, 1.0, 3.0, 5.0, 7.0, 99.0]) for _ in range(100)]
    distribution = Distribution(bounds)
    for value in values:
        distribution.add(value)
    expected = [(bound, sum(value <= bound for value in values)) for bound in (*bounds, float("inf"))]
    assert list(distribution.at_most()) == expected
    assert distribution.sum == pytest.approx(sum(values))


def test_rejections_are_counted_by_their_first_reason_of_requests_and_of_plans() -> None:
    meter = MasterCounters()
    full, protected = Refusal(Reason.GPUS, {"needed": 8}), Refusal(Reason.PROTECTED)
    meter.answered(Rejected(1, (full, protected), (), 1, True))
    meter.answered(Approved(1, 1, 1, 1, 0))
    meter.answered(PlanAnswer((ChangeAnswer(1, True, 2), ChangeAnswer(2, False, 2, (protected,))), 1))
    assert meter.rejections == {"GPUS": 1, "PROTECTED": 1}


def test_waits_pauses_and_failed_attempts_are_taken_from_the_history() -> None:
    meter = MasterCounters()
    for kind, figures in (
        ("gang_approved", {"waited_s": "7.250"}),
        ("gang_approved", {"epoch": "3"}),
        ("move_done", {"pause_ms": "1500.0"}),
        ("attempt_failed", {"outcome": "LAUNCH_FAILED"}),
        ("job_failed", {"deadline": "missed"}),
    ):
        meter.happened([HistoryRow(1, 0.0, "jobs/1", kind, "test", "", figures)])
    assert meter.events == {"gang_approved": 2, "move_done": 1, "attempt_failed": 1, "job_failed": 1}
    assert (meter.waits.count, meter.waits.sum) == (1, 7.25)
    assert meter.pauses.sum == 1.5
    assert meter.failed_attempts == {"LAUNCH_FAILED": 1}
    assert meter.deadlines == {"missed": 1}
