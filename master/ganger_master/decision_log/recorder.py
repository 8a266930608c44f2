"""Records the writer's commands and decisions in a file; a thread of its own encodes and writes.

An error ends the recording and removes its file, and never affects the master. A file that exists is complete. Limits
are the requested time, the file size, the queue of unwritten entries and the free space of the disk.

Environment variables, program arguments and the storage token are replaced. Replacements have the same length, and
equal texts have equal replacements, so that decisions (on lengths, NULs and equality) do not change. They derive from a
key that is never stored, so guessing a text cannot be verified.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as replace_fields
from hashlib import blake2b
from itertools import cycle, islice
from pathlib import Path
from typing import Final, Protocol

from msgspec.structs import replace

from ganger_master.core.answers import Answer
from ganger_master.core.commands import Command, OpenSession, SubmitArray, SubmitJob
from ganger_master.core.effects import Effects
from ganger_master.core.events import Event
from ganger_master.core.job_model import JobSpec
from ganger_master.core.queue import GrantedLease
from ganger_master.core.state import State
from ganger_master.core.state_image import Image, image_of
from ganger_master.decision_log.log_file import LEFT_BYTES, MOST_BYTES, LogFile
from ganger_master.decision_log.recording import (
    FORMATS,
    BatchLine,
    BrokenLine,
    CommandLine,
    End,
    Header,
    Line,
    digest_of,
    encode_line,
    failure_of,
    raw,
    state_lines,
)
from ganger_master.runtime.store_access import StoreThread

# One of each length in UTF-8.
_LONGER: Final = {2: "\u00b7", 3: "\u2026", 4: "\U0001f512"}


class Hiding:
    """Hides commands, environments and tokens. `key`: random, of this recording alone. `with_environment`: only
    tokens."""

    def __init__(self, key: bytes, with_environment: bool = False) -> None:
        self._key = key
        self._with_environment = with_environment

    def command(self, command: Command) -> Command:
        match command:
            case SubmitJob():
                return replace(command, spec=self.spec(command.spec))
            case SubmitArray() if not self._with_environment:
                members = tuple([(index, self._parameters(given)) for index, given in command.members])
                return replace(command, spec=self.spec(command.spec), members=members)
            case OpenSession():
                return replace(command, storage_token=self._token(command.storage_token))
            case _:
                return command

    def image(self, image: Image) -> Image:
        return replace(
            image,
            settings=replace_fields(image.settings, storage_token=self._token(image.settings.storage_token)),
            counters=replace(image.counters, storage_token=self._token(image.counters.storage_token)),
            jobs=tuple([replace(job, spec=self.spec(job.spec)) for job in image.jobs]),
        )

    def spec(self, spec: JobSpec) -> JobSpec:
        if spec.array is not None and not self._with_environment:
            array = replace(spec.array, parameters=self._parameters(spec.array.parameters))
            spec = replace(spec, array=array)
        if self._with_environment or not (spec.environment or len(spec.command) > 1):
            return spec
        # Made of the whole description, so that no two that differ in one short word look the same.
        signs = self._signs(repr((spec.command, sorted(spec.environment.items()))))
        command = (*spec.command[:1], *(_hidden(word, signs) for word in spec.command[1:]))
        # Two are the same in whatever order they name variables, and keep theirs.
        hidden = {name: _hidden(word, signs) for name, word in sorted(spec.environment.items())}
        return replace(spec, command=command, environment={name: hidden[name] for name in spec.environment})

    def _parameters(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the parameters of an array member with hidden values; they are its arguments."""
        return {name: _hidden(text, self._signs(text)) for name, text in given.items()}

    def _token(self, token: str) -> str:
        return _hidden(token, self._signs(token))

    def _signs(self, text: str) -> Iterator[str]:
        """Return an endless iterator of characters that look random and are the same for the same text."""
        digest = blake2b(text.encode(errors="surrogatepass"), key=self._key, digest_size=63).digest()
        return cycle(urlsafe_b64encode(digest).decode())


def _hidden(word: str, signs: Iterator[str]) -> str:
    hidden = "".join(islice(signs, len(word)))
    if word.isascii() and "\0" not in word:
        return hidden
    return "".join(map(_alike, word, hidden))


def _alike(sign: str, hidden: str) -> str:
    """Return a character that takes as many bytes as `sign`."""
    return sign if sign == "\0" else _LONGER.get(len(sign.encode(errors="surrogatepass")), hidden)


log = logging.getLogger(__name__)

DIRECTORY: Final = "captures"
MOST_S: Final = 3600.0
# Commands that wait to be written; a disk that is slower than the master must not fill its memory.
_MOST_WAITING: Final = 100_000


class RecordingError(Exception):
    """There is no recording; the message gives the reason and what to do."""


class Recorded:
    """A recording that is there to be read."""

    def __init__(self, path: Path, reason: str, commands: int, batches: int, seconds: float) -> None:
        self.path = path
        self.reason = reason
        self.commands = commands
        self.batches = batches
        self.seconds = seconds
        self.size_bytes = path.stat().st_size


class Records(Protocol):
    """Attaches a recording to the writer, and ends it."""

    def record(self, recording: DecisionRecording) -> None: ...

    def end_recording(self, reason: str) -> None: ...


async def record(writer: Records, recording: DecisionRecording, seconds: float) -> Recorded:
    """Record for `seconds`, or until a limit. Cancelling ends the recording and keeps it. Raises RecordingError."""
    writer.record(recording)
    reason = "its time was over"
    try:
        await asyncio.wait_for(recording.ending.wait(), seconds)
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
        self._hiding = Hiding(secrets.token_bytes(32), with_environment)
        self._file = LogFile(directory, most_bytes, left_bytes)
        self._thread: StoreThread | None = None
        self._lines: list[Callable[[], Line]] = []
        self._waiting = 0
        self._commands = self._batches = 0
        self._began = 0.0
        self._problem: BaseException | None = None

    # -- called by the writer, between two of its steps ----------------------------------------------------------------

    def begin(self, state: State, now: float) -> None:
        """Begin with the state that the end of a batch left."""
        self._began = now
        self._thread = StoreThread("recording")
        header = Header(FORMATS["master"], self._version, now, state.settings.policy, self._with_environment)
        self._do(self._open, header)
        self.start_over(state, now, "the recording began")

    def start_over(self, state: State, now: float, cause: str) -> None:
        """Record a state that replaces the former one."""
        self._hand_over()
        image = self._image_of(state)
        if image is not None:
            self._do(self._write_state, image, now, cause)

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
        if self._thread is None:
            self._note_done(RecordingError(f"cannot record: {reason}"))
            return
        self._hand_over()
        image = None if state is None else self._image_of(state)
        self._do(self._close, image, now, reason)
        self._thread.end()

    def _do(self, work: Callable[..., None], *arguments: object) -> None:
        assert self._thread is not None, "a recording that has not begun"
        self._thread.do(self._in_thread, work, *arguments)

    def _image_of(self, state: State) -> Image | None:
        try:
            return image_of(state)
        except Exception as error:
            # A mistake of ours, which is no reason to hold up the master.
            self._do(self._fail, error)
            return None

    def _hand_over(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        self._do(self._write, lines)
        self._waiting += len(lines)
        if self._waiting > _MOST_WAITING:
            self._note_end("the disk is slower than the master")

    def _note_written(self, count: int) -> None:
        self._waiting -= count

    def _note_end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.ending.set()

    def _note_done(self, found: Recorded | RecordingError) -> None:
        if isinstance(found, RecordingError):
            log.warning("recording failed", extra={"error": str(found)})
        else:
            log.info("recording ended", extra={"path": str(found.path), "reason": found.reason})
        if self.done.done():
            return
        if isinstance(found, RecordingError):
            self.done.set_exception(found)
            # Mark the exception as retrieved: the caller may have disconnected.
            self.done.exception()
        else:
            self.done.set_result(found)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _in_thread(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            if self._problem is None or work == self._close:
                work(*arguments)
        except Exception as error:
            # Whatever it is, it must not cost the master more than this recording.
            self._problem = error
            if not isinstance(error, OSError | RecordingError):
                log.exception("recording failed")
            self._file.discard()
            self._call_in_loop(self._note_end, "it cannot be written")
        if work == self._close and self._problem is not None:
            self._call_in_loop(self._note_done, RecordingError(_explained(self._problem, self._file.directory)))

    def _open(self, header: Header) -> None:
        self._file.open()
        self._put(header)

    def _fail(self, error: Exception) -> None:
        raise error

    def _write_state(self, image: Image, now: float, cause: str) -> None:
        for line in state_lines(self._hiding.image(image), now, cause):
            self._put(line)
            if self._file.is_full:
                raise RecordingError(f"cannot record: {self._file.is_full} before the state is written")

    def _write(self, lines: Sequence[Callable[[], Line]]) -> None:
        for line in lines:
            self._put(line())
        self._call_in_loop(self._note_written, len(lines))

    def _put(self, line: Line) -> None:
        self._file.write(encode_line(line))
        if self._file.is_full:
            self._call_in_loop(self._note_end, self._file.is_full)

    def _close(self, image: Image | None, now: float, reason: str) -> None:
        if self._problem is not None:
            return
        digest = "" if image is None else digest_of(self._hiding.image(image))
        self._file.write(encode_line(End(now, reason, self._commands, self._batches, digest)))
        path = self._file.publish()
        found = Recorded(path, reason, self._commands, self._batches, now - self._began)
        self._call_in_loop(self._note_done, found)

    def _command_line(self, now: float, command: Command, answer: Answer, happened: Sequence[Event]) -> CommandLine:
        kinds = tuple([type(event).__name__ for event in happened])
        return CommandLine(now, *raw(self._hiding.command(command)), *raw(answer), kinds)

    def _broken_line(self, now: float, command: Command | None, error: BaseException) -> BrokenLine:
        text = failure_of(error)
        if command is None:
            return BrokenLine(now, text)
        return BrokenLine(now, text, *raw(self._hiding.command(command)))

    def _call_in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # The event loop is closed, and the result has no receiver.
            return


# Handed over earlier than with the batch when there are many: they are large together.
_LINES_AT_ONCE: Final = 1_000


def _explained(error: BaseException, directory: Path) -> str:
    if isinstance(error, RecordingError):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot record into {directory}: {error.strerror or error}"
    return f"cannot record: {failure_of(error)} (see the master's log)"
