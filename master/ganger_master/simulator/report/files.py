"""Runs as files: figures as JSON, jobs and use over time as CSV, plots as PNG.

A directory that cannot be written is rejected before anything is simulated. A file that cannot be finished is removed.
Matplotlib is an optional extra (`ganger[plots]`) and imported only when something is drawn.
"""

from __future__ import annotations

import csv
import errno
import importlib.util
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from ganger_master.simulator.inputs import Load, Material, ReplayOptions, about, load_asked
from ganger_master.simulator.report.figures import Figures, SizeFigures, by_gang_size, comparison
from ganger_master.simulator.report.outcomes import Outcomes, Run, StepSeries
from ganger_master.simulator.traces.workload import size_names

_NO_PLOTS = "plots need Matplotlib: pip install 'ganger[plots]'"
_HOUR = 3600.0
# More bars are a grey block; the timeline shows every n-th job then, and says so.
_MOST_BARS = 2_000
_MOST_CURVE_POINTS = 2_000
_RESOLUTION_DPI = 120
# Inches. One below the other four pictures need height.
_WIDE, _TALL = (8.0, 5.0), (8.0, 8.0)


class PlotsUnavailable(RuntimeError):  # noqa: N818 - a state of the installation, not of the data
    """Matplotlib is not installed; the message says how to get it."""


def save_plots(runs: Sequence[Run], directory: Path) -> list[Path]:
    """Draw the runs side by side into PNG files in a directory and return their paths.

    Distribution of JCT, waiting by gang size and use over time show all runs; there is one timeline for each. Raises
    PlotsUnavailable without Matplotlib, OSError where files cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsUnavailable(_NO_PLOTS) from error
    directory.mkdir(parents=True, exist_ok=True)
    pictures: list[tuple[str, Callable[[Any], None]]] = [
        ("jct_cdf", lambda figure: _jct_cdf(figure, runs)),
        ("waiting_by_gang_size", lambda figure: _waiting_by_size(figure, runs)),
        ("use_over_time", lambda figure: _use_over_time(figure, runs)),
    ]
    for number, run in enumerate(runs):
        policy = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in run.policy)
        name = f"timeline_{policy}" if len(runs) > 1 else "timeline"
        if any(name == other for other, _ in pictures):
            name = f"{name}_{number}"
        pictures.append((name, lambda figure, run=run: _timeline(figure, run)))  # type: ignore[misc]
    paths = []
    for name, draw in pictures:
        figure = Figure(figsize=_TALL if name == "use_over_time" else _WIDE, layout="constrained")
        draw(figure)
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=_RESOLUTION_DPI)
        paths.append(path)
    return paths


def cumulative(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[list[float], list[float]]:
    """(values ascending, share of values not above each): an empirical distribution, of few enough points to draw."""
    ordered = np.sort(values)
    shares = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    keep = np.unique(np.linspace(0, max(len(ordered) - 1, 0), min(len(ordered), _MOST_CURVE_POINTS)).astype(int))
    return ordered[keep].tolist(), shares[keep].tolist()


def _jct_cdf(figure: Any, runs: Sequence[Run]) -> None:
    axes = figure.add_subplot()
    for run in runs:
        jct = run.outcomes.jct_s[run.outcomes.finished]
        hours, shares = cumulative(jct / _HOUR)
        axes.step(hours, shares, where="post", label=run.policy)
    axes.set(xscale="log", ylim=(0, 1), xlabel="job completion time (h)", ylabel="share of jobs", title=_title(runs))
    axes.grid(alpha=0.3)
    axes.legend()


def _waiting_by_size(figure: Any, runs: Sequence[Run]) -> None:
    names = size_names(np.unique(np.concatenate([run.outcomes.gpus for run in runs])))
    above, below = figure.subplots(2, sharex=True)
    width = 0.8 / len(runs)
    for number, run in enumerate(runs):
        found = by_gang_size(run.outcomes)
        places = np.arange(len(names)) + (number - (len(runs) - 1) / 2) * width
        delays = [found[name].mean_start_delay_s / _HOUR if name in found else np.nan for name in names]
        waiting = [found[name].mean_waiting_s / _HOUR if name in found else np.nan for name in names]
        above.bar(places, delays, width, label=run.policy)
        below.bar(places, waiting, width)
    above.set(ylabel="mean time until first start (h)", title=_title(runs))
    below.set(ylabel="mean waiting in all (h)", xlabel="GPUs of the gang")
    below.set_xticks(np.arange(len(names)), names)
    figure.legend(loc="outside right upper")


def _use_over_time(figure: Any, runs: Sequence[Run]) -> None:
    shown = [
        (name, label, scale)
        for name, label, scale in (
            ("used_gpus", "GPUs in use (%)", lambda run: 100.0 / run.gpus),
            ("used_cores", "cores in use (%)", lambda run: 100.0 / run.cores),
            ("fragmented_gpus", "free GPUs that no gang can use (% of all)", lambda run: 100.0 / run.gpus),
            ("waiting_jobs", "jobs waiting", lambda run: 1.0),
        )
        if any(name in run.series for run in runs)
    ]
    for axes, (name, label, scale) in zip(
        np.atleast_1d(figure.subplots(max(len(shown), 1), sharex=True)), shown, strict=False
    ):
        for run in runs:
            if name in run.series:
                series = run.series[name].thinned(_MOST_CURVE_POINTS)
                hours = np.append(series.times, series.end) / _HOUR
                values = np.append(series.values, series.values[-1]) * scale(run)
                axes.step(hours, values, where="post", label=run.policy, linewidth=0.8)
        # Above, not beside: there is room for words.
        axes.set_title(label, loc="left", fontsize="medium")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    every = figure.axes
    every[-1].set_xlabel("hours on the clock of the trace")
    figure.suptitle(_title(runs))
    if shown:
        figure.legend(*every[0].get_legend_handles_labels(), loc="outside right upper")


def _timeline(figure: Any, run: Run) -> None:
    jobs = run.outcomes
    step = -(-len(jobs) // _MOST_BARS) or 1
    rows = np.arange(0, len(jobs), step)
    submit = jobs.submit_s[rows] / _HOUR
    end = np.where(jobs.finished, jobs.end_s, run.end_s)[rows] / _HOUR
    start = np.where(np.isnan(jobs.first_start_s[rows]), end * _HOUR, jobs.first_start_s[rows]) / _HOUR
    axes = figure.add_subplot()
    axes.hlines(rows, submit, start, color="lightgrey", linewidth=0.6, label="waiting for the first start")
    axes.hlines(rows, start, end, color="tab:blue", linewidth=0.6, label="from first start to end")
    of = f"every {step}th job" if step > 1 else "every job"
    axes.set(xlabel="hours on the clock of the trace", ylabel="jobs by submission", title=f"{run.policy}: {of}")
    axes.invert_yaxis()
    for line in axes.legend(loc="lower left").legend_handles:
        # As thin as those of the picture they could not be told from each other.
        line.set_linewidth(3)


def _title(runs: Sequence[Run]) -> str:
    loads = sorted({f"{run.offered_load:.2f}" for run in runs if not np.isnan(run.offered_load)})
    return f"offered load {', '.join(loads)}" if loads else ""


_JOBS_AT_ONCE = 16_384


def as_json(figures: Figures) -> dict[str, Any]:
    """The figures by name, ready for `json.dumps`; what is not known is null, never NaN, which is no JSON."""
    return {name: _plain(value) for name, value in asdict(figures).items()}


def simulated(source: Material, load: Load, options: ReplayOptions, figures: Figures) -> dict[str, Any]:
    """Return one run for JSON: figures by name, trace, cluster, options and load."""
    return as_json(figures) | about(source, options) | {"load": load_asked(load)}


def compared(
    source: Material, options: ReplayOptions, groups: Sequence[tuple[Load, Mapping[str, Sequence[Figures]]]]
) -> dict[str, Any]:
    """Return a comparison for JSON: every run, and the policies side by side at each load."""
    return about(source, options) | {
        "loads": [
            {
                "load": load_asked(load),
                "policies": comparison(runs),
                "runs": [as_json(run) for of_policy in runs.values() for run in of_policy],
            }
            for load, runs in groups
        ]
    }


def job_rows(jobs: Outcomes) -> Iterator[Sequence[str]]:
    """Yield the headings, then a row for each job, in order of submission; unknown times are blank."""
    # A gang and how long it needs, what became of it, and by when it should have ended.
    names = (
        *("submit_s", "gpus", "duration_s", "first_start_s", "end_s", "jct_s", "start_delay_s", "waiting_s"),
        *("service_s", "overhead_s", "gpu_seconds", "core_seconds", "preemptions", "migrations", "resizes"),
        "deadline_s",
    )
    yield ["job_id", *("submit_time_s" if name == "submit_s" else name for name in names)]
    columns = [getattr(jobs, name) for name in names]
    for first in range(0, len(jobs), _JOBS_AT_ONCE):
        part = slice(first, first + _JOBS_AT_ONCE)
        texts = [map(_rounded_cell, column[part].tolist()) for column in columns]
        yield from zip(jobs.job_ids[part], *texts, strict=True)


def series_rows(series: Mapping[str, StepSeries]) -> Iterator[Sequence[str]]:
    """Yield the headings, then every step of every series: name, from when, value; the end of each with no value."""
    yield "series", "time_s", "value"
    for name, steps in series.items():
        for when, value in zip(steps.times.tolist(), steps.values.tolist(), strict=True):
            yield name, _rounded_cell(when), _rounded_cell(value)
        yield name, _rounded_cell(steps.end), ""


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
        raise PlotsUnavailable(_NO_PLOTS)


def save_run(run: Run, directory: Path) -> None:
    """Write jobs.csv, a row a job, and series.csv, the use over time."""
    directory.mkdir(parents=True, exist_ok=True)
    _save(directory / "jobs.csv", job_rows(run.outcomes))
    _save(directory / "series.csv", series_rows(run.series))


def save_figures(runs: Sequence[tuple[str, Figures]], directory: Path) -> None:
    """Write figures.csv, a row for each run and requested load, and waiting.csv, a row for each of its gang sizes."""
    names = [column.name for column in fields(Figures) if column.name != "by_gang_size"]
    rows = [[load, *(_cell(getattr(figures, name)) for name in names)] for load, figures in runs]
    _save(directory / "figures.csv", [["load", *names], *rows])
    names = [column.name for column in fields(SizeFigures)]
    rows = [
        [figures.policy, load, figures.seed, size, *(_cell(getattr(waiting, name)) for name in names)]
        for load, figures in runs
        for size, waiting in figures.by_gang_size.items()
    ]
    _save(directory / "waiting.csv", [["policy", "load", "seed", "gpus", *names], *rows])


def _save(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    file = path.open("w", newline="", encoding="utf-8")
    try:
        with file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    except OSError as error:
        # Half a file looks like a whole one.
        path.unlink(missing_ok=True)
        raise named(error, path) from error


def named(error: OSError, path: Path) -> OSError:
    """The same error with the file it is about: what fails while writing does not say."""
    return type(error)(error.errno, os.strerror(error.errno or 0), str(path))


def _cell(value: Any) -> Any:
    return "" if isinstance(value, float) and value != value else value
