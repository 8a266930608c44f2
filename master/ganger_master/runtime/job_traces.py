"""Spans of the master in the traces of jobs (`ganger.tracing`), made from durable entries of the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from ganger.job_state import JobState
from ganger.tracing import ROOT, JobTracer, start_of_gang

from ganger_master.core.events import HistoryRow
from ganger_master.core.job_model import JobRecord

# Entries after which a job, or a gang of it, makes no first step. A script may succeed before a step of it is seen.
_ENDS: Final = frozenset({*[f"job_{state.lower()}" for state in JobState if state.is_finished], "attempt_failed"})
_SUCCEEDED: Final = f"job_{JobState.SUCCEEDED.lower()}"


class JobStart(msgspec.Struct):
    """The start of a job that is under way. `submitted_s`: None once the root span was sent; `epoch`: of its last gang;
    `approved_s`: when that was approved; zero: there is none yet. Times are Unix seconds."""

    submitted_s: float | None
    epoch: int = 0
    approved_s: float = 0.0


class JobTraces:
    """The starts of jobs that are under way. A start that began under a former master has no span: traces are
    optional, and the history is the record."""

    def __init__(self, tracer: JobTracer) -> None:
        self._tracer = tracer
        self._starts: dict[str, JobStart] = {}

    def follow(self, history: Sequence[HistoryRow], jobs: Mapping[int, JobRecord]) -> None:
        """Send the spans that end with durable entries. `jobs`: all jobs, with these entries."""
        if not self._tracer.is_on:
            return
        for entry in history:
            kind, _, number = entry.subject.partition("/")
            if kind != "jobs":
                continue
            if (job := jobs.get(int(number))) is not None:
                self._follow_entry(entry, job)
            else:
                self._starts.pop(entry.subject, None)

    def _follow_entry(self, entry: HistoryRow, job: JobRecord) -> None:
        if entry.kind == "job_submitted":
            self._starts[entry.subject] = JobStart(entry.time)
        elif entry.kind == "gang_approved":
            start = self._starts.setdefault(entry.subject, JobStart(None))
            start.epoch, start.approved_s = int(entry.figures["epoch"]), entry.time
            begin_s = entry.time - float(entry.figures.get("waited_s", 0.0))
            self._add(entry, job, f"wait for gang {start.epoch}", begin_s, ROOT)
        elif entry.kind == "gang_running" or entry.kind in _ENDS:
            self._end(entry, job)

    def _end(self, entry: HistoryRow, job: JobRecord) -> None:
        start = self._starts.pop(entry.subject, None)
        if start is None:
            return
        error = "" if entry.kind in ("gang_running", _SUCCEEDED) else entry.message or entry.kind
        if start.approved_s:
            self._add(entry, job, start_of_gang(start.epoch), start.approved_s, ROOT, error)
        if start.submitted_s is None:
            return
        if entry.kind == "attempt_failed":
            # Another gang may make the first step.
            self._starts[entry.subject] = JobStart(start.submitted_s)
        else:
            self._add(entry, job, ROOT, start.submitted_s, "", error)

    def _add(self, entry: HistoryRow, job: JobRecord, name: str, begin_s: float, parent: str, error: str = "") -> None:
        figures: dict[str, str | int] = {
            "ganger.job": entry.subject,
            "ganger.user": job.user,
            "ganger.event": entry.sequence,
            "ganger.cause": entry.cause,
        }
        if entry.message:
            figures["ganger.reason"] = entry.message
        if "nodes" in entry.figures:
            figures["ganger.nodes"] = entry.figures["nodes"]
        self._tracer.add(job.uid, name, begin_s, entry.time, parent=parent, error=error, attributes=figures)
