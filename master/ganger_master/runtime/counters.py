"""Counters of a master since its start, and its log of what happened, for monitoring only: no decision reads them."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from ganger_master.core.answers import Answer, PlanAnswer, Rejected
from ganger_master.core.effects import HistoryRow

_COMMIT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_COMMIT_CALLS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 10_000.0)
_WAIT_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 43_200.0, 86_400.0, 259_200.0)
_PAUSE_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MOVED: Final = frozenset({"move_done", "resize_done"})
# What an operator would act on; the rest is in the history.
_LOGGED: Final = frozenset(
    {
        *("node_ready", "node_silent", "node_lost", "node_changed", "node_removed", "node_draining", "node_cordoned"),
        "job_failed",
    }
)

log = logging.getLogger(__name__)


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
        elif kind in _MOVED:
            self.pauses.add(float(entry.figures["pause_ms"]) / 1_000.0)
