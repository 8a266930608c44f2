"""What users are told of the deadlines of their jobs."""

from __future__ import annotations

import pytest
from ganger.cluster.resources import Role, TaskShape
from ganger.cluster.view import View
from ganger.job_state import JobState
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.planner.job_forecasts import deadline_advice
from kit.clusters import idle_row, server
from msgspec.structs import replace

NOW = 10_000.0
SERVER = server("2x2")


def job(number: int, gpus: int, due_s: float, limit_s: float | None, **more: object) -> JobRecord:
    spec = JobSpec(
        ("train",),
        (Role("worker", gpus, TaskShape(1)),),
        deadline=NOW + due_s if due_s else 0.0,
        time_limit_s=limit_s,
    )
    return JobRecord(number, "", f"user-{number}", spec, NOW - 10, pending_since=NOW - 10, **more)  # type: ignore[arg-type]


def advice(*jobs: JobRecord, rivals: tuple[int, ...] = ()) -> str:
    """Of the last one, on 4 GPUs."""
    view = View([SERVER])
    view.put(idle_row("n1", SERVER))
    return deadline_advice([(one, None) for one in jobs], jobs[-1].number, view, NOW, rivals)


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([job(1, 4, 9_000, 3_600)], "can be met: it would end 90 min before it"),
        # Behind one whose deadline is earlier.
        ([job(1, 4, 5_000, 4_000), job(2, 4, 9_000, 3_600)], "can be met: it would end 23 min before it"),
        ([job(1, 4, 5_000, 4_000), job(2, 4, 7_000, 3_600)], "cannot be met: it would end 10 min after it"),
        # Before one whose deadline is later.
        ([job(1, 4, 5_000, 4_000), job(2, 4, 4_000, 3_600)], "can be met, and makes jobs/1 late for theirs"),
        ([job(1, 8, 5_000, 60)], "cannot be met: its gang never finds room beside those with earlier deadlines"),
        (
            [job(1, 4, 5_000, None), job(2, 4, 9_000, 3_600)],
            "unknown whether it can be met, because how long jobs/1 takes is not known",
        ),
        (
            [job(1, 4, 5_000, None)],
            "unknown whether it can be met, because how long the job takes is not known: give it a time limit",
        ),
        # A job without a deadline yields to all that have one.
        ([job(1, 4, 0, None), job(2, 4, 9_000, 3_600)], "can be met: it would end 90 min before it"),
    ],
)
def test_advice_says_when_it_would_end_or_for_which_job_that_is_unknown(jobs: list[JobRecord], expected: str) -> None:
    assert advice(*jobs) == expected


@pytest.mark.parametrize(
    ("rival_s", "own_s", "due_s", "expected"),
    [
        (60, 3_600, 9_000, "can be met: it would end 89 min before it"),
        (None, 3_600, 7_000, "that depends on which nodes jobs of other partitions get"),
        (4_000, 3_600, 7_000, "that depends on which nodes jobs of other partitions get"),
        (None, 8_000, 7_000, "cannot be met: it would end 17 min after it"),
    ],
)
def test_where_jobs_of_other_partitions_may_get_its_nodes_it_counts_what_holds_with_them_and_without(
    rival_s: float | None, own_s: float, due_s: float, expected: str
) -> None:
    assert advice(job(1, 4, 5_000, rival_s), job(2, 4, due_s, own_s), rivals=(1,)).endswith(expected)


def test_without_a_limit_it_goes_by_what_the_jobs_before_it_took() -> None:
    ended = [
        replace(job(number, 1, 0, None), user="ann", state=JobState.SUCCEEDED, run_s=1_000.0, pending_since=0.0)
        for number in range(1, 20)
    ]
    mine = replace(job(20, 1, 5_000, None), user="ann")
    assert advice(*ended, mine).startswith("can be met: it would end 6")
    assert advice(*ended, replace(mine, spec=replace(mine.spec, deadline=NOW + 300))).startswith("cannot be met")


def test_a_job_that_has_run_for_some_time_has_as_much_less_left() -> None:
    running = replace(
        job(1, 4, 5_000, 4_000), state=JobState.HOLDING, pending_since=0.0, running_since=NOW - 3_000, run_s=500.0
    )
    assert advice(running, job(2, 4, 9_000, 3_600)) == "can be met: it would end 82 min before it"


def test_of_a_job_that_is_over_there_is_nothing_to_say() -> None:
    assert advice(replace(job(1, 4, 9_000, 60), state=JobState.SUCCEEDED, pending_since=0.0)) == ""
