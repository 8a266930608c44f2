"""The lines of a recording: JSON, one value a line, of the kinds below.

A header; a state, its elements first; then every command with what was answered, and a line for every batch. A state
that comes later is that of a master that has started over. The last line says how the recording ended, and what state
it ended in; a file without one is not whole.

A recording read from its file, a line at a time; what is wrong with the file is said in words.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Final, TypeAlias, get_args

import msgspec
from msgspec import Raw, Struct

from ganger_master.core.answers import Answer
from ganger_master.core.commands import Command
from ganger_master.core.effects import Effects
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord, Request
from ganger_master.core.node_model import Node
from ganger_master.core.queue import GrantedLease
from ganger_master.core.state_image import Image

# Rises when a file that was written before cannot be read any more.
FORMAT: Final = 1


class Header(Struct, frozen=True, tag="recording", tag_field="line"):
    """`began`: Unix seconds by the master's clock, as all times."""

    format: int
    ganger: str
    began: float
    policy: str
    with_environment: bool = False


class Element(Struct, frozen=True, tag="element", tag_field="line"):
    """One of the state that follows."""

    kind: str
    value: Raw


class StateLine(Struct, frozen=True, tag="state", tag_field="line"):
    """All of a state but its elements. `cause`: why there is a state."""

    time: float
    cause: str
    image: Image


class CommandLine(Struct, frozen=True, tag="command", tag_field="line"):
    """What was asked, what was answered, and the kinds of events that happened."""

    time: float
    kind: str
    command: Raw
    answer_kind: str
    answer: Raw
    events: tuple[str, ...] = ()


class BatchLine(Struct, frozen=True, tag="batch", tag_field="line"):
    """What the commands before led to, when it was drawn together."""

    time: float
    effects: Effects
    turns: tuple[GrantedLease, ...] = ()


class BrokenLine(Struct, frozen=True, tag="broken", tag_field="line"):
    """The core failed at a command, or (no kind) at the end of a batch."""

    time: float
    error: str
    kind: str = ""
    command: Raw = Raw(b"null")


class End(Struct, frozen=True, tag="end", tag_field="line"):
    """`digest`: of the state it ended in; empty when there was none to be trusted."""

    time: float
    reason: str
    commands: int
    batches: int
    digest: str = ""


Line: TypeAlias = Header | Element | StateLine | CommandLine | BatchLine | BrokenLine | End

_COMMANDS: Final[Mapping[str, type[Command]]] = {kind.__name__: kind for kind in get_args(Command)}
_ANSWERS: Final[Mapping[str, type[Answer]]] = {kind.__name__: kind for kind in get_args(Answer)}
# Elements have lines of their own: a large state encoded as one value would hold up everything else in its process.
_ELEMENTS: Final[Mapping[str, type[Any]]] = {"nodes": Node, "jobs": JobRecord, "gangs": Gang, "former": Request}
_encode: Final = msgspec.json.Encoder().encode
_decode_line: Final = msgspec.json.Decoder(Line).decode


class LineError(ValueError):
    """A line that is none of a recording; the message says why."""


def encode_line(line: Line) -> bytes:
    return _encode(line) + b"\n"


def decode_line(data: bytes) -> Line:
    """LineError."""
    try:
        line: Line = _decode_line(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LineError(str(error)) from error
    return line


def state_lines(image: Image, time: float, cause: str) -> Iterator[Line]:
    for name in _ELEMENTS:
        for element in getattr(image, name):
            yield Element(name, Raw(_encode(element)))
    yield StateLine(time, cause, msgspec.structs.replace(image, **dict.fromkeys(_ELEMENTS, ())))


def image_of_lines(elements: Iterable[Element], line: StateLine) -> Image:
    """LineError for elements that are none."""
    found: dict[str, list[Any]] = {name: [] for name in _ELEMENTS}
    for element in elements:
        if element.kind not in found:
            raise LineError(f"there are no elements of kind {element.kind!r}")
        found[element.kind].append(_decoded(element.value, _ELEMENTS[element.kind]))
    return msgspec.structs.replace(line.image, **{name: tuple(each) for name, each in found.items()})


def digest_of(image: Image) -> str:
    digest = blake2b(digest_size=16)
    for line in state_lines(image, 0.0, ""):
        digest.update(encode_line(line))
    return digest.hexdigest()


def raw(value: Command | Answer) -> tuple[str, Raw]:
    """Name of its kind, and the value."""
    return type(value).__name__, Raw(_encode(value))


def command_of(line: CommandLine | BrokenLine) -> Command:
    """LineError."""
    if line.kind not in _COMMANDS:
        raise LineError(f"there is no command {line.kind!r}")
    command: Command = _decoded(line.command, _COMMANDS[line.kind])
    return command


def answer_of(line: CommandLine) -> Answer:
    """LineError."""
    if line.answer_kind not in _ANSWERS:
        raise LineError(f"there is no answer {line.answer_kind!r}")
    answer: Answer = _decoded(line.answer, _ANSWERS[line.answer_kind])
    return answer


def _decoded(value: Raw, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LineError(f"{kind.__name__}: {error}") from error


# Maximum size of a line in bytes; the largest line holds the node states of a cluster.
_LONGEST_LINE: Final = 1 << 30
_AT_ONCE: Final = 1 << 20


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
    """Raise RecordingUnreadable for other formats, of which only the header's `format` field is assumed."""
    try:
        header = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        header = None
    if not isinstance(header, dict) or header.get("line") != "recording":
        raise RecordingUnreadable(f"{path} is no recording of a master")
    if header.get("format") != FORMAT:
        text = f"{path} has format {header.get('format')}, written by ganger {header.get('ganger')}"
        raise RecordingUnreadable(f"{text}; this ganger reads format {FORMAT}: replay it with that version")
