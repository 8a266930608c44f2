"""Records the writer's commands and decisions in a file.

An error ends the recording and removes its file, and never affects the master. A file that exists is complete. Limits
are the requested time, the file size, the queue of unwritten entries and the free space of the disk.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from ganger.text import os_reason

from ganger_master.core.answers import Answer
from ganger_master.core.commands import Command
from ganger_master.core.events import Effects, Event
from ganger_master.core.queue import GrantedLease
from ganger_master.core.state import State
from ganger_master.core.state_image import Image, image_of
from ganger_master.decision_log.log_file import LEFT_BYTES, MOST_BYTES, LineWriter, LogFile, RecordingError
from ganger_master.decision_log.recording import (
    FORMATS,
    BatchLine,
    BrokenLine,
    CommandLine,
    End,
    Header,
    Line,
    Redaction,
    digest_of,
    failure_of,
    raw,
    state_lines,
)

DIRECTORY: Final = "captures"
MOST_S: Final = 3600.0
# Commands that wait to be written; a disk that is slower than the master must not fill its memory.
_MOST_WAITING: Final = 100_000


@dataclass(frozen=True)
class Recorded:
    """A recording that is there to be read."""

    path: Path
    reason: str
    commands: int
    batches: int
    seconds: float
    size_bytes: int


class Records(Protocol):
    """Attaches a recording to the writer, and ends it."""

    def record(self, recording: DecisionRecording) -> None: ...

    def end_recording(self, reason: str) -> None: ...


async def record(writer: Records, recording: DecisionRecording, seconds: float) -> Recorded:
    """Record for `seconds`, or until a limit. Cancelling ends the recording and keeps it. Raises RecordingError."""
    writer.record(recording)
    reason = "its time was over"
    try:
        async with asyncio.timeout(seconds):
            await recording.ending.wait()
        reason = recording.reason
    except TimeoutError:
        pass
    except asyncio.CancelledError:
        reason = "the client that started it went away"
        raise
    finally:
        writer.end_recording(reason)
    return await recording.done


class DecisionRecording:
    """One recording; its methods are called from one event loop. `done`: its result, or RecordingError."""

    def __init__(
        self,
        directory: Path,
        version: str,
        *,
        with_environment: bool = False,
        most_bytes: int = MOST_BYTES,
        left_bytes: int = LEFT_BYTES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Recorded] = self._loop.create_future()
        # Set when it has ended, or should be ended as soon as possible; the file contains the reason.
        self.ending = asyncio.Event()
        self.reason = ""
        self._version = version
        self._with_environment = with_environment
        self._redaction = Redaction(secrets.token_bytes(32), with_environment)
        self._file = LogFile(directory, most_bytes, left_bytes)
        self._writer: LineWriter | None = None
        self._lines: list[Callable[[], Line]] = []
        self._commands = self._batches = 0
        self._began = 0.0

    # -- called by the writer, between two of its steps ----------------------------------------------------------------

    def begin(self, state: State, now: float) -> None:
        """Begin with the state that the end of a batch left."""
        self._began = now
        self._writer = LineWriter(self._file, partial(self._call_in_loop, self._note_end))
        header = Header(FORMATS["master"], self._version, now, state.settings.policy, self._with_environment)
        self._writer.write(lambda: [header])
        self.start_over(state, now, "the recording began")

    def start_over(self, state: State, now: float, cause: str) -> None:
        """Record a state that replaces the former one."""
        self._hand_over()
        image = self._image_of(state)
        if image is not None:
            self._write(partial(self._state_lines, image, now, cause))

    def command(self, now: float, command: Command, answer: Answer, happened: Sequence[Event]) -> None:
        self._commands += 1
        self._lines.append(lambda: self._command_line(now, command, answer, happened))
        if len(self._lines) >= _LINES_AT_ONCE:
            self._hand_over()

    def batch(self, now: float, effects: Effects, turns: Iterable[GrantedLease]) -> None:
        self._batches += 1
        line = BatchLine(now, effects, tuple(turns))
        self._lines.append(lambda: line)
        self._hand_over()

    def broke(self, now: float, command: Command | None, error: BaseException) -> None:
        self._lines.append(lambda: self._broken_line(now, command, error))
        self._hand_over()

    def end(self, state: State | None, now: float, reason: str) -> None:
        """End the recording; no call follows. `state`: what the end of a batch left; None if it cannot be trusted."""
        self._note_end(reason)
        if self._writer is None:
            self._note_done(RecordingError(f"cannot record: {reason}"))
            return
        self._hand_over()
        image = None if state is None else self._image_of(state)
        self._writer.end(partial(self._last_line, image, now, reason), partial(self._settle, now, reason))

    def _write(self, lines: Callable[[], Iterable[Line]], count: int = 0) -> None:
        assert self._writer is not None, "a recording that has not begun"
        self._writer.write(lines, count)
        if self._writer.waiting > _MOST_WAITING:
            self._note_end("the disk is slower than the master")

    def _image_of(self, state: State) -> Image | None:
        try:
            return image_of(state)
        except Exception as error:
            # A mistake of ours, which is no reason to hold up the master.
            self._write(partial(_fail, error))
            return None

    def _hand_over(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._write(lambda: (line() for line in lines), len(lines))

    def _note_end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.ending.set()

    def _note_done(self, found: Recorded | RecordingError) -> None:
        if self.done.done():
            return
        if isinstance(found, RecordingError):
            self.done.set_exception(found)
            # Mark the exception as retrieved: the caller may have disconnected.
            self.done.exception()
        else:
            self.done.set_result(found)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _state_lines(self, image: Image, now: float, cause: str) -> Iterator[Line]:
        for line in state_lines(self._redaction.image(image), now, cause):
            yield line
            if self._file.is_full:
                raise RecordingError(f"cannot record: {self._file.is_full} before the state is written")

    def _last_line(self, image: Image | None, now: float, reason: str) -> End:
        digest = "" if image is None else digest_of(self._redaction.image(image))
        return End(now, reason, self._commands, self._batches, digest)

    def _settle(self, now: float, reason: str, found: Path | Exception) -> None:
        done: Recorded | RecordingError
        if isinstance(found, Exception):
            done = RecordingError(_explained(found, self._file.directory))
        else:
            size = self._file.size_bytes
            done = Recorded(found, reason, self._commands, self._batches, now - self._began, size)
        self._call_in_loop(self._note_done, done)

    def _command_line(self, now: float, command: Command, answer: Answer, happened: Sequence[Event]) -> CommandLine:
        kinds = tuple([type(event).__name__ for event in happened])
        return CommandLine(now, *raw(self._redaction.command(command)), *raw(answer), kinds)

    def _broken_line(self, now: float, command: Command | None, error: BaseException) -> BrokenLine:
        text = failure_of(error)
        if command is None:
            return BrokenLine(now, text)
        return BrokenLine(now, text, *raw(self._redaction.command(command)))

    def _call_in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # The event loop is closed, and the result has no receiver.
            return


class AttachedRecording:
    """The recording of a writer, if there is one. It begins and ends between two batches, by request."""

    def __init__(self) -> None:
        self._present: DecisionRecording | None = None
        self._next: DecisionRecording | None = None
        self._end_reason = ""
        # The outcome of the last recording.
        self._done: asyncio.Future[Recorded] | None = None

    @property
    def is_taken(self) -> bool:
        return self._present is not None or self._next is not None

    def request(self, recording: DecisionRecording) -> None:
        """Begin a recording at the next call of `between_batches`."""
        self._next, self._done = recording, recording.done

    def request_end(self, now: float, reason: str) -> None:
        """End the recording at the next call of `between_batches`; at once if it has not begun."""
        if self._present is not None:
            self._end_reason = reason
            return
        # A recording that has not begun has no file.
        recording, self._next = self._next, None
        if recording is not None:
            recording.end(None, now, reason)

    def between_batches(self, state: State | None, now: float) -> None:
        """Begin or end the recording if that is requested. `state`: None if it cannot be trusted, and none begins."""
        if self._present is None and self._next is not None and state is not None:
            self._present, self._next = self._next, None
            self._present.begin(state, now)
        elif self._present is not None and self._end_reason:
            recording, reason = self._present, self._end_reason
            self._present, self._end_reason = None, ""
            recording.end(state, now, reason)

    def command(self, now: float, command: Command, answer: Answer, happened: Sequence[Event]) -> None:
        if self._present is not None:
            self._present.command(now, command, answer, happened)

    def batch(self, now: float, effects: Effects, turns: Iterable[GrantedLease]) -> None:
        if self._present is not None:
            self._present.batch(now, effects, turns)

    def broke(self, now: float, command: Command | None, error: BaseException) -> None:
        if self._present is not None:
            self._present.broke(now, command, error)

    def start_over(self, state: State, now: float, cause: str) -> None:
        if self._present is not None:
            self._present.start_over(state, now, cause)

    async def wait(self, timeout_s: float) -> None:
        """Wait until the last recording is written to its end."""
        if self._done is not None:
            await asyncio.wait({self._done}, timeout=timeout_s)


def _fail(error: Exception) -> Iterable[Line]:
    raise error


# Handed over earlier than with the batch when there are many: they are large together.
_LINES_AT_ONCE: Final = 1_000


def _explained(error: BaseException, directory: Path) -> str:
    if isinstance(error, RecordingError):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot record into {directory}: {os_reason(error)}"
    return f"cannot record: {failure_of(error)} (see the master's log)"
