"""What a script logs by name: eight lines of the control page, each with a name, its newest value and its step, which
the daemon reads about once a second; and every value in the job's series. Outside Ganger values are only checked."""

from __future__ import annotations

import atexit
import os
import re
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ganger.injob.page import Page
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import METRIC_LINES, METRIC_NAME_BYTES, METRICS_FIRST, Word
from ganger.protocol.metric_series import LARGEST_BYTES, LOSS, START, line_of, merged, parsed

_LINE = 8
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEP_LIMIT = (1 << 62) - 1
# Of the file of the series. Bytes by which it may grow before it is thinned.
_FLUSH_EVERY_S = 1.0
_GROWTH_BYTES = 128 << 10


class ReportedMetric(NamedTuple):
    """``value`` may be any float64, NaN included; ``step``: boundaries passed when it was reported."""

    name: str
    value: float
    step: int


def checked(values: dict[str, Any]) -> dict[str, float]:
    """Return the values as numbers. Raises ValueError for unusable names, TypeError for values that are no numbers."""
    result = {}
    for name, value in values.items():
        if not _NAME.fullmatch(name) or len(name) > METRIC_NAME_BYTES:
            raise ValueError(f"{name!r} cannot name a metric: at most {METRIC_NAME_BYTES} letters, digits, underscores")
        try:
            result[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"metric {name} must be a number, not a {type(value).__name__}") from None
    return result


def write(page: Page, values: dict[str, float]) -> None:
    """Raises ValueError when the job reports under more names than the page has lines."""
    words, step = page.words, page.words[Word.STEP]
    lines = {metric.name: line for line, metric in enumerate(_lines(page))}
    for name, value in values.items():
        line = lines.setdefault(name, len(lines))
        if line >= METRIC_LINES:
            raise ValueError(
                f"metric {name}: a job can report under {METRIC_LINES} names, which are {sorted(lines)[:-1]}"
            )
        first = METRICS_FIRST + _LINE * line
        count = words[first]
        # Zero while it changes, so that no reader combines the old value with the new step.
        words[first] = 0
        words[first + 1] = step
        page.set_float(first + 2, value)
        for place, word in enumerate(struct.unpack("<4Q", name.encode().ljust(METRIC_NAME_BYTES, b"\0"))):
            words[first + 4 + place] = word
        words[first] = count + 1


def read(page: Page) -> tuple[ReportedMetric, ...]:
    """Return the metrics of a page, by line. Lines without a valid name are left out."""
    return tuple(metric for metric in _lines(page) if _NAME.fullmatch(metric.name))


def log(**values: Any) -> None:
    """Log figures of this training, by name: ``ganger.log(accuracy=0.93)``. See `TrainingJob.log`.

    For scripts that do not attach. Only rank 0 is listened to."""
    numbers = checked(values)
    path = os.environ.get("GANGER_PAGE", "")
    if not path:
        return
    try:
        page = _pages.get(path) or _pages.setdefault(path, Page.open(path))
        # A worker of a data loader, or a process that the script started, does not report for the rank.
        if page.is_of_this_process():
            write(page, numbers)
            series = series_of(page, os.environ.get("GANGER_JOB_DIR", ""))
            if series is not None:
                series.log(page.words[Word.STEP], numbers)
    except (OSError, PageError):
        # Training continues without a daemon.
        return


# The name of `log` before there were series.
report = log

_pages: dict[str, Page] = {}


def series_of(page: Page, job_dir: str) -> SeriesFile | None:
    """Return the file of the job's series, which only rank 0 has."""
    return series_file(job_dir) if job_dir and page.get(Word.RANK) == 0 else None


def _lines(page: Page) -> list[ReportedMetric]:
    words = page.metric_words()
    return [_metric(words[first : first + _LINE]) for first in range(0, len(words), _LINE) if words[first]]


def _metric(line: Sequence[int]) -> ReportedMetric:
    (value,) = struct.unpack("<d", struct.pack("<Q", line[2]))
    name = struct.pack("<4Q", *line[4:8]).rstrip(b"\0").decode("ascii", "replace")
    return ReportedMetric(name, value, min(line[1], _STEP_LIMIT))


# -- the series


class SeriesFile:
    """The series of this attempt in a file of the job's directory, which the daemon copies. Adding costs microseconds;
    lines are written about once a second, as no other process may have to wait for them. A full disk loses them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._pending: list[str] = []
        self._strides: Mapping[str, int] = {}
        self._last: dict[str, int] = {}
        self._logged: set[str] = set()
        self._flush_at = 0.0
        self._limit_bytes = _GROWTH_BYTES

    def start(self, step: int) -> None:
        """This attempt continues at ``step``."""
        self.add(START, step, 0.0)
        self.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add what the script reports."""
        for name, value in values.items():
            self._logged.add(name)
            self.add(name, step, value)

    def add_loss(self, step: int, value: float) -> None:
        """Add a step's loss, unless the script reports it under that name."""
        if LOSS not in self._logged:
            self.add(LOSS, step, value)

    def add(self, name: str, step: int, *values: float) -> None:
        """Add a line, unless its name is thinned and has one near it. A second one at a step replaces the first."""
        last = self._last.get(name)
        if last is not None and step != last:
            stride = self._strides.get(name, 1)
            if step // stride == last // stride:
                return
        self._last[name] = step
        now = time.time()
        self._pending.append(line_of(step, now, name, values))
        if now >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        self._flush_at = time.time() + _FLUSH_EVERY_S
        if not self._pending:
            return
        text = "".join(f"{line}\n" for line in self._pending)
        self._pending.clear()
        try:
            with open(self.path, "a", encoding="ascii") as file:
                file.write(text)
                size = file.tell()
            if size > self._limit_bytes:
                self._thin()
        except OSError:
            return

    def _thin(self) -> None:
        with open(self.path, encoding="ascii", errors="replace") as file:
            series = merged([parsed(file.read(LARGEST_BYTES), 0)])
        self._strides = series.strides
        temporary = f"{self.path}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="ascii") as file:
            file.write(series.text())
            self._limit_bytes = file.tell() + _GROWTH_BYTES
        os.replace(temporary, self.path)


def series_path(job_dir: str) -> str:
    """Return the path of the series in a job's directory."""
    return os.path.join(job_dir, "rank-0.series")


_files: dict[str, SeriesFile] = {}


def series_file(job_dir: str) -> SeriesFile:
    """Return this process's file of the series of a job."""
    path = series_path(job_dir)
    if path not in _files:
        _files[path] = SeriesFile(path)
        atexit.register(_files[path].flush)
    return _files[path]
