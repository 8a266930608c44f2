"""Traces by OpenTelemetry: one trace for each job, from its submission to its first step, from all programs.

The identifier of a trace is the job's `uid`, and that of a span follows from the job and the span's name, so programs
need no context from each other. OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT and others) name the
collector; without them nothing is sent. OpenTelemetry's packages come with `ganger[tracing]`.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

# The span that contains all others: from the submission to the first step.
ROOT: Final = "start of a job"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# Longest wait at the end of a program for spans that were not sent yet.
_LAST_WAIT_S: Final = 2.0


def start_of_gang(epoch: int) -> str:
    """Return the name of the span from the approval of a gang to its first step, which contains those of its nodes."""
    return f"start of gang {epoch}"


class JobTracer:
    """Sends the spans of one program. `send`: takes a span that has ended; None: no span is sent. `is_sampled`: whether
    spans of a trace with this identifier are sent; `resource`: OpenTelemetry's attributes of the program."""

    def __init__(
        self,
        send: Callable[[ReadableSpan], None] | None = None,
        is_sampled: Callable[[int], bool] = lambda _: True,
        resource: Any = None,
    ) -> None:
        self._send, self._is_sampled, self._resource = send, is_sampled, resource

    @property
    def is_on(self) -> bool:
        """Return whether spans are sent at all."""
        return self._send is not None

    def add(
        self,
        uid: str,
        name: str,
        begin_s: float,
        end_s: float,
        *,
        parent: str = ROOT,
        error: str = "",
        attributes: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Send a span of a job.

        uid: of the job. begin_s, end_s: Unix seconds. parent: the name of the span that contains it; without meaning
        for `ROOT`. error: why the start failed; empty if it did not. A job whose uid is no UUID has no trace."""
        if self._send is None or (trace := _trace_id(uid)) is None or not self._is_sampled(trace):
            return
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        def context(of: str) -> SpanContext:
            return SpanContext(trace, _span_id(uid, of), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        self._send(
            ReadableSpan(
                name,
                context=context(name),
                parent=None if name == ROOT else context(parent),
                resource=self._resource,
                attributes=attributes,
                status=Status(StatusCode.ERROR, error) if error else Status(),
                start_time=int(begin_s * 1e9),
                end_time=int(max(begin_s, end_s) * 1e9),
            )
        )


_made: JobTracer | None = None


def set_up_tracing(program: str) -> None:
    """Make the tracer of this process, named `program`. It sends spans to the collector that OpenTelemetry's variables
    name.

    Without these variables it sends nothing. Without OpenTelemetry's packages, or with variables that it cannot read,
    it sends nothing and logs a warning: traces are optional, and no program stops for them."""
    global _made
    _made = JobTracer()
    if not any(map(os.environ.get, _ENDPOINTS)) or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        _made = _tracer_of_sdk(program)
    except ImportError as error:
        log.warning("no traces are sent: install ganger[tracing]", extra={"error": str(error)})
    except Exception as error:
        log.warning("no traces are sent: see the variables OTEL_...", extra={"error": str(error)})


def tracer() -> JobTracer:
    """Return the tracer of this process; that of a client where none was made."""
    if _made is None:
        set_up_tracing("client")
    assert _made is not None
    return _made


def _tracer_of_sdk(program: str) -> JobTracer:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import Decision

    sampler = TracerProvider(shutdown_on_exit=False).sampler
    resource = Resource.create({"service.namespace": "ganger", "service.name": f"ganger-{program}"})
    processor = BatchSpanProcessor(_exporter())
    library = logging.getLogger("opentelemetry")
    if program == "client":
        # A user reads one line about a collector that is away, and not one for each attempt to reach it.
        library.setLevel(logging.ERROR)

    def finish() -> None:
        # In a thread, because the processor waits for a collector that does not answer, whatever time it is given.
        last = threading.Thread(target=processor.force_flush, daemon=True)
        last.start()
        last.join(_LAST_WAIT_S)
        if last.is_alive():
            log.warning("the last spans are not sent: the collector of traces does not answer")
            library.setLevel(logging.CRITICAL)

    atexit.register(finish)
    return JobTracer(
        processor.on_end,
        lambda trace: sampler.should_sample(None, trace, ROOT).decision is not Decision.DROP,
        resource,
    )


def _exporter() -> SpanExporter:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol in (None, "grpc"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    raise ValueError(f"protocol {protocol}: Ganger sends traces by grpc only")


def _trace_id(uid: str) -> int | None:
    try:
        return uuid.UUID(uid).int or None
    except ValueError:
        return None


def _span_id(uid: str, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{uid}/{name}".encode(), digest_size=8).digest(), "big") or 1
