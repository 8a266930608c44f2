"""Reads the jobs of a CSV file as a workload, and says what became of every row.

Files are read as a stream, in blocks; what is held grows only with the jobs kept, and those have a limit. A row either
becomes a job, or is counted under one reason: mistakes refuse the file (or, if so asked, are left out), rows that no
simulation can run (no GPU, nothing to run) are left out. Nothing is dropped in silence: not rows, not columns.
"""

from __future__ import annotations

import csv
import io
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from ganger.text import os_reason
from numpy.typing import NDArray

from ganger_master.simulator.traces.rows import (
    DEADLINE_LIST,
    JOB_ID,
    JOB_TYPE,
    LABELS,
    POSITIVE,
    WHOLE,
    Column,
    RowFinding,
    RowFindingCounts,
    RowFindingKind,
    TraceError,
    first_deadlines,
    rows_of,
    understood,
)
from ganger_master.simulator.traces.workload import MOST_S, Floats, Integers, Labels, Workload, workload

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
        """Line at which the next row begins."""
        return self._last_row + 1

    def next_row(self) -> None:
        self._last_row = self.number


def _refused(name: str, line: int, what: str) -> TraceError:
    return TraceError(name, [RowFinding(RowFindingKind.MISTAKE, what, 1, (line,))])


# Rows turned into columns at once: enough for NumPy, little to hold.
_BLOCK_ROWS = 16_384
_BUFFER_BYTES = 1 << 18
_LONGEST_ID = 256
# A file with more mistakes is no trace, and reading stops.
_MOST_MISTAKES = 10_000
_MOST_GPUS = 1_000_000
# Of a run: less is lost beside the time of day.
_LEAST_S = 1e-6
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class RowFilter:
    """What to take from a file.

    `window_s`: only jobs submitted from the first to before the second, on the file's clock. `where`: only rows whose
    columns hold these texts. `skip_mistakes`: leave rows with mistakes out instead of refusing the file. `most_jobs`:
    how many jobs may be kept; a hundred bytes each and more.
    """

    window_s: tuple[float, float] | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    skip_mistakes: bool = False
    most_jobs: int = 2_000_000


@dataclass(frozen=True)
class Reading:
    """Jobs kept, rows seen, and why they differ: `rows == len(workload) + skipped rows`."""

    workload: Workload
    rows: int
    findings: tuple[RowFinding, ...]
    ignored_columns: tuple[str, ...]


def read_trace(
    path: Path, wanted: RowFilter | None = None, progress: Callable[[int, int], None] | None = None
) -> Reading:
    """Reads a file; `progress` gets the bytes read and the bytes there are. TraceError names the file, the lines and
    everything that is wrong with them; it is raised too for a file that cannot be opened."""
    try:
        with io.BufferedReader(_Watched(path, progress), _BUFFER_BYTES) as stream:
            return read_stream(stream, path.name, wanted)
    except OSError as error:
        what = f"cannot be read: {os_reason(error)}"
        raise TraceError(str(path), [RowFinding(RowFindingKind.MISTAKE, what, 0)]) from error


class _Watched(io.FileIO):
    """A file that says how much of it was read, where it has a size to compare with."""

    def __init__(self, path: Path, progress: Callable[[int, int], None] | None) -> None:
        super().__init__(path)
        size = os.fstat(self.fileno()).st_size
        self._progress = progress if size else None
        self._size = size
        self._read = 0

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        if self._progress is not None and count:
            self._read += count
            self._progress(self._read, self._size)
        return count


def read_stream(stream: BinaryIO, name: str, wanted: RowFilter | None = None) -> Reading:
    """Reads a stream of bytes to its end; `name` is for messages."""
    with closing(lines_of(stream, name)) as lines:
        return _read(RowLines(lines, name), name, wanted or RowFilter())


def _read(lines: RowLines, name: str, wanted: RowFilter) -> Reading:
    rows = _numbered(lines, name)
    _, first = next(rows, (0, None))
    if first is None:
        what = "the file is empty: it needs a row of column names"
        raise TraceError(name, [RowFinding(RowFindingKind.MISTAKE, what, 0)])
    headers = [header.strip() for header in first]
    found, ignored, wrong = understood(headers)
    wrong += [f"there is no column {header} to choose by" for header in wanted.where if header not in headers]
    ignored = [header for header in ignored if header not in wanted.where]
    if wrong:
        what = f"{'; '.join(wrong)} (found: {', '.join(headers)[:500]})"
        if len(headers) == 1 and (sign := next((sign for sign in ";\t|" if sign in headers[0]), None)) is not None:
            what = f"columns are separated by {sign!r}: separate them by commas"
        raise _refused(name, 1, what)
    columns = _Columns(headers, found, wanted)
    seen, is_given_up = 0, False
    while block := list(islice(rows, _BLOCK_ROWS)):
        seen += len(block)
        columns.add([line for line, _ in block], [row for _, row in block])
        if len(columns.ids) > wanted.most_jobs:
            what = f"more than {wanted.most_jobs:,} jobs: take a window of the trace"
            raise _refused(name, block[-1][0], what)
        is_given_up = (
            not wanted.skip_mistakes and rows_of(columns.tally.findings(), RowFindingKind.MISTAKE) > _MOST_MISTAKES
        )
        if is_given_up:
            break
    made = columns.finish()
    findings = columns.tally.findings()
    mistakes = [finding for finding in findings if finding.kind is RowFindingKind.MISTAKE]
    if mistakes and not wanted.skip_mistakes:
        given_up = [RowFinding(RowFindingKind.MISTAKE, "too many mistakes: reading ended here", 1, (lines.number,))]
        raise TraceError(name, mistakes + given_up * is_given_up)
    if wanted.skip_mistakes:
        left_out = {RowFindingKind.MISTAKE: RowFindingKind.SKIPPED}
        findings = tuple(replace(finding, kind=left_out.get(finding.kind, finding.kind)) for finding in findings)
    if made is None or not len(made):
        skipped = [finding for finding in findings if finding.kind is RowFindingKind.SKIPPED]
        raise TraceError(name, [RowFinding(RowFindingKind.MISTAKE, "no job to run is left", seen), *skipped])
    assert seen == len(made) + rows_of(findings, RowFindingKind.SKIPPED), "every row is a job or has a reason"
    return Reading(made, seen, findings, tuple(ignored))


class _Columns:
    """Grows by blocks of rows; each row is kept, or noted once."""

    def __init__(self, headers: Sequence[str], found: Mapping[str, tuple[int, Column]], wanted: RowFilter) -> None:
        self.tally = RowFindingCounts()
        self.ids: list[str] = []
        # Of rows with a mistake, which are not kept.
        self.mistaken_ids: set[str] = set()
        self.headers = headers
        self.found = found
        self.wanted = wanted
        self._numbers: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        self._codes: defaultdict[str, list[NDArray[np.int32]]] = defaultdict(list)
        self._names: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def add(self, lines: list[int], rows: list[list[str]]) -> None:
        width = len(self.headers)
        ragged = [line for line, row in zip(lines, rows, strict=True) if len(row) != width]
        if ragged:
            self.tally.note(RowFindingKind.MISTAKE, f"not the {width} fields of the header", ragged)
            whole = [(line, row) for line, row in zip(lines, rows, strict=True) if len(row) == width]
            lines, rows = [line for line, _ in whole], [row for _, row in whole]
        if rows:
            _Block(self, np.array(lines, np.int64), list(zip(*rows, strict=True))).sift()

    def keep(
        self, kept: Mask, ids: Sequence[str], numbers: Mapping[str, NDArray[Any]], texts: Mapping[str, Any]
    ) -> None:
        positions = np.flatnonzero(kept)
        if not len(positions):
            return
        every = len(positions) == len(kept)
        self.ids += ids if every else [ids[position] for position in positions.tolist()]
        for name, column in numbers.items():
            self._numbers[name].append(column if every else column[positions])
        for name, column in texts.items():
            codes = self._names[name]
            chosen = column if every else [column[position] for position in positions.tolist()]
            new = set(chosen).difference(codes)
            codes.update(zip(sorted(new), range(len(codes), len(codes) + len(new)), strict=True))
            self._codes[name].append(np.fromiter(map(codes.__getitem__, chosen), np.int32, len(positions)))

    def finish(self) -> Workload | None:
        if not self.ids:
            return None
        numbers = {name: np.concatenate(columns) for name, columns in self._numbers.items()}
        labels = {name: _labels(np.concatenate(self._codes[name]), self._names[name]) for name in self._codes}
        first = self._first_of_each_id(numbers["lines"])
        ids: Sequence[str] = self.ids
        if first is not None:
            ids = [ids[job] for job in first.tolist()]
            numbers = {name: column[first] for name, column in numbers.items()}
            labels = {name: column.take(first) for name, column in labels.items()}
        earlier = np.flatnonzero(numbers["submit_s"][1:] < np.maximum.accumulate(numbers["submit_s"])[:-1]) + 1
        self.tally.note(
            RowFindingKind.CHANGED, "submitted before the row above: rows were sorted", numbers["lines"][earlier]
        )
        if "duration_s" not in numbers:
            self.tally.note(
                RowFindingKind.CHANGED, "no duration_s: run times must follow from models", numbers["lines"]
            )
        required = {name: numbers.pop(name) for name in ("submit_s", "gpus")}
        duration = numbers.pop("duration_s", None)
        return workload(ids, required["submit_s"], required["gpus"], duration, numbers=numbers, labels=labels)

    def _first_of_each_id(self, lines: Integers) -> Integers | None:
        """Positions to keep, or None where no id comes twice."""
        if self.mistaken_ids and not self.wanted.skip_mistakes:
            # The file is refused: reported now, it is not the next mistake to be found.
            repeated = lines[[job_id in self.mistaken_ids for job_id in self.ids]]
            self.tally.note(RowFindingKind.MISTAKE, "job_id is that of another row, which has a mistake", repeated)
        if len(set(self.ids)) == len(self.ids):
            return None
        seen: set[str] = set()
        first = np.array([not (job_id in seen or seen.add(job_id)) for job_id in self.ids])  # type: ignore[func-returns-value]
        what = "job_id was there before (does the file hold several workloads? choose one by its column)"
        self.tally.note(RowFindingKind.MISTAKE, what, lines[~first])
        return np.flatnonzero(first)


class _Block:
    """Some rows as columns of text, being sifted: `open` are those nothing was found against yet."""

    def __init__(self, columns: _Columns, lines: Integers, texts: list[tuple[str, ...]]) -> None:
        self._columns = columns
        self._lines = lines
        self._texts = texts
        self._open = np.ones(len(lines), bool)
        self._partly = np.zeros(len(lines), bool)

    def sift(self) -> None:
        columns, found = self._columns, self._columns.found
        for header, text in columns.wanted.where.items():
            chosen = self._column(columns.headers.index(header))
            self._drop(RowFindingKind.SKIPPED, f"{header} is not {text}", np.array([value != text for value in chosen]))
        ids = self._column(found[JOB_ID][0])
        if not all(map(str.strip, ids)) or max(map(len, ids)) > _LONGEST_ID:
            bad = np.array([not job_id.strip() or len(job_id) > _LONGEST_ID for job_id in ids])
            self._drop(RowFindingKind.MISTAKE, f"job_id is blank or longer than {_LONGEST_ID} characters", bad)
        numbers: dict[str, NDArray[Any]] = {"lines": self._lines}
        numbers["submit_s"] = self._submissions()
        numbers["gpus"] = self._gangs()
        if "duration_s" in found:
            numbers["duration_s"] = self._durations()
        for name in found.keys() - {"submit_s", "gpus", "duration_s", JOB_ID, *LABELS}:
            numbers[name] = self._optional(name, numbers)
        for name, wrong in (("min_gpus", np.greater), ("max_gpus", np.less)):
            if name in numbers:
                self._drop(RowFindingKind.MISTAKE, f"gpus lies outside {name}", wrong(numbers[name], numbers["gpus"]))
        texts = {name: list(map(str.strip, self._column(found[name][0]))) for name in LABELS if name in found}
        partly = self._lines[self._open & self._partly]
        columns.tally.note(RowFindingKind.CHANGED, "asks for part of a GPU: counted as a whole one", partly)
        columns.keep(self._open, ids, numbers, texts)

    def _submissions(self) -> Floats:
        header, values = self._parsed("submit_s", blank_is_mistake=True)
        self._drop(RowFindingKind.MISTAKE, f"{header} is negative", values < 0)
        self._drop(RowFindingKind.MISTAKE, f"{header} is beyond any time: seconds are meant", values > MOST_S)
        if self._columns.wanted.window_s is not None:
            first, end = self._columns.wanted.window_s
            self._drop(RowFindingKind.SKIPPED, "submitted outside the window", ~((values >= first) & (values < end)))
        return values

    def _gangs(self) -> Integers:
        header, values = self._parsed("gpus", blank_is_mistake=True)
        self._drop(RowFindingKind.MISTAKE, f"{header} is negative", values < 0)
        self._drop(RowFindingKind.MISTAKE, f"{header} is more than {_MOST_GPUS:,}", values > _MOST_GPUS)
        self._drop(RowFindingKind.SKIPPED, "asks for no GPU", values == 0)
        whole = np.ceil(np.where(self._open, values, 1))
        self._partly = self._open & (whole != values)
        return whole.astype(np.int64)

    def _durations(self) -> Floats:
        header, values = self._parsed("duration_s")
        self._drop(RowFindingKind.MISTAKE, f"{header} is negative", values < 0)
        self._drop(RowFindingKind.MISTAKE, f"{header} is beyond any time: seconds are meant", values > MOST_S)
        self._drop(RowFindingKind.SKIPPED, f"{header} is zero: there is nothing to run", values == 0)
        self._drop(
            RowFindingKind.SKIPPED, f"{header} is less than a microsecond: nothing can be timed", values < _LEAST_S
        )
        # What is blank may follow from iterations and model, or be drawn.
        return values

    def _optional(self, name: str, numbers: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        header, values = self._parsed(name)
        if header == DEADLINE_LIST:
            values = values + numbers["submit_s"]
        if name != "priority":
            self._drop(RowFindingKind.MISTAKE, f"{header} is negative", values < 0)
        if name == "deadline_s":
            what = f"{header} is before the submission: both are meant on the same clock"
            self._drop(RowFindingKind.MISTAKE, what, values < numbers["submit_s"])
        if name in POSITIVE:
            self._drop(RowFindingKind.MISTAKE, f"{header} is zero", values == 0)
        if name == "weight":
            return np.where(np.isnan(values), 1.0, values)
        if name not in WHOLE:
            return values
        default = 0 if name == "priority" else numbers["gpus"]
        values = np.where(np.isnan(values), default, values)
        self._drop(RowFindingKind.MISTAKE, f"{header} is not a whole number", values != np.rint(values))
        self._drop(RowFindingKind.MISTAKE, f"{header} is beyond {_MOST_GPUS:,}", np.abs(values) > _MOST_GPUS)
        return np.where(self._open, values, 1).astype(np.int64)

    def _parsed(self, name: str, blank_is_mistake: bool = False) -> tuple[str, Floats]:
        """(header, values); NaN where the field is blank. Rows with anything but a finite number are dropped."""
        position, column = self._columns.found[name]
        texts = self._column(position)
        if column.header == DEADLINE_LIST:
            headers = self._columns.headers
            types = self._column(headers.index(JOB_TYPE)) if JOB_TYPE in headers else None
            texts = first_deadlines(texts, types)
        try:
            values = np.array(list(map(float, texts)))
            blank = np.zeros(len(values), bool)
        except ValueError:
            values = np.array([_number(text) for text in texts])
            blank = np.array([not text.strip() for text in texts])
        if blank_is_mistake:
            self._drop(RowFindingKind.MISTAKE, f"{column.header} is blank", blank)
        self._drop(RowFindingKind.MISTAKE, f"{column.header} is not a finite number", ~blank & ~np.isfinite(values))
        with np.errstate(over="ignore"):
            scaled = values * column.scale
        self._drop(
            RowFindingKind.MISTAKE, f"{column.header} is beyond any memory", np.isinf(scaled) & np.isfinite(values)
        )
        return column.header, scaled

    def _drop(self, kind: RowFindingKind, what: str, rows: Mask) -> None:
        dropped = rows & self._open
        if dropped.any():
            self._columns.tally.note(kind, what, self._lines[dropped])
            if kind is RowFindingKind.MISTAKE:
                ids = self._column(self._columns.found[JOB_ID][0])
                self._columns.mistaken_ids.update(ids[row] for row in np.flatnonzero(dropped).tolist())
            self._open &= ~dropped

    def _column(self, position: int) -> Sequence[str]:
        return self._texts[position]


def _numbered(lines: RowLines, name: str) -> Iterator[tuple[int, list[str]]]:
    """Rows with the line each ends on, blank lines left out."""
    rows = csv.reader(lines, strict=True)
    try:
        for row in rows:
            lines.next_row()
            if row:
                yield rows.line_num, row
    except csv.Error as error:
        what = f"the row from here on is not readable as CSV: {error}"
        raise _refused(name, lines.next_line, what) from error


def _number(text: str) -> float:
    """NaN for a blank, infinite for what is no number."""
    try:
        value = float(text) if text.strip() else np.nan
    except ValueError:
        return np.inf
    return np.inf if value != value and text.strip() else value


def _labels(codes: NDArray[np.int32], names: Mapping[str, int]) -> Labels:
    """Names ascending, whatever the order in which they were met."""
    ordered = sorted(names)
    rank = np.empty(len(names), np.int32)
    rank[[names[name] for name in ordered]] = np.arange(len(names), dtype=np.int32)
    codes = rank[codes]
    codes.flags.writeable = False
    return Labels(codes, tuple(ordered))
