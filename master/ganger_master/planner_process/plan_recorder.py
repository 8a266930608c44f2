"""Records what a planner observes and plans in a file, from which `ganger replay` makes every plan again.

An error ends the recording and removes its file, and never affects the planner.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ganger import __version__
from ganger.v1 import scheduling_pb2

from ganger_master.core.answers import ChangeAnswer
from ganger_master.decision_log.log_file import MOST_BYTES, LogFile
from ganger_master.decision_log.recording import (
    FORMAT,
    BrokenLine,
    ClusterLine,
    End,
    Header,
    LoopLine,
    PlanLine,
    PlannerLine,
    ProgressLine,
    VerdictLine,
    encode_line,
    failure_of,
    raw_of,
)
from ganger_master.planner.context import Plan
from ganger_master.planner.memory import PlannerMemory, packed
from ganger_master.policies.trials import TrialPace

log = logging.getLogger(__name__)


class PlanRecorder:
    """The recording of one planner process. `directory`: for its file; None: nothing is recorded. Times are Unix
    seconds by the master's clock."""

    def __init__(self, directory: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self._directory, self._most_bytes = directory, most_bytes
        # None before the first loop, and after the end.
        self._file: LogFile | None = None
        self._last_s = 0.0

    def begin(
        self, now: float, policy: str, plan_every_s: float, pace: TrialPace, memory: PlannerMemory | None
    ) -> None:
        """Record that a loop begins. `memory`: what the process's first loop continues from."""
        is_first = self._directory is not None
        if self._directory is not None:
            file = LogFile(self._directory, self._most_bytes)
            self._directory = None
            try:
                file.open()
            except OSError as error:
                self._fail(file, error)
                return
            self._file = file
            self._write(encode_line(Header(FORMAT, __version__, now, policy, program="planner")))
        if self._file is not None:
            packet = packed(memory) if is_first and memory is not None else b""
            self._put(LoopLine(now, policy, plan_every_s, raw_of(pace), packet))

    def cluster(self, now: float, deltas: Sequence[scheduling_pb2.ClusterDelta]) -> None:
        if self._file is not None:
            self._put(ClusterLine(now, tuple([delta.SerializeToString() for delta in deltas])))

    def progress(self, now: float, batch: scheduling_pb2.ProgressBatch) -> None:
        if self._file is not None:
            self._put(ProgressLine(now, batch.SerializeToString()))

    def plan(self, now: float, plan: Plan) -> None:
        if self._file is not None:
            self._put(PlanLine(now, raw_of(plan)))

    def verdict(self, now: float, answers: Sequence[ChangeAnswer], planning_s: float) -> None:
        if self._file is not None:
            self._put(VerdictLine(now, planning_s, tuple(answers)))

    def broke(self, now: float, error: Exception) -> None:
        """Record that the planner failed as it made a plan."""
        if self._file is not None:
            self._put(BrokenLine(now, failure_of(error)))

    def end(self, reason: str) -> None:
        """End the recording and keep it; later calls do nothing."""
        self._directory, file = None, self._file
        if file is None:
            return
        self._write(encode_line(End(self._last_s, reason, 0, 0)))
        if self._file is None:
            return
        self._file = None
        try:
            path = file.publish()
        except OSError as error:
            self._fail(file, error)
            return
        log.info("recording ended", extra={"path": str(path), "reason": reason})

    def _put(self, line: PlannerLine | BrokenLine) -> None:
        self._last_s = line.time
        self._write(encode_line(line))
        if self._file is not None and self._file.is_full:
            self.end(self._file.is_full)

    def _write(self, line: bytes) -> None:
        file = self._file
        try:
            if file is not None:
                file.write(line)
        except OSError as error:
            self._fail(file, error)

    def _fail(self, file: LogFile | None, error: OSError) -> None:
        self._file = None
        log.warning("recording failed", extra={"reason": error.strerror or str(error)})
        if file is not None:
            file.discard()
