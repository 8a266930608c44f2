"""What a master reports of itself, from durable entries of the history: spans in the traces of jobs (`ganger.tracing`),
counters for metrics, and log lines. No decision reads any of it."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from ganger.job_state import JobState
from ganger.tracing import ROOT, JobTracer, start_of_gang

from ganger_master.core.answers import Answer, PlanAnswer, Rejected
from ganger_master.core.events import HistoryRow
from ganger_master.core.job_model import JobRecord

# Entries after which a job, or a gang of it, makes no first step. A script may succeed before a step of it is seen.
_ENDS: Final = frozenset({*[f"job_{state.lower()}" for state in JobState if state.is_finished], "attempt_failed"})
_SUCCEEDED: Final = f"job_{JobState.SUCCEEDED.lower()}"

log = logging.getLogger(__name__)


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


# -- counters and log lines --------------------------------------------------------------------------------------------

_COMMIT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_COMMIT_CALLS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 10_000.0)
_WAIT_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 43_200.0, 86_400.0, 259_200.0)
_PAUSE_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MOVED: Final = frozenset({"move_done", "resize_done"})
# What an operator would act on; the rest is in the history.
_LOGGED: Final = frozenset(
    {
        *("node_ready", "node_silent", "node_lost", "node_changed", "node_removed", "node_draining", "node_cordoned"),
        *("node_unhealthy", "node_healthy", "node_slow", "node_slow_ended", "node_test_passed", "node_test_failed"),
        "job_failed",
    }
)


class Distribution:
    """How often a value was at most each of some bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def at_most(self) -> Iterator[tuple[float, int]]:
        """Each bound, infinity last, with the number of values up to it."""
        so_far = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            so_far += count
            yield bound, so_far


class MasterCounters:
    """Filled by the writer, in its event loop; costs a busy master a microsecond for each commit and event."""

    def __init__(self) -> None:
        # By kind of history, by outcome, and by the first reason.
        self.events: Counter[str] = Counter()
        self.failed_attempts: Counter[str] = Counter()
        # Of jobs with a deadline that have ended, by outcome.
        self.deadlines: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        # From when a job began to wait to the approval of its gang, and how long moves made jobs stand still.
        self.waits = Distribution(_WAIT_S)
        self.pauses = Distribution(_PAUSE_S)
        self.commit_s = Distribution(_COMMIT_S)
        # Calls that one commit answered.
        self.commit_calls = Distribution(_COMMIT_CALLS)
        self.store_errors = 0
        self.core_errors = 0

    def committed(self, seconds: float, calls: int) -> None:
        self.commit_s.add(seconds)
        self.commit_calls.add(calls)

    def answered(self, answer: Answer) -> None:
        """Count the rejections of a request for a gang or of a plan."""
        if isinstance(answer, Rejected):
            verdicts = [answer.refusals]
        elif isinstance(answer, PlanAnswer):
            verdicts = [verdict.refusals for verdict in answer.verdicts if not verdict.approved]
        else:
            return
        self.rejections.update(refusals[0].reason.name for refusals in verdicts if refusals)

    def happened(self, history: Sequence[HistoryRow]) -> None:
        """Count durable entries of the history, and log those that an operator would act on, or all for debugging."""
        logs_all = log.isEnabledFor(logging.DEBUG)
        for entry in history:
            self._count(entry)
            if logs_all or entry.kind in _LOGGED:
                level = logging.INFO if entry.kind in _LOGGED else logging.DEBUG
                log.log(level, entry.kind, extra={"subject": entry.subject, "cause": entry.cause, "id": entry.sequence})

    def _count(self, entry: HistoryRow) -> None:
        kind = entry.kind
        self.events[kind] += 1
        if kind == "gang_approved":
            waited = entry.figures.get("waited_s")
            if waited is not None:
                self.waits.add(float(waited))
        elif kind == "attempt_failed":
            self.failed_attempts[entry.figures["outcome"]] += 1
        elif outcome := entry.figures.get("deadline"):
            self.deadlines[str(outcome)] += 1
        elif kind in _MOVED:
            self.pauses.add(float(entry.figures["pause_ms"]) / 1_000.0)
