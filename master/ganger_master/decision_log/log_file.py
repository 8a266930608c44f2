"""The file of a recording: lines packed by gzip, within a size and what the disk must keep free.

A thread writes it (`LineWriter`). It is read a line at a time, and damage is reported with its place.
"""

from __future__ import annotations

import fcntl
import gzip
import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

import msgspec
from ganger.text import os_reason

from ganger_master.decision_log.recording import FORMATS, End, Header, Line, LineError, decode_line, encode_line
from ganger_master.runtime.commits import StoreThread

log = logging.getLogger(__name__)

MOST_BYTES: Final = 256 << 20
# What a recording leaves of the disk: the store is on it, too.
LEFT_BYTES: Final = 256 << 20
# Name of a file that is not whole ends with this.
_PARTIAL: Final = ".partial"
_LOOKED_BYTES: Final = 1 << 20
_COMPRESSION: Final = 1
# Maximum size of a line in bytes; the largest line holds the node states of a cluster.
_LONGEST_LINE: Final = 1 << 30
_AT_ONCE: Final = 1 << 20


class LogFile:
    """A new file of lines in a directory, which has its name once it is whole.

    Several programs may write into a directory: each holds a lock on its file until the file has its name.
    """

    def __init__(self, directory: Path, most_bytes: int = MOST_BYTES, left_bytes: int = LEFT_BYTES) -> None:
        self.directory = directory
        # Why nothing but the last line should be written.
        self.is_full = ""
        # Once it is published.
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._left_bytes = left_bytes
        self._path = directory / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}.jsonl.gz"
        self._partial = self._path.with_name(self._path.name + _PARTIAL)
        # The file, and what packs lines into it.
        self._open: tuple[IO[bytes], gzip.GzipFile] | None = None
        self._looked_at = 0

    def open(self) -> None:
        """Create the file, and remove the partial files of programs that were killed. Raises OSError."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        for left in self.directory.glob(f"*{_PARTIAL}"):
            # The lock of a file that is being written cannot be taken.
            with suppress(OSError), left.open("r+b") as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
        file = os.fdopen(self._created(), "wb", buffering=0)
        self._open = file, gzip.GzipFile("", "wb", _COMPRESSION, file, 0)

    def _created(self) -> int:
        """Create and lock the file, and return its descriptor. Raises OSError."""
        while True:
            descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # Another program may have removed the file before it was locked.
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def write(self, line: bytes) -> None:
        assert self._open is not None, "nothing is written before the file is open"
        file, lines = self._open
        lines.write(line)
        size = file.tell()
        if size >= self._most_bytes:
            self.is_full = f"it has {self._most_bytes} bytes"
        if size - self._looked_at >= _LOOKED_BYTES or not self._looked_at:
            self._looked_at = max(1, size)
            found = os.statvfs(self._partial)
            if found.f_bavail * found.f_frsize < self._left_bytes:
                self.is_full = f"the disk has less than {self._left_bytes} bytes left"

    def publish(self) -> Path:
        assert self._open is not None, "nothing is published before the file is open"
        file, lines = self._open
        lines.close()
        os.fsync(file.fileno())
        self.size_bytes = file.tell()
        # Renamed while it is locked, so that no other program removes it.
        self._partial.rename(self._path)
        file.close()
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return self._path

    def discard(self) -> None:
        for file in reversed(self._open or ()):
            try:
                file.close()
            except OSError:
                # What could not be written cannot be flushed either.
                continue
        try:
            self._partial.unlink(missing_ok=True)
        except OSError as error:
            log.warning("partial recording left", extra={"path": str(self._partial), "error": str(error)})


class RecordingError(Exception):
    """There is no recording; the message gives the reason and what to do."""


class LineWriter:
    """Encodes lines and writes them into a new file, in a thread of its own. An error ends the recording, removes the
    file and never reaches the program that is recorded.

    `notify`: called in the thread with the reason why the recording should end: its file is full or cannot be written.
    """

    def __init__(self, file: LogFile, notify: Callable[[str], None]) -> None:
        self._file = file
        self._notify = notify
        self._problem: Exception | None = None
        self._given = self._written = 0
        self._thread = StoreThread("recording")
        self._thread.do(self._open)

    @property
    def waiting(self) -> int:
        """Return the number of lines that wait to be written, as far as `write` counts them."""
        return self._given - self._written

    def write(self, lines: Callable[[], Iterable[Line]], count: int = 0) -> None:
        """Write the lines that `lines` returns in the thread. `count`: how many they are."""
        self._given += count
        self._thread.do(self._write, lines, count)

    def end(self, last: Callable[[], End], settle: Callable[[Path | Exception], None] | None = None) -> None:
        """Write the last line, and publish the file; no call but `join` follows. `settle`: called in the thread with
        the file, or with the error because of which there is none."""
        self._thread.do(self._close, last, settle)
        self._thread.end()

    def join(self) -> None:
        """Wait until all is written, after `end`."""
        self._thread.close()

    @contextmanager
    def _errors_end_it(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._problem = error
            if isinstance(error, OSError | RecordingError):
                log.warning("recording failed", extra={"reason": os_reason(error)})
            else:
                log.exception("recording failed")
            self._file.discard()
            self._notify("it cannot be written")

    def _open(self) -> None:
        with self._errors_end_it():
            self._file.open()

    def _write(self, lines: Callable[[], Iterable[Line]], count: int) -> None:
        if self._problem is None:
            with self._errors_end_it():
                for line in lines():
                    self._put(line)
        self._written += count

    def _put(self, line: Line) -> None:
        was_full = self._file.is_full
        self._file.write(encode_line(line))
        if self._file.is_full and not was_full:
            self._notify(self._file.is_full)

    def _close(self, last: Callable[[], End], settle: Callable[[Path | Exception], None] | None) -> None:
        found: Path | Exception | None = self._problem
        if found is None:
            with self._errors_end_it():
                line = last()
                self._put(line)
                found = self._file.publish()
                log.info("recording ended", extra={"path": str(found), "reason": line.reason})
        found = found or self._problem
        assert found is not None, "a file or an error"
        if settle is not None:
            settle(found)


class RecordingUnreadable(Exception):  # noqa: N818  # it is the recording that is unreadable
    """A recording cannot be read. The message names the error, the place and the remedy."""


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a recording, the header first and the end last. Raises RecordingUnreadable."""
    try:
        with path.open("rb") as file:
            # The checksum is at the end: read all once, so that damage is found before any line is used.
            with gzip.open(file) as packed:
                while packed.read(_AT_ONCE):
                    pass
            file.seek(0)
            with gzip.open(file) as lines:
                yield from _lines(lines, path)  # type: ignore[arg-type]  # a GzipFile reads as a file does
    except gzip.BadGzipFile as error:
        raise RecordingUnreadable(f"{path} is no recording, or damaged: {error}") from error
    except EOFError as error:
        raise RecordingUnreadable(f"{path} breaks off in the middle: copy it again, whole") from error
    except zlib.error as error:
        raise RecordingUnreadable(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise RecordingUnreadable(f"cannot read {path}: {os_reason(error)}") from error


def _lines(file: IO[bytes], path: Path) -> Iterator[Line]:
    number = 0
    line: Line | None = None
    while data := file.readline(_LONGEST_LINE):
        number += 1
        if isinstance(line, End):
            raise RecordingUnreadable(f"{path}:{number}: there is more behind its end: it is damaged")
        if number == 1:
            _check_format(data, path)
        try:
            line = decode_line(data)
        except LineError as error:
            raise RecordingUnreadable(f"{path}:{number}: it is damaged: {error}") from error
        if isinstance(line, Header) != (number == 1):
            raise RecordingUnreadable(f"{path}:{number}: it is damaged: no place for {type(line).__name__}")
        yield line
    if line is None:
        raise RecordingUnreadable(f"{path} is empty: no recording")
    if not isinstance(line, End):
        raise RecordingUnreadable(f"{path} breaks off behind line {number}: copy it again, whole")


def _check_format(data: bytes, path: Path) -> None:
    """Raise RecordingUnreadable for other formats, of which only the header's `format` field is assumed."""
    try:
        header = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("line") != "recording":
        raise RecordingUnreadable(f"{path} is no recording of Ganger")
    known = FORMATS.get(header.get("program", "master"))
    if header.get("format") != known:
        text = f"{path} has format {header.get('format')}, written by ganger {header.get('ganger')}"
        raise RecordingUnreadable(f"{text}; this ganger reads format {known}: replay it with that version")
