"""Spans of the master, from what is durable."""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid
from typing import Any

import pytest
from ganger.cluster.resources import Role, TaskShape
from ganger.job_state import JobState
from ganger.tracing import ROOT, JobTracer
from ganger_master.core.events import HistoryRow
from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.runtime.telemetry import JobTraces

pytest.importorskip("opentelemetry.sdk")

UID = str(uuid.uuid4())
SUBMITTED = ("job_submitted", {})
FIRST, SECOND = ("gang_approved", {"epoch": "1", "waited_s": "1"}), ("gang_approved", {"epoch": "2", "waited_s": "2"})
RUNNING, FAILED, ENDED = ("gang_running", {}), ("attempt_failed", {}), ("job_failed", {})
SUCCEEDED = ("job_succeeded", {})


def spans_of(*entries: tuple[str, dict[str, str]]) -> list[tuple[str, float, float, str]]:
    """(name, begin, end, error) of each span, for entries at 10, 20, ... seconds."""
    found: list[Any] = []
    traces = JobTraces(JobTracer(found.append))
    job = JobRecord(7, UID, "ann", JobSpec(("train",), (Role("worker", 1, TaskShape(1)),)), 10.0)
    for place, (kind, figures) in enumerate(entries, 1):
        traces.follow([HistoryRow(place, place * 10.0, "jobs/7", kind, "user:ann", "why", figures)], {7: job})
    return [(span.name, span.start_time / 1e9, span.end_time / 1e9, span.status.description or "") for span in found]


@pytest.mark.parametrize(
    ("entries", "spans"),
    [
        (
            (SUBMITTED, FIRST, RUNNING),
            [("wait for gang 1", 19, 20, ""), ("start of gang 1", 20, 30, ""), (ROOT, 10, 30, "")],
        ),
        (
            (SUBMITTED, FIRST, FAILED, SECOND, RUNNING),
            [
                ("wait for gang 1", 19, 20, ""),
                ("start of gang 1", 20, 30, "why"),
                ("wait for gang 2", 38, 40, ""),
                ("start of gang 2", 40, 50, ""),
                (ROOT, 10, 50, ""),
            ],
        ),
        ((SUBMITTED, ENDED), [(ROOT, 10, 20, "why")]),
        # A script that ends before a step of it was seen.
        (
            (SUBMITTED, FIRST, SUCCEEDED),
            [("wait for gang 1", 19, 20, ""), ("start of gang 1", 20, 30, ""), (ROOT, 10, 30, "")],
        ),
        # Later starts of a job that has made a step once.
        (
            (SUBMITTED, FIRST, RUNNING, SECOND, RUNNING, ENDED),
            [
                ("wait for gang 1", 19, 20, ""),
                ("start of gang 1", 20, 30, ""),
                (ROOT, 10, 30, ""),
                ("wait for gang 2", 38, 40, ""),
                ("start of gang 2", 40, 50, ""),
            ],
        ),
        # Of a former master's submission nothing is known.
        ((FIRST, RUNNING), [("wait for gang 1", 9, 10, ""), ("start of gang 1", 10, 20, "")]),
        ((RUNNING, ENDED), []),
    ],
)
def test_the_start_of_a_job_is_one_trace(entries: Any, spans: list[tuple[str, float, float, str]]) -> None:
    assert spans_of(*entries) == spans


def test_without_a_collector_nothing_is_kept() -> None:
    traces = JobTraces(JobTracer())
    traces.follow([HistoryRow(1, 1.0, "jobs/7", "job_submitted", "user:ann")], {})
    assert not traces._starts


def test_a_job_without_a_uuid_has_no_trace_and_does_no_harm() -> None:
    found: list[Any] = []
    for uid in ("uid-7", "", str(uuid.UUID(int=0))):
        JobTracer(found.append).add(uid, ROOT, 1.0, 2.0)
    assert found == []


@pytest.mark.parametrize("state", [state for state in JobState if state.is_finished])
@pytest.mark.parametrize("is_kept", [True, False])
def test_nothing_is_kept_of_a_job_that_has_ended(state: JobState, is_kept: bool) -> None:
    traces = JobTraces(JobTracer([].append))
    job = JobRecord(7, UID, "ann", JobSpec(("train",), (Role("worker", 1, TaskShape(1)),)), 10.0)
    kinds = ("job_submitted", "gang_approved", f"job_{state.lower()}")
    rows = [HistoryRow(n, n, "jobs/7", kind, "", "", {"epoch": "1"}) for n, kind in enumerate(kinds, 1)]
    traces.follow(rows[:2], {7: job})
    assert traces._starts
    traces.follow(rows[2:], {7: job} if is_kept else {})
    assert not traces._starts


def test_a_client_prints_one_line_about_a_collector_that_never_answers() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    script = f"from ganger.tracing import tracer; tracer().add({UID!r}, 'submit', 1.0, 2.0)"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
        }
        ended = subprocess.run(
            [sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=60, check=True
        )
    assert ended.stderr == "the last spans are not sent: the collector of traces does not answer\n"
