"""Runs as pictures: distribution of JCT, waiting by size of gang, what was in use over time, when each job ran.

Drawn by Matplotlib, which is an optional extra (`ganger[plots]`) and imported only here, when something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ganger_master.simulator.report.figures import by_gang_size
from ganger_master.simulator.report.outcomes import Run
from ganger_master.simulator.traces.statistics import size_names

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
    """Draws the runs side by side into PNG files in an existing directory and returns their paths.

    Distribution of JCT, waiting by gang size and use over time show all runs; there is one timeline for each. Raises
    PlotsUnavailable without Matplotlib, OSError where files cannot be written.
    """
    figure_class = _figure_class()
    pictures: list[tuple[str, Callable[[Any], None]]] = [
        ("jct_cdf", lambda figure: _jct_cdf(figure, runs)),
        ("waiting_by_gang_size", lambda figure: _waiting_by_size(figure, runs)),
        ("use_over_time", lambda figure: _use_over_time(figure, runs)),
    ]
    for number, run in enumerate(runs):
        name = f"timeline_{_file_name(run.policy)}" if len(runs) > 1 else "timeline"
        if any(name == other for other, _ in pictures):
            name = f"{name}_{number}"
        pictures.append((name, lambda figure, run=run: _timeline(figure, run)))  # type: ignore[misc]
    paths = []
    for name, draw in pictures:
        figure = figure_class(figsize=_TALL if name == "use_over_time" else _WIDE, layout="constrained")
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


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsUnavailable("plots need Matplotlib: pip install 'ganger[plots]'") from error
    return Figure


def _title(runs: Sequence[Run]) -> str:
    loads = sorted({f"{run.offered_load:.2f}" for run in runs if not np.isnan(run.offered_load)})
    return f"offered load {', '.join(loads)}" if loads else ""


def _file_name(policy: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in policy) or "run"
