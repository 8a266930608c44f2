"""`ganger plot` and `ganger export`: what jobs have logged by name, drawn on the terminal or into a picture, and as CSV
or as event files of TensorBoard. Points drawn by text are also those of `ganger profile`."""

from __future__ import annotations

import csv
import math
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ganger.cli.options import Selection, chooses_jobs, json_option, number, open_client
from ganger.console import CommandError, ExitCode, plain, print_json, print_line, print_table
from ganger.text import format_duration

if TYPE_CHECKING:
    from ganger.v1.job_service_pb2 import EndedEpoch, MetricPoints, Series

_WIDTH = 64
_HEIGHT = 12
_SIGNS = "*o+x#@%&"
_EPOCHS_SHOWN = 10
_NO_MATPLOTLIB = "pictures need Matplotlib: pip install 'ganger[plots]'; without --output it is drawn here"
_NOTHING = "has logged nothing: job.log(accuracy=0.93) in its script does"


class TextPlot:
    """Points on a grid of characters, with the ranges of both axes beside it."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        """`x`, `y`: ranges that are shown; one without an extent is widened."""
        self._x, self._y = (low_high if low_high[0] < low_high[1] else _widened(low_high[0]) for low_high in (x, y))
        self._grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]

    def column(self, x: float) -> int:
        """Return the column of a value, within the grid."""
        low, high = self._x
        return min(_WIDTH - 1, max(0, round((x - low) / (high - low) * (_WIDTH - 1))))

    def at(self, column: int) -> float:
        """Return the value of a column."""
        low, high = self._x
        return low + column * (high - low) / (_WIDTH - 1)

    def put(self, x: float, y: float, sign: str) -> None:
        low, high = self._y
        row = min(_HEIGHT - 1, max(0, round((y - low) / (high - low) * (_HEIGHT - 1))))
        self._grid[_HEIGHT - 1 - row][self.column(x)] = sign

    def upright(self, x: float, sign: str) -> None:
        for line in self._grid:
            line[self.column(x)] = sign

    def lines(self, x_digits: str = "g", y_digits: str = ".3g") -> list[str]:
        """Return the lines of the plot. `x_digits`, `y_digits`: formats of the numbers at the axes."""
        bottom, top = (format(value, y_digits) for value in self._y)
        labels = [top, *[""] * (_HEIGHT - 2), bottom]
        margin = max(map(len, labels))
        drawn = [f"{label:>{margin}} |{''.join(line)}".rstrip() for label, line in zip(labels, self._grid, strict=True)]
        first, last = (format(value, x_digits) for value in self._x)
        axis = " " * (margin + 1) + "+" + "-" * _WIDTH
        return [*drawn, axis, " " * (margin + 2) + first + last.rjust(_WIDTH - len(first))]


def _widened(value: float) -> tuple[float, float]:
    by = abs(value) / 2 or 0.5
    return value - by, value + by


@click.command()
@chooses_jobs(has_all=False)
@click.option("--metric", "-m", "names", multiple=True, metavar="NAME", help="Only this metric; may be repeated.")
@click.option("--output", "-o", type=click.Path(dir_okay=False), help="Draw a PNG, PDF or SVG file with Matplotlib.")
@json_option
def plot(selection: Selection, names: tuple[str, ...], output: str | None, as_json: bool) -> int | None:
    """Draw what jobs have logged, by step, and list their epochs.

    A script logs by job.log(loss=..., accuracy=...); losses that it hands to job.step are there, too.
    """
    found = _found(selection)
    if as_json:
        print_json({number(job): plain(series) for job, series in found.items()})
        return None
    metrics = _chosen(found, names)
    if output is not None:
        _draw(found, metrics, Path(output))
        return None
    for name in metrics:
        for line in _text_plot(found, name):
            print_line(line)
        print_line("")
    for job, series in found.items():
        if series.epochs:
            shown = series.epochs[-_EPOCHS_SHOWN:]
            which = f"last {len(shown)} of {len(series.epochs)} epochs" if len(shown) < len(series.epochs) else "epochs"
            print_line(f"job {number(job)}: {which}")
            print_table(("EPOCH", "BEGIN", "TIME", "STEPS", "S/STEP", "LOSS"), list(map(_epoch_row, shown)), "")
    return None


def _found(selection: Selection) -> dict[str, Series]:
    """Return the series of jobs by name. Raises CommandError if none of them has logged anything."""
    with open_client() as client:
        jobs = selection.named(client, ended=True)
        found = {job: client.get_series(job) for job in jobs}
    if not any(series.metrics or series.epochs for series in found.values()):
        which = f"job {number(jobs[0])}" if len(jobs) == 1 else "none of the jobs"
        raise CommandError(f"{which} {_NOTHING}", ExitCode.NOT_FOUND)
    return found


def _chosen(found: dict[str, Series], names: Sequence[str]) -> list[str]:
    known = sorted({metric.name for series in found.values() for metric in series.metrics})
    if missing := [name for name in names if name not in known]:
        there = f"there are {', '.join(known)}" if known else "no metric was logged"
        raise CommandError(f"no metric {missing[0]!r}: {there}", ExitCode.NOT_FOUND)
    return list(dict.fromkeys(names)) or known


def _finite(metric: MetricPoints) -> list[tuple[int, float]]:
    return [(step, value) for step, value in zip(metric.steps, metric.values, strict=False) if math.isfinite(value)]


def _text_plot(found: dict[str, Series], name: str) -> list[str]:
    curves = {
        number(job): _finite(metric)
        for job, series in found.items()
        for metric in series.metrics
        if metric.name == name
    }
    every = [point for points in curves.values() for point in points]
    if not every:
        return [f"{name}: no finite value"]
    steps, values = [step for step, _ in every], [value for _, value in every]
    canvas = TextPlot((min(steps), max(steps)), (min(values), max(values)))
    legend = []
    for at, (job, points) in enumerate(curves.items()):
        sign = _SIGNS[at % len(_SIGNS)]
        for step, value in points:
            canvas.put(step, value, sign)
        if points:
            legend.append(f"{sign} job {job}, {points[-1][1]:.4g} at step {points[-1][0]}")
    return [*canvas.lines(x_digits=".0f", y_digits=".4g"), f"{name} by step: {'; '.join(legend)}"]


def _epoch_row(epoch: EndedEpoch) -> tuple[str, ...]:
    from ganger.wire import times

    active_s = times.seconds(epoch.active_duration)
    begun = f"{times.local_datetime(epoch.begin_time):%Y-%m-%d %H:%M:%S}"
    step = f"{active_s / epoch.steps:.4g}" if epoch.steps else ""
    loss = f"{epoch.mean_loss:.4g}" if epoch.HasField("mean_loss") else ""
    return (str(epoch.number), begun, format_duration(active_s), str(epoch.steps), step, loss)


def _draw(found: dict[str, Series], metrics: Sequence[str], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommandError(_NO_MATPLOTLIB) from error
    figure = Figure(figsize=(8.0, 1.0 + 3.0 * max(1, len(metrics))), layout="constrained")
    for name, axes in zip(
        metrics, figure.subplots(max(1, len(metrics)), sharex=True, squeeze=False)[:, 0], strict=False
    ):
        for job, series in found.items():
            for metric in series.metrics:
                if metric.name == name:
                    axes.plot(metric.steps, metric.values, label=f"job {number(job)}")
        axes.set(xlabel="step", ylabel=name)
        axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from error
    print(f"wrote {path}")


# -- export

_EPOCH_COLUMNS = ("job", "epoch", "begin_unix_s", "end_unix_s", "first_step", "steps", "active_s", "mean_loss")


@click.command()
@chooses_jobs(has_all=False)
@click.option("--format", "form", type=click.Choice(("csv", "tensorboard")), default="csv", show_default=True)
@click.option("--epochs", is_flag=True, help="As CSV: a line for each epoch in place of one for each value.")
@click.option("--output", "-o", type=click.Path(), help="File, for tensorboard directory; CSV else goes to stdout.")
def export(selection: Selection, form: str, epochs: bool, output: str | None) -> int | None:
    """Write what jobs have logged as CSV, or as event files for TensorBoard, a directory for each job."""
    if form == "tensorboard" and (epochs or output is None):
        raise click.UsageError("--epochs is for CSV" if epochs else "--format tensorboard needs --output DIRECTORY")
    found = _found(selection)
    try:
        if form == "tensorboard":
            assert output is not None, "checked above"
            for job, series in found.items():
                print(f"wrote {write_events(Path(output) / number(job), series)}")
            return None
        rows = [_EPOCH_COLUMNS, *_epoch_cells(found)] if epochs else [_VALUE_COLUMNS, *_value_cells(found)]
        if output is None:
            csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
            return None
        with open(output, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        print(f"wrote {output}")
    except OSError as error:
        raise CommandError(f"{error.filename or output}: {error.strerror or error}") from error
    return None


_VALUE_COLUMNS = ("job", "metric", "step", "unix_s", "value")


def _value_cells(found: dict[str, Series]) -> Iterator[tuple[Any, ...]]:
    for job, series in found.items():
        for metric in series.metrics:
            for step, unix_s, value in zip(metric.steps, metric.times, metric.values, strict=False):
                yield number(job), metric.name, step, f"{unix_s:.3f}", repr(value)


def _epoch_cells(found: dict[str, Series]) -> Iterator[tuple[Any, ...]]:
    from ganger.wire import times

    for job, series in found.items():
        for one in series.epochs:
            ends = (f"{times.unix_s(instant):.3f}" for instant in (one.begin_time, one.end_time))
            active_s = f"{times.seconds(one.active_duration):.3f}"
            loss = repr(one.mean_loss) if one.HasField("mean_loss") else ""
            yield number(job), one.number, *ends, one.first_step, one.steps, active_s, loss


def write_events(directory: Path, series: Series) -> Path:
    """Write an event file of TensorBoard into a directory, which is made, and return its path. Raises OSError.

    Each record of TFRecord (length, its CRC, data, its CRC) has one Event of tensorflow/core/util/event.proto. No
    library writes them alone: TensorBoard's own writer comes with all of TensorBoard.
    """
    points = sorted(
        (unix_s, step, metric.name, value)
        for metric in series.metrics
        for step, unix_s, value in zip(metric.steps, metric.times, metric.values, strict=False)
    )
    begun = points[0][0] if points else 0.0
    directory.mkdir(parents=True, exist_ok=True)
    # TensorBoard takes a file for one of events by this part of its name; the same export replaces itself.
    path = directory / f"events.out.tfevents.{int(begun):010d}.ganger"
    with open(path, "wb") as file:
        file.write(_record(_event(begun, 0, _field(3, b"brain.Event:2"))))
        for unix_s, step, name, value in points:
            scalar = _field(1, name.encode()) + b"\x15" + struct.pack("<f", _float32(value))
            file.write(_record(_event(unix_s, step, _field(5, _field(1, scalar)))))
    return path


def _float32(value: float) -> float:
    try:
        struct.pack("<f", value)
    except OverflowError:
        return math.copysign(math.inf, value)
    return value


def _event(unix_s: float, step: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", unix_s) + b"\x10" + _varint(step) + content


def _field(tag: int, content: bytes) -> bytes:
    return bytes([tag << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data))


def _crc_table() -> list[int]:
    # CRC-32C, polynomial 0x1EDC6F41, reflected.
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)
        table.append(entry)
    return table


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
