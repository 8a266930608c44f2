"""One trace for each job, by OpenTelemetry's protocol, from every program that takes part in its start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from kit.cluster import NO_PRELOAD, Cluster
from kit.waiting import eventually
from system.harness import SCRIPT

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

pytestmark = pytest.mark.system


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What an operator's collector receives: (program, span)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[tuple[str, Span]] = []

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            for of_program in request.resource_spans:
                said = {each.key: each.value.string_value for each in of_program.resource.attributes}
                for scope in of_program.scope_spans:
                    self._found += [(said["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, uid: str) -> dict[str, tuple[str, Span]]:
        """The spans of a job by name."""
        trace = bytes.fromhex(uid.replace("-", ""))
        with self._lock:
            return {span.name: (program, span) for program, span in self._found if span.trace_id == trace}


@contextmanager
def collecting() -> Iterator[tuple[Collector, dict[str, str]]]:
    """A collector, and the variables by which programs send to it."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield (
            collector,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_BSP_SCHEDULE_DELAY": "100"},
        )
    finally:
        server.stop(None)


def test_a_job_has_one_trace_from_its_submission_to_its_first_step(tmp_path: Path) -> None:
    with (
        collecting() as (collector, variables),
        Cluster(
            tmp_path / "cluster", environment=variables, virtual_gpus=1, topology="1x1", daemon_options=NO_PRELOAD
        ) as cluster,
    ):
        steps = ("--steps", "3", "--record", str(tmp_path / "record"))
        cluster.run("submit", "--gpus", "2", "--", sys.executable, str(SCRIPT), *steps)
        cluster.run("wait", "1", "--timeout", "60s")
        uid = str(cluster.json("show", "1")["uid"])
        eventually(
            lambda: len(collector.spans(uid)) >= 8, what="all programs have sent their spans", story=cluster.story
        )
        found = collector.spans(uid)
        (epoch,) = {int(name.removeprefix("start of gang ")) for name in found if name.startswith("start of gang")}
        whole, gang = "start of a job", f"start of gang {epoch}"
        # span: its program, and the span that contains it.
        assert {name: (program, name_of(found, span.parent_span_id)) for name, (program, span) in found.items()} == {
            whole: ("ganger-master", ""),
            "submit": ("ganger-client", whole),
            f"wait for gang {epoch}": ("ganger-master", whole),
            gang: ("ganger-master", whole),
            **{f"launch on n{node}": ("ganger-daemon", gang) for node in range(2)},
            **{f"first step on n{node}": ("ganger-daemon", gang) for node in range(2)},
        }
        for name, (_, span) in found.items():
            outside = found[name_of(found, span.parent_span_id) or whole][1]
            # The history has waits in milliseconds.
            begins_inside = span.start_time_unix_nano >= outside.start_time_unix_nano - 1_000_000
            assert begins_inside or name == "submit", name
            assert span.end_time_unix_nano > span.start_time_unix_nano, name
        figures = {each.key: each.value for each in found[f"wait for gang {epoch}"][1].attributes}
        approved = next(event for event in cluster_events(cluster) if event["kind"] == "gang_approved")
        assert figures["ganger.event"].int_value == int(str(approved["sequence"]))
        assert figures["ganger.cause"].string_value == approved["cause"]


@pytest.mark.parametrize("answers", [True, False])
def test_no_program_waits_for_long_at_its_end_for_a_collector_that_is_away_or_hangs(answers: bool) -> None:
    """`answers`: nothing listens there, and the system says so; else connections are accepted, and that is all."""
    begun = "from ganger.tracing import tracer; tracer().add('6a1f0d5e-93a4-4b1c-8f55-0c1f5a1b2c3d', 'submit', 1, 2)"
    timed = f"{begun}; import time; print(time.monotonic(), flush=True)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = 9 if answers else server.getsockname()[1]
        away = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}
        ended = subprocess.run([sys.executable, "-c", timed], env=away, capture_output=True, text=True, check=True)
    assert time.monotonic() - float(ended.stdout) < 6, "two seconds, and what a loaded machine needs"


def name_of(found: dict[str, tuple[str, Span]], number: bytes) -> str:
    return next((name for name, (_, span) in found.items() if span.span_id == number), "")


def cluster_events(cluster: Cluster) -> list[dict[str, object]]:
    events = json.loads(cluster.run("events", "jobs/1", "--json").stdout)
    assert isinstance(events, list)
    return events
