"""Files of a planner: the note from which its successor continues, and the recording of what it observes and plans,
from which `ganger replay` makes every plan again. No error of a file affects the planner.
"""

from __future__ import annotations

import logging
import os
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
from ganger_master.planner.memory import PlannerMemory, Unusable, noted, packed, recalled
from ganger_master.policies.trials import TrialPace

log = logging.getLogger(__name__)


class PlanRecorder:
    """The recording of one planner process. An error ends it and removes its file.

    `directory`: for its file, or None. Times: Unix s of the master's clock."""

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


class Note:
    """The file from which a planner continues what the one before it remembered. `path` None: nothing is noted.

    A note is a hint: without it, or if it cannot be read or written, the planner logs that and measures again. It is
    replaced whole and not synced: it is to survive processes, and jobs do not survive a machine. One writer.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written = b""
        self._has_failed = False

    @property
    def is_kept(self) -> bool:
        return self._path is not None

    def recall(self, policy: str, now: float, create_time: Callable[[int], float | None]) -> PlannerMemory | None:
        """What was noted, as `planner.memory` has it; None where there is nothing that can be used."""
        try:
            content = b"" if self._path is None else self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("note not read", extra={"path": str(self._path), "reason": error.strerror})
            return None
        found = recalled(content, policy, now, create_time) if self._path is not None else None
        if isinstance(found, Unusable):
            log.warning("note not used", extra={"path": str(self._path), "reason": found.why})
            return None
        return found

    def write(self, memory: PlannerMemory, policy: str, now: float) -> None:
        """Write the note, unless it equals the last one."""
        packet = packed(memory)
        if self._path is None or packet == self._written:
            return
        # Readable only by its owner: it names nodes and what jobs do.
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(noted(packet, policy, now))
            new.replace(self._path)
        except OSError as error:
            if not self._has_failed:
                log.warning("note not written", extra={"path": str(self._path), "reason": error.strerror})
            self._has_failed = True
            return
        self._written, self._has_failed = packet, False

    def forget(self) -> None:
        """Remove the note, so that a planner that failed by it is not followed by one that does so again."""
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("note not removed", extra={"path": str(self._path), "reason": error.strerror})
