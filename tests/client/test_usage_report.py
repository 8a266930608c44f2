"""What a report has of jobs: GPU-hours cut to its time, waiting, completion times and deadlines."""

from __future__ import annotations

import math
from dataclasses import replace

from ganger.history import HistoryEvent, spans_of
from ganger.job_state import JobState, Span
from ganger.usage_report import ReportedJob, UserFigures, report_of, spread


def event(time: float, kind: str, **figures: str) -> HistoryEvent:
    return HistoryEvent(time, kind, "", "", figures)


# Waits 10 s, starts for 5, runs for 100 on 2 GPUs, rests for 20 at PAUSE, starts for 1, runs for 64.
LIFE = (
    event(1_000, "job_submitted", gpus="2"),
    event(1_010, "gang_approved", nodes="n1"),
    event(1_015, "gang_running"),
    event(1_115, "gang_parked", level="PAUSE", step="7"),
    event(1_135, "resume_ordered"),
    event(1_136, "gang_running"),
    event(1_200, "job_succeeded"),
)
JOB = ReportedJob(
    user="ann",
    state=JobState.SUCCEEDED,
    create_time=1_000,
    start_time=1_015,
    end_time=1_200,
    gpus=2,
    run_s=164,
    preemptions=1,
    spans=spans_of(LIFE, 2_000),
)


def figures(*jobs: ReportedJob, since: float = 0, until: float = 2_000) -> UserFigures:
    return report_of(jobs, since, until)[0]


def test_the_states_of_a_job_follow_from_its_events() -> None:
    assert [(span.state, span.end - span.begin, span.keeps) for span in JOB.spans] == [
        ("waited", 10, False),
        ("starting", 5, True),
        ("ran", 100, True),
        ("parked", 20, True),
        ("starting", 1, True),
        ("ran", 64, True),
    ]
    assert {span.gpus for span in JOB.spans} == {2}


def test_gpu_hours_are_those_of_running_and_those_that_were_held() -> None:
    found = figures(JOB)
    assert (found.stepped_gpu_s, found.held_gpu_s, found.idle_gpu_s) == (328, 380, 52)
    assert (found.waiting_s, found.jct_s, found.preemptions) == ([10], [200], 1)
    assert found.states == {"succeeded": 1}


def test_only_the_time_of_the_report_counts_and_a_job_outside_of_it_not_at_all() -> None:
    inside = figures(JOB, since=1_100, until=1_140)
    assert (inside.stepped_gpu_s, inside.held_gpu_s) == (2 * (15 + 4), 2 * 40)
    assert (inside.live, inside.jct_s) == (1, [])
    assert report_of([JOB], 1_300, 1_400) == []
    assert report_of([JOB], 0, 900) == []


def test_a_job_at_offload_holds_nothing_and_one_in_time_slices_its_part() -> None:
    offloaded = spans_of([*LIFE[:3], event(1_115, "gang_parked", level="OFFLOAD")], 1_215)
    assert [span.keeps for span in offloaded][-1] is False
    sliced = spans_of([*LIFE[:3], event(1_015, "rows_changed", rows="0", of_rows="4", quantum_seconds="60")], 1_115)
    assert sliced[-1] == Span(1_015, 1_115, "turns", 2, 0.25, True)
    assert figures(replace(JOB, spans=sliced)).stepped_gpu_s == 0.25 * 100 * 2


def test_after_a_resize_the_new_number_of_gpus_counts() -> None:
    resized = [
        *LIFE[:3],
        event(1_100, "resize_begun", devices="2", becomes="4"),
        event(1_110, "resize_committed", step="9"),
        event(1_111, "gang_running"),
    ]
    assert [(span.state, span.gpus) for span in spans_of(resized, 1_200)][-3:] == [
        ("ran", 2),
        ("starting", 4),
        ("ran", 4),
    ]


def test_without_its_history_a_job_counts_with_its_run_time() -> None:
    found = figures(replace(JOB, spans=()))
    assert (found.stepped_gpu_s, found.held_gpu_s, found.without_history) == (328, 328, 1)
    assert found.waiting_s == [15]


def test_deadlines_are_met_missed_at_risk_or_open() -> None:
    def outcome(**changes: object) -> dict[str, int]:
        return dict(figures(replace(JOB, **changes)).deadlines)  # type: ignore[arg-type]

    assert outcome() == {}
    assert outcome(deadline=1_200) == {"met": 1}
    assert outcome(deadline=1_199) == {"missed": 1}
    assert outcome(deadline=1_300, state=JobState.FAILED) == {"missed": 1}
    assert outcome(deadline=1_300, state=JobState.CANCELLED) == {}
    assert outcome(deadline=1_100, state=JobState.CANCELLED) == {"missed": 1}
    live = {"state": JobState.HOLDING, "end_time": 0.0}
    assert outcome(deadline=3_000, **live) == {"open": 1}
    assert outcome(deadline=3_000, advice="cannot be met: it would end 2 h after it", **live) == {"at_risk": 1}
    assert outcome(deadline=1_999, **live) == {"missed": 1}


def test_several_users_have_a_sum_before_them() -> None:
    whole, ann, bob = report_of([JOB, replace(JOB, user="bob"), JOB], 0, 2_000)
    assert [(one.user, one.states["succeeded"]) for one in (whole, ann, bob)] == [("", 3), ("ann", 2), ("bob", 1)]
    assert whole.stepped_gpu_s == ann.stepped_gpu_s + bob.stepped_gpu_s


def test_quantiles_are_values_that_there_are() -> None:
    found = spread([float(value) for value in range(1, 101)])
    assert (found.mean, found.p50, found.p95, found.count) == (50.5, 50, 95, 100)
    assert spread([7.0]).p95 == 7.0
    assert math.isnan(spread([]).mean)
