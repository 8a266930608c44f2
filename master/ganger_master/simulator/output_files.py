"""Runs as files: figures as JSON, jobs and use over time as CSV, plots as PNG.

A directory that cannot be written is refused before anything is simulated. A file that cannot be finished is removed.
"""

from __future__ import annotations

import csv
import errno
import importlib.util
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ganger_master.simulator.report.figures import Figures, SizeFigures
from ganger_master.simulator.report.outcomes import Outcomes, Run
from ganger_master.simulator.report.plots import PlotsUnavailable
from ganger_master.simulator.report.series import StepSeries

_JOBS_AT_ONCE = 16_384


def as_json(figures: Figures) -> dict[str, Any]:
    """The figures by name, ready for `json.dumps`; what is not known is null, never NaN, which is no JSON."""
    return {name: _plain(value) for name, value in asdict(figures).items()}


def write_jobs(jobs: Outcomes, file: TextIO) -> None:
    """One row for each job, in order of submission; unknown times are blank. Opens nothing: `file` should have been
    opened with newline=""."""
    columns = {
        "submit_time_s": jobs.submit_s,
        "gpus": jobs.gpus,
        "duration_s": jobs.duration_s,
        "first_start_s": jobs.first_start_s,
        "end_s": jobs.end_s,
        "jct_s": jobs.jct_s,
        "start_delay_s": jobs.start_delay_s,
        "waiting_s": jobs.waiting_s,
        "service_s": jobs.service_s,
        "overhead_s": jobs.overhead_s,
        "gpu_seconds": jobs.gpu_seconds,
        "core_seconds": jobs.core_seconds,
        "preemptions": jobs.preemptions,
        "migrations": jobs.migrations,
        "resizes": jobs.resizes,
        "deadline_s": jobs.deadline_s,
    }
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["job_id", *columns])
    for first in range(0, len(jobs), _JOBS_AT_ONCE):
        part = slice(first, first + _JOBS_AT_ONCE)
        texts = [map(_rounded_cell, column[part].tolist()) for column in columns.values()]
        writer.writerows(zip(jobs.job_ids[part], *texts, strict=True))


def write_series(series: dict[str, StepSeries], file: TextIO) -> None:
    """Every step of every series: name, from when, value; and the end of each with a blank value."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["series", "time_s", "value"])
    for name, steps in series.items():
        writer.writerows(
            (name, _rounded_cell(when), _rounded_cell(value))
            for when, value in zip(steps.times.tolist(), steps.values.tolist(), strict=True)
        )
        writer.writerow((name, _rounded_cell(steps.end), ""))


def _rounded_cell(value: float) -> str:
    """Milliseconds are enough, and whole numbers stay short."""
    if isinstance(value, int):
        return str(value)
    return "" if math.isnan(value) else f"{value:.3f}".rstrip("0").rstrip(".")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def made_ready(directory: Path) -> None:
    """Makes the directory and sees whether files can be written there. OSError, with its name."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory)) from error
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise named(error, directory) from error


def check_plots() -> None:
    """PlotsUnavailable without Matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotsUnavailable("plots need Matplotlib: pip install 'ganger[plots]'")


def save_run(run: Run, directory: Path) -> list[Path]:
    """jobs.csv, a row a job, and series.csv, the use over time, in an existing directory; their paths."""
    return [
        _written(directory / "jobs.csv", lambda file: write_jobs(run.outcomes, file)),
        _written(directory / "series.csv", lambda file: write_series(dict(run.series), file)),
    ]


def save_figures(runs: Sequence[tuple[str, Figures]], directory: Path) -> list[Path]:
    """figures.csv, a row for each run and its load as asked for, and waiting.csv, a row for each of its sizes of gangs;
    their paths."""
    return [
        _written(directory / "figures.csv", lambda file: _write_figures(runs, file)),
        _written(directory / "waiting.csv", lambda file: _write_waiting(runs, file)),
    ]


def _write_figures(runs: Sequence[tuple[str, Figures]], file: TextIO) -> None:
    names = [column.name for column in fields(Figures) if column.name != "by_gang_size"]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["load", *names])
    for load, figures in runs:
        writer.writerow([load, *(_cell(getattr(figures, name)) for name in names)])


def _write_waiting(runs: Sequence[tuple[str, Figures]], file: TextIO) -> None:
    names = [column.name for column in fields(SizeFigures)]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["policy", "load", "seed", "gpus", *names])
    for load, figures in runs:
        for size, waiting in figures.by_gang_size.items():
            values = asdict(waiting)
            writer.writerow([figures.policy, load, figures.seed, size, *(_cell(values[name]) for name in names)])


def _written(path: Path, write: Callable[[TextIO], None]) -> Path:
    file = path.open("w", newline="", encoding="utf-8")
    try:
        with file:
            write(file)
    except OSError as error:
        # Half a file looks like a whole one.
        path.unlink(missing_ok=True)
        raise named(error, path) from error
    return path


def named(error: OSError, path: Path) -> OSError:
    """The same error with the file it is about: what fails while writing does not say."""
    return type(error)(error.errno, os.strerror(error.errno or 0), str(path))


def _cell(value: Any) -> Any:
    """Blank where not known."""
    return "" if isinstance(value, float) and value != value else value
