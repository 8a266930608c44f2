"""A recording read from its file, a line at a time; what is wrong with the file is said in words."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from ganger_master.decision_log.lines import FORMAT, End, Header, Line, LineError, decode_line

# A line beyond this is none of ours: the largest holds the rows of a whole cluster.
_LONGEST_LINE: Final = 1 << 30
_AT_ONCE: Final = 1 << 20


class RecordingUnreadable(Exception):  # noqa: N818  # it is the recording that is unreadable
    """The message says what is wrong, where, and what to do."""


def read_lines(path: Path) -> Iterator[Line]:
    """Header first, end last. RecordingUnreadable."""
    try:
        with path.open("rb") as file:
            # Its sum is at the end: what is damaged is found before anything is made of it.
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
        raise RecordingUnreadable(f"cannot read {path}: {error.strerror or error}") from error


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
    """Of other formats no more is known than that they say which they are."""
    try:
        header = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        header = None
    if not isinstance(header, dict) or header.get("line") != "recording":
        raise RecordingUnreadable(f"{path} is no recording of a master")
    if header.get("format") != FORMAT:
        text = f"{path} has format {header.get('format')}, written by ganger {header.get('ganger')}"
        raise RecordingUnreadable(f"{text}; this ganger reads format {FORMAT}: replay it with that version")
