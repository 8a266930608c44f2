"""What a script reports by name: eight lines of the control page, each with a name, its newest value and its step. The
daemon reads them about once a second. Outside Ganger a report is checked and goes nowhere."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ganger.injob.page import Page
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import METRIC_LINES, METRIC_NAME_BYTES, METRICS_FIRST, Word

_LINE = 8
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEP_LIMIT = (1 << 62) - 1


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


def report(**values: Any) -> None:
    """Report figures of this training, by name: ``ganger.report(accuracy=0.93)``. See `TrainingJob.report`.

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
    except (OSError, PageError):
        # Training continues without a daemon.
        return


_pages: dict[str, Page] = {}


def _lines(page: Page) -> list[ReportedMetric]:
    words = page.metric_words()
    return [_metric(words[first : first + _LINE]) for first in range(0, len(words), _LINE) if words[first]]


def _metric(line: Sequence[int]) -> ReportedMetric:
    (value,) = struct.unpack("<d", struct.pack("<Q", line[2]))
    name = struct.pack("<4Q", *line[4:8]).rstrip(b"\0").decode("ascii", "replace")
    return ReportedMetric(name, value, min(line[1], _STEP_LIMIT))
