"""What commands read and print: parameter types, tables, JSON, text that a terminal shows safely, errors and exit codes
(documented in docs/reference/cli.md).

Everything heavy is imported when something is drawn. Tables are drawn by rich on a terminal, and are tab-free aligned
columns everywhere else, easy to cut and grep.
"""

from __future__ import annotations

import codecs
import errno
import json
import math
import os
import re
import shutil
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ganger.text import CONTROLS, os_failure, os_reason, visible

if TYPE_CHECKING:
    from google.protobuf.message import Message


class ExitCode(IntEnum):
    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    UNREACHABLE = 5
    NOT_PERMITTED = 6
    BUG = 7
    # Of a master whose database another master has taken over. A restart would take the database back.
    FENCED = 8
    # Of a master whose lease another one has taken. Started again, it stands by.
    LEASE_LOST = 9
    INTERRUPTED = 130


class CommandError(Exception):
    """Something a command itself found wrong; the message says what to do."""

    def __init__(self, message: str, code: ExitCode = ExitCode.REFUSED) -> None:
        super().__init__(message)
        self.code = code


class Within(click.FloatRange):
    """A number of a range. Click lets `nan` into every one, for it is neither below nor above."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number: float = super().convert(value, parameter, context)
        if number != number:
            self.fail(f"{value!r} is not a number", parameter, context)
        return number


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic only in new clicks
    """What a function makes of a text; it raises ValueError for what it cannot read. `name`: as in the help."""

    def __init__(self, parse: Callable[[Any], Any], name: str = "value") -> None:
        self._parse, self.name = parse, name

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            # A default is a tuple already.
            return value if isinstance(value, tuple) else self._parse(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)


class Directory(click.ParamType):  # type: ignore[type-arg]  # generic only in new clicks
    """The path of a directory, which need not be there. An empty one, often of an unset variable, would mean the
    current directory. `may_hang`: it is not looked at, because storage that does not answer would hold the program."""

    name = "directory"

    def __init__(self, may_hang: bool = False) -> None:
        self._may_hang = may_hang

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        path = Path(value)
        if value == "":
            self.fail("no directory is named", parameter, context)
        if not self._may_hang and os.path.exists(path) and not os.path.isdir(path):
            self.fail(f"{value} is a file: name a directory", parameter, context)
        return path

    def shell_complete(self, context: click.Context, parameter: click.Parameter, text: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(text, type="dir")]


# A whole colour, or a sign that is written out.
_CONTROLS_OF_LOGS = re.compile(f"\x1b\\[[0-9;:]{{0,64}}m|(?![\n\t\r]){CONTROLS.pattern}")
_BEGUN_COLOUR = re.compile(r"\x1b(?:\[[0-9;:]{0,64})?\Z")


def cells(text: str) -> int:
    """Columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(sign) else 2 if east_asian_width(sign) in "WF" else 1 for sign in text)


def bounded(text: str, columns: int) -> str:
    """Return the beginning of a text, written out as by `visible`, in at most so many columns; no character in part."""
    kept, width = [], 0
    # The slice bounds characters without a width.
    for sign in text[:columns]:
        shown = visible(sign)
        width += cells(shown)
        if width > columns:
            break
        kept.append(shown)
    return "".join(kept)


class LogText:
    """Makes a log that comes in pieces printable: newlines, tabs, carriage returns and colours stay; all else that a
    terminal would obey is written out."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._rest = ""
        self._has_colours = False

    def feed(self, data: bytes, final: bool = False) -> str:
        """Return what may be printed by now; a character or a colour that is cut waits for the next piece."""
        text = self._rest + self._decoder.decode(data, final)
        begun = None if final else _BEGUN_COLOUR.search(text)
        self._rest = begun[0] if begun else ""
        text = text.removesuffix(self._rest)
        return _CONTROLS_OF_LOGS.sub(self._written_out, text)

    def end(self) -> str:
        """Return what is left, and the code that resets colours."""
        return self.feed(b"", final=True) + ("\x1b[0m" if self._has_colours else "")

    def _written_out(self, found: re.Match[str]) -> str:
        if len(found[0]) > 1:
            self._has_colours = True
            return found[0]
        return ascii(found[0])[1:-1]


def print_line(text: str, file: TextIO | None = None) -> None:
    """Prints one line, at once, to stdout or the file."""
    print(visible(text), file=file or sys.stdout, flush=True)


def plain(message: Message) -> Any:
    """Return a message as plain values: snake_case names, short enum names, ISO times, seconds.

    Unset messages and choices are null, unset numbers zero, so that a script finds every key. Environments are left
    out."""
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.timestamp_pb2 import Timestamp

    from ganger.wire import times

    if isinstance(message, Timestamp):
        return times.local_datetime(message).isoformat()
    if isinstance(message, Duration):
        return times.seconds(message)
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields if field.name != "environment"}


def print_json(value: Any) -> None:
    """Print one JSON value, made of a message, several, or plain values, and a newline."""
    json.dump(_plain_if_message(value), sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _plain_if_message(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain_if_message(each) for each in value]
    return plain(value) if hasattr(value, "DESCRIPTOR") else value


def print_json_line(value: Message) -> None:
    """One JSON value on one line, for streams."""
    sys.stdout.write(json.dumps(plain(value)) + "\n")
    sys.stdout.flush()


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {str(key): _plain_if_message(each) for key, each in sorted(value.items())}
    if field.is_repeated:
        return [_single(each, field) for each in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _single(value, field)


def _single(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else short_enum(known.name, field.enum_type.name)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value


def enum_text(kind: Any, number: int) -> str:
    """Return the short name of a value of an enum of the wire in lower case; its number where a newer program has added
    it. `kind`: the enum, such as Job.State."""
    known = kind.DESCRIPTOR.values_by_number.get(number)
    return f"unknown ({number})" if known is None else short_enum(known.name, kind.DESCRIPTOR.name).lower()


def short_enum(name: str, enum: str) -> str:
    """ "STATE_PENDING" of enum State is "PENDING", "SUSPEND_LEVEL_OFFLOAD" of SuspendLevel is "OFFLOAD"."""
    prefix = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in enum).lstrip("_") + "_"
    return name.removeprefix(prefix)


_STYLES = {
    "running": "green",
    "succeeded": "green",
    "ready": "green",
    "pending": "yellow",
    "starting": "yellow",
    "moving": "yellow",
    "stopping": "yellow",
    "draining": "yellow",
    "cordoned": "yellow",
    "suspended": "cyan",
    "parked": "cyan",
    "failed": "red",
    "lost": "red",
    "silent": "red",
    "cancelled": "dim",
    "unknown": "dim",
}


_GAP = 2
_LEAST_WIDTH = 6


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], empty: str = "", spare: Sequence[str] = ()
) -> None:
    """Print rows under headings, or `empty` (on stderr, so that scripts read nothing) if there are none. `spare`:
    headings of columns that a terminal which is too narrow for all goes without, the first one first."""
    if not rows:
        print(empty, file=sys.stderr)
    elif sys.stdout.isatty():
        from rich.console import Console

        width = shutil.get_terminal_size().columns
        Console(width=width).print(rich_table(*without_spare(headings, rows, spare, width), width))
    else:
        print(aligned(headings, rows))


def without_spare(
    headings: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], available: int
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the table without spare columns: as many of them, in their order, as must go for the rest to fit."""
    for heading in spare:
        widths = _widths([headings, *rows])
        if sum(widths) + _GAP * (len(widths) - 1) <= available:
            break
        at = headings.index(heading)
        headings, *rows = [(*row[:at], *row[at + 1 :]) for row in (headings, *rows)]
    return headings, rows


def print_side_by_side(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose first column names what the others hold. Where a terminal is too narrow for all of them they
    come in groups, one below the other, each with the names: no figure is cut."""
    if not sys.stdout.isatty():
        print_table(headings, rows)
        return
    for number, group in enumerate(groups(_widths([headings, *rows]), shutil.get_terminal_size().columns)):
        if number:
            print()
        shown = [[row[column] for column in (0, *group)] for row in (headings, *rows)]
        print_table(shown[0], shown[1:])


def groups(widths: Sequence[int], available: int) -> list[range]:
    """The columns behind the first in as few runs as fit, beside the first, into a line; at least one in each."""
    found: list[range] = []
    start = 1
    while start < len(widths):
        end = start + 1
        while end < len(widths) and widths[0] + sum(widths[start : end + 1]) + _GAP * (end + 1 - start) <= available:
            end += 1
        found.append(range(start, end))
        start = end
    return found


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Names and values below each other; pairs without a value are left out. A name may be a user's, as of a role."""
    shown = [(visible(name), value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        first, *more = visible(value, lines=True).split("\n")
        print(f"{name.ljust(width)}  {first}")
        for line in more:
            print(f"{' ' * width}  {line}")


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as plain text."""
    table = [tuple(map(visible, row)) for row in (headings, *rows)]
    widths = _widths(table)
    return "\n".join(
        "  ".join(cell + " " * (width - cells(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cells, column)) for column in zip(*table, strict=True)]


def fitted(widths: Sequence[int], available: int) -> list[int]:
    """Return column widths that fit into `available` characters, by cutting the widest columns."""
    result = list(widths)
    excess = sum(result) + _GAP * (len(result) - 1) - available
    for _ in range(max(0, excess)):
        widest = max(range(len(result)), key=lambda index: result[index])
        if result[widest] <= _LEAST_WIDTH:
            break
        result[widest] -= 1
    return result


def rich_table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> object:
    """A rich renderable of the table, a line a row; words that are states are coloured."""
    from rich.table import Table
    from rich.text import Text

    headings, *rows = [tuple(map(visible, row)) for row in (headings, *rows)]
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for heading, column in zip(headings, fitted(_widths([headings, *rows]), width), strict=True):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=column, max_width=column)
    for row in rows:
        # Text objects, not markup: a job's name may contain brackets.
        table.add_row(*(Text(cell, style=_STYLES.get(cell.lower().partition("(")[0].strip(), "")) for cell in row))
    return table


# -- errors ------------------------------------------------------------------------------------------------------------


def report(error: BaseException) -> int:
    """Writes one explanation to stderr and returns the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return ExitCode.USAGE
    if isinstance(error, click.ClickException):
        if isinstance(error, click.UsageError) and error.ctx is not None:
            _say(f"{error.format_message()}\n  see `{error.ctx.command_path} --help`")
        else:
            _say(error.format_message())
        return ExitCode.USAGE
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return ExitCode.INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader (head, less) has had enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    if isinstance(error, OSError) and error.strerror and (error.filename or error.errno == errno.ENOSPC):
        # The machine's state, not our bug: a directory that is a file, a disk that is full, missing rights.
        _say(os_failure(error) if error.filename else f"the disk: {os_reason(error)}")
        return ExitCode.NOT_PERMITTED if isinstance(error, PermissionError) else ExitCode.REFUSED
    if isinstance(error, CommandError):
        _say(str(error))
        return error.code
    if isinstance(error, UnicodeEncodeError) and "\udc80" <= error.object[error.start] <= "\udcff":
        # Bytes of the command line that were no UTF-8; the wire carries nothing else.
        _say(f"{error.object!r} is not UTF-8: give it another way, or set the locale of the terminal")
        return ExitCode.USAGE
    return _report_api_error(error)


def _report_api_error(error: BaseException) -> int:
    from ganger.wire.endpoints import CredentialError, EndpointError
    from ganger.wire.errors import ApiError, JobNotFound

    if isinstance(error, EndpointError):
        _say(str(error))
        if isinstance(error, CredentialError):
            return ExitCode.NOT_PERMITTED
        return ExitCode.USAGE if error.found else ExitCode.UNREACHABLE
    if isinstance(error, ApiError):
        _say(str(error))
        # It is there, but is no job: what was asked for is asked of a member.
        is_array = isinstance(error, JobNotFound) and "array" in error.metadata
        return ExitCode.USAGE if is_array else exit_code(error)
    return _report_bug(error)


def exit_code(error: Exception) -> ExitCode:
    """The exit code of an `ApiError`: by its status code, so that reasons yet unknown have one too."""
    import grpc

    codes = {
        grpc.StatusCode.INVALID_ARGUMENT: ExitCode.USAGE,
        grpc.StatusCode.OUT_OF_RANGE: ExitCode.USAGE,
        grpc.StatusCode.NOT_FOUND: ExitCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION: ExitCode.REFUSED,
        grpc.StatusCode.ALREADY_EXISTS: ExitCode.REFUSED,
        grpc.StatusCode.ABORTED: ExitCode.REFUSED,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ExitCode.REFUSED,
        grpc.StatusCode.UNIMPLEMENTED: ExitCode.REFUSED,
        grpc.StatusCode.UNAVAILABLE: ExitCode.UNREACHABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED: ExitCode.UNREACHABLE,
        grpc.StatusCode.PERMISSION_DENIED: ExitCode.NOT_PERMITTED,
        grpc.StatusCode.UNAUTHENTICATED: ExitCode.NOT_PERMITTED,
    }
    return codes.get(getattr(error, "code", None) or grpc.StatusCode.UNKNOWN, ExitCode.BUG)


def _report_bug(error: BaseException) -> int:
    number = uuid.uuid4().hex[:12]
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = base / "ganger" / "cli-errors.log"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("a") as file:
            # Arguments only by count: they may hold what --env was given.
            file.write(f"--- {number} {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {' '.join(sys.argv[1:2])}\n")
            file.writelines(traceback.format_exception(error))
        where = f"details are in {path}"
    except OSError as failure:
        where = f"no details could be written to {path} ({os_reason(failure)})"
    _say(f"this is a bug in ganger ({type(error).__name__}), number {number}: {where}")
    return ExitCode.BUG


def _say(message: str) -> None:
    sys.stdout.flush()
    print(f"ganger: {visible(message, lines=True)}", file=sys.stderr)
