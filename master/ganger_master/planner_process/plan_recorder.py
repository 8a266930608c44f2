"""Records what a planner observes and plans in a file, from which `ganger replay` makes every plan again.

An error ends the recording and removes its file, and never affects the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ganger import __version__
from ganger.v1 import scheduling_pb2

from ganger_master.core.answers import ChangeAnswer
from ganger_master.decision_log.log_file import MOST_BYTES, LineWriter, LogFile
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
    failure_of,
    pack,
)
from ganger_master.planner.context import Plan
from ganger_master.planner.memory import PlannerMemory, packed
from ganger_master.policies.trials import TrialPace


class PlanRecorder:
    """The recording of one planner process. `directory`: for its file, or None. Times: Unix s of the master's clock."""

    def __init__(self, directory: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self._directory, self._most_bytes = directory, most_bytes
        # None before the first loop, and after the end.
        self._writer: LineWriter | None = None
        # Why the recording should end.
        self._obstacle = ""
        self._last_s = 0.0

    def begin(
        self, now: float, policy: str, plan_every_s: float, pace: TrialPace, memory: PlannerMemory | None
    ) -> None:
        """Record that a loop begins. `memory`: what the process's first loop continues from."""
        directory, self._directory = self._directory, None
        recalled = b""
        if directory is not None:
            self._writer = LineWriter(LogFile(directory, self._most_bytes), self._note_obstacle)
            header = Header(FORMATS["planner"], __version__, now, policy, program="planner")
            self._writer.write(lambda: [header])
            recalled = b"" if memory is None else packed(memory)
        self._put(now, lambda: LoopLine(now, policy, plan_every_s, pack(pace), recalled))

    def cluster(self, now: float, deltas: Sequence[scheduling_pb2.ClusterDelta]) -> None:
        """Record that the loop observes a change of the cluster, the whole of `deltas`."""
        whole = tuple(deltas)
        self._put(now, lambda: ClusterLine(now, tuple([delta.SerializeToString() for delta in whole])))

    def progress(self, now: float, batch: scheduling_pb2.ProgressBatch) -> None:
        """Record that the loop observes reports of jobs."""
        self._put(now, lambda: ProgressLine(now, batch.SerializeToString()))

    def plan(self, now: float, plan: Plan) -> None:
        """Record a plan of the loop."""
        self._put(now, lambda: PlanLine(now, pack(plan)))

    def verdict(self, now: float, answers: Sequence[ChangeAnswer], planning_s: float) -> None:
        """Record that the loop observes the verdict on its last plan."""
        line = VerdictLine(now, planning_s, tuple(answers))
        self._put(now, lambda: line)

    @contextmanager
    def failures(self, now: float) -> Iterator[None]:
        """Record that the loop fails in the block, at the observation recorded last or as it makes a plan. The
        recording ends there, because other tasks of the planner may continue for a moment."""
        try:
            yield
        except Exception as error:
            text = failure_of(error)
            self._put(now, lambda: BrokenLine(now, text))
            self.end(f"the planner failed: {text}")
            raise

    def end(self, reason: str) -> None:
        """End the recording and keep it; later calls do nothing."""
        self._directory = None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.end(lambda: End(self._last_s, self._obstacle or reason, 0, 0))
            writer.join()

    def _put(self, now: float, line_of: Callable[[], PlannerLine | BrokenLine]) -> None:
        if self._obstacle:
            self.end(self._obstacle)
        if self._writer is not None:
            self._last_s = now
            self._writer.write(lambda: [line_of()])

    def _note_obstacle(self, reason: str) -> None:
        self._obstacle = reason
