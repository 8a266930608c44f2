"""Records what a planner observes and plans in a file, from which `ganger replay` makes every plan again.

An error ends the recording and removes its file, and never affects the planner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ganger import __version__
from ganger.v1 import scheduling_pb2

from ganger_master.core.answers import ChangeAnswer
from ganger_master.decision_log.log_file import MOST_BYTES, LogFile
from ganger_master.decision_log.recording import (
    FORMATS,
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
    pack,
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
        directory, self._directory = self._directory, None
        if directory is not None:
            with self._errors_end_it():
                self._file = LogFile(directory, self._most_bytes)
                self._file.open()
                header = Header(FORMATS["planner"], __version__, now, policy, program="planner")
                self._file.write(encode_line(header))
        recalled = None if directory is None else memory
        self._put(
            lambda: LoopLine(now, policy, plan_every_s, pack(pace), b"" if recalled is None else packed(recalled))
        )

    def cluster(self, now: float, deltas: Sequence[scheduling_pb2.ClusterDelta]) -> None:
        """Record that the loop observes a change of the cluster, the whole of `deltas`."""
        self._put(lambda: ClusterLine(now, tuple([delta.SerializeToString() for delta in deltas])))

    def progress(self, now: float, batch: scheduling_pb2.ProgressBatch) -> None:
        """Record that the loop observes reports of jobs."""
        self._put(lambda: ProgressLine(now, batch.SerializeToString()))

    def plan(self, now: float, plan: Plan) -> None:
        """Record a plan of the loop."""
        self._put(lambda: PlanLine(now, pack(plan)))

    def verdict(self, now: float, answers: Sequence[ChangeAnswer], planning_s: float) -> None:
        """Record that the loop observes the verdict on its last plan."""
        self._put(lambda: VerdictLine(now, planning_s, tuple(answers)))

    @contextmanager
    def failures(self, now: float) -> Iterator[None]:
        """Record that the loop fails in the block, at the observation recorded last or as it makes a plan.

        The recording ends there, because other tasks of the planner may go on for a moment.
        """
        try:
            yield
        except Exception as error:
            text = failure_of(error)
            self._put(lambda: BrokenLine(now, text))
            self.end(f"the planner failed: {text}")
            raise

    def end(self, reason: str) -> None:
        """End the recording and keep it; later calls do nothing."""
        self._directory = None
        if self._file is None:
            return
        with self._errors_end_it():
            self._file.write(encode_line(End(self._last_s, reason, 0, 0)))
            path = self._file.publish()
            self._file = None
            log.info("recording ended", extra={"path": str(path), "reason": reason})

    def _put(self, line_of: Callable[[], PlannerLine | BrokenLine]) -> None:
        if self._file is None:
            return
        is_full = ""
        with self._errors_end_it():
            line = line_of()
            self._file.write(encode_line(line))
            self._last_s, is_full = line.time, self._file.is_full
        if is_full:
            self.end(is_full)

    @contextmanager
    def _errors_end_it(self) -> Iterator[None]:
        """Log an error of the block, end the recording and remove its file."""
        try:
            yield
        except Exception as error:
            file, self._file = self._file, None
            if isinstance(error, OSError):
                log.warning("recording failed", extra={"reason": error.strerror or str(error)})
            else:
                log.exception("recording failed")
            if file is not None:
                file.discard()
