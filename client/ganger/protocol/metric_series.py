"""What a job has reported, by step, and its epochs: a series that is bounded, whatever the job reports.

A line of text has the step, the time (Unix seconds), a name and values. A line ``attempt N`` gives the attempt of the
lines below it, ``stride NAME N`` how a name is thinned: of each N steps the first line is kept. N is the smallest power
of two that leaves at most `MOST_POINTS`. Merging is the same in any order: copies on several nodes need no authority.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

MOST_POINTS = 1000
# Eight that a job reports, the loss of its steps, and those of this module.
MOST_NAMES = 12
LARGEST_BYTES = 4 << 20
# Names that no metric has: an epoch that has ended, and where an attempt began.
EPOCH = "@epoch"
START = "@start"
LOSS = "loss"

_NAME = re.compile(r"@?[A-Za-z_][A-Za-z0-9_]{0,31}")
_STEP_LIMIT = 1 << 62
_MOST_VALUES = 4
# More than any number of an epoch's line: Unix seconds after the year 5000.
_LARGEST = 1e11


class SeriesPoint(NamedTuple):
    """A line of a series. ``values``: one of a metric; number, begin (Unix seconds), first step and seconds without
    stops of an epoch, which ends at ``step``."""

    attempt: int
    step: int
    time_s: float
    values: tuple[float, ...]


class EpochRecord(NamedTuple):
    """An epoch that has ended. ``active_s``: without the time in which the job was stopped; ``mean_loss``: of the
    losses in the series; NaN if there are none."""

    number: int
    begin_s: float
    end_s: float
    first_step: int
    steps: int
    active_s: float
    mean_loss: float


Points = dict[tuple[str, int], SeriesPoint]


class MetricSeries(NamedTuple):
    """Points by name and step, and the stride of each name that is thinned."""

    points: Points
    strides: Mapping[str, int]

    def names(self) -> list[str]:
        """Return the names of the metrics in order."""
        return sorted({name for name, _ in self.points if not name.startswith("@")})

    def of(self, name: str) -> list[SeriesPoint]:
        """Return the points of a name by step."""
        return [self.points[key] for key in sorted(key for key in self.points if key[0] == name)]

    def epochs(self) -> list[EpochRecord]:
        """Return the epochs that have ended by number; of one that was repeated, the last time."""
        losses = [(point.step, point.values[0]) for point in self.of(LOSS)]
        found = {}
        for point in self.of(EPOCH):
            # No job is trusted to write only what `SeriesFile` would.
            if len(point.values) != _MOST_VALUES or not all(0 <= value < _LARGEST for value in point.values):
                continue
            number, begin_s, first, active_s = point.values
            own = [value for step, value in losses if first <= step < point.step and math.isfinite(value)]
            mean = math.fsum(own) / len(own) if own else math.nan
            steps = max(0, point.step - int(first))
            found[int(number)] = EpochRecord(int(number), begin_s, point.time_s, int(first), steps, active_s, mean)
        return [found[number] for number in sorted(found)]

    def text(self) -> str:
        """Return the series as `parsed` reads it."""
        lines = [f"stride {name} {stride}" for name, stride in sorted(self.strides.items())]
        attempt = None
        for (name, step), point in sorted(self.points.items(), key=lambda item: (item[1].attempt, item[0][1], item[0])):
            if point.attempt != attempt:
                attempt = point.attempt
                lines.append(f"attempt {attempt}")
            lines.append(line_of(step, point.time_s, name, point.values))
        return "".join(f"{line}\n" for line in lines)


def parsed(text: str, attempt: int | None = None) -> MetricSeries:
    """Read a series; lines that are none are left out. ``attempt``: of all lines, whatever the text has."""
    points: Points = {}
    strides: dict[str, int] = {}
    current = attempt or 0
    for line in text.splitlines():
        words = line.split()
        try:
            if words[0] == "attempt" and attempt is None:
                current = min(max(0, int(words[1])), _STEP_LIMIT)
            elif words[0] == "stride" and _NAME.fullmatch(words[1]):
                stride = int(words[2])
                if 0 < stride < _STEP_LIMIT and not stride & (stride - 1):
                    strides[words[1]] = stride
            elif 3 < len(words) <= 3 + _MOST_VALUES and _NAME.fullmatch(words[2]):
                step, time_s = int(words[0]), float(words[1])
                if 0 <= step < _STEP_LIMIT and 0 <= time_s < _LARGEST:
                    points[words[2], step] = SeriesPoint(current, step, time_s, tuple(map(float, words[3:])))
        except (ValueError, IndexError):
            continue
    return MetricSeries(points, strides)


def merged(several: Iterable[MetricSeries]) -> MetricSeries:
    """Merge copies and attempts of one job's series, and thin the result.

    An attempt continues at its first step: points of earlier attempts beyond that are of steps that were repeated."""
    parts = list(several)
    starts: dict[int, int] = {}
    for part in parts:
        for point in part.points.values():
            starts[point.attempt] = min(point.step, starts.get(point.attempt, point.step))
    # By attempt, the lowest first step of a later one.
    ends: dict[int, int] = {}
    lowest = _STEP_LIMIT
    for attempt in sorted(starts, reverse=True):
        ends[attempt] = lowest
        lowest = min(lowest, starts[attempt])
    points: Points = {}
    for part in parts:
        for key, point in part.points.items():
            known = points.get(key)
            if point.step <= ends[point.attempt] and (known is None or _rank(point) >= _rank(known)):
                points[key] = point
    strides: dict[str, int] = {}
    for part in parts:
        for name, stride in part.strides.items():
            strides[name] = max(stride, strides.get(name, 1))
    return _thinned(points, strides)


def _rank(point: SeriesPoint) -> tuple[int, float, str]:
    # The values as text: a NaN has a place too.
    return point.attempt, point.time_s, repr(point.values)


def _thinned(points: Points, strides: dict[str, int]) -> MetricSeries:
    steps: dict[str, list[int]] = {}
    for name, step in points:
        steps.setdefault(name, []).append(step)
    kept: Points = {}
    known: dict[str, int] = {}
    for name in sorted(steps)[:MOST_NAMES]:
        stride = strides.get(name, 1)
        while len({step // stride for step in steps[name]}) > MOST_POINTS:
            stride *= 2
        if stride > 1:
            known[name] = stride
        first: dict[int, int] = {}
        for step in sorted(steps[name]):
            first.setdefault(step // stride, step)
        for step in first.values():
            kept[name, step] = points[name, step]
    return MetricSeries(kept, known)


def line_of(step: int, time_s: float, name: str, values: Iterable[float]) -> str:
    """Return a line of the text, without its end."""
    return f"{step} {time_s:.3f} {name} {' '.join(map(repr, values))}"
