"""A stream of bytes as lines of text, with nothing held that could grow: files of any size and any content may come."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from typing import BinaryIO

from ganger_master.simulator.traces.row_findings import RowFinding, RowFindingKind, TraceError

# The longest line of any known trace has 200 characters; a file without line ends must not be read as one.
LONGEST_LINE = 64 * 1024
# A quoted field may hold line breaks; a quote that is never closed must not gather the rest of the file.
MOST_LINES_OF_A_ROW = 100


def lines_of(stream: BinaryIO, name: str) -> Generator[str]:
    """The lines, with their ends (LF, CRLF or CR), without a byte-order mark.

    TraceError, with the line, for what is not UTF-8 text: zero bytes, other bytes, lines without end. A line that the
    file breaks off in is passed on as it is.
    """
    # Bytes that are not UTF-8 come through as lone surrogates, so that the line they stand in is known.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    number = 0
    try:
        while line := text.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise _refused(name, number, f"more than {LONGEST_LINE:,} characters without a line end: is this text?")
            if "\0" in line:
                raise _refused(name, number, "a zero byte: this is no text file (compressed? UTF-16?)")
            if not line.isascii() and any("\udc80" <= letter <= "\udcff" for letter in line):
                raise _refused(
                    name, number, "bytes that are not UTF-8: is the file compressed, or in another encoding?"
                )
            yield line
    finally:
        # The stream belongs to the caller.
        text.detach()


class RowLines:
    """The lines, for a CSV reader to take: its user says `next_row` after each row it got."""

    def __init__(self, lines: Iterator[str], name: str) -> None:
        self._lines = lines
        self._name = name
        # The line that was read last.
        self.number = 0
        self._last_row = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        if self.number - self._last_row > MOST_LINES_OF_A_ROW:
            what = f"a quoted field of the row from here on does not end within {MOST_LINES_OF_A_ROW} lines"
            raise _refused(self._name, self.next_line, what)
        return line

    @property
    def next_line(self) -> int:
        """Where the row begins that nobody has got yet."""
        return self._last_row + 1

    def next_row(self) -> None:
        self._last_row = self.number


def _refused(name: str, line: int, what: str) -> TraceError:
    return TraceError(name, [RowFinding(RowFindingKind.MISTAKE, what, 1, (line,))])
