"""Runs as files: figures, jobs and use over time as CSV, pictures as PNG.

A directory that cannot be written is found before anything is simulated, and a file that cannot be finished is taken
away again.
"""

from __future__ import annotations

import csv
import errno
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from ganger_master.simulator.report.documents import write_jobs, write_series
from ganger_master.simulator.report.figures import Figures, SizeFigures
from ganger_master.simulator.report.outcomes import Run
from ganger_master.simulator.report.plots import PlotsUnavailable


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
