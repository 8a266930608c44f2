"""Runs as tables: figures in full, policies side by side, waiting by size of gang.

Runs that differ only in their seed give a mean and its confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ganger.units import format_duration, format_memory

from ganger_master.simulator.report.figures import Figures, Interval, interval, paired_ratio

Table = tuple[list[str], list[list[str]]]

_UNKNOWN = "-"


def details(run: Figures) -> list[tuple[str, str]]:
    """Return the names and values of one run; what is not known is left out."""
    pairs = [
        ("policy", f"{run.policy}, seed {run.seed}"),
        ("offered load", _number(run.offered_load)),
        ("jobs", f"{run.jobs:,}" + (f", {run.unfinished:,} unfinished" if run.unfinished else "")),
        ("average JCT", _duration(run.avg_jct_s)),
        ("median, p95, p99 JCT", _list(_duration, run.median_jct_s, run.p95_jct_s, run.p99_jct_s)),
        ("makespan", _duration(run.makespan_s)),
        ("first start, p95", _list(_duration, run.avg_start_delay_s, run.p95_start_delay_s)),
        ("waiting, p95", _list(_duration, run.avg_waiting_s, run.p95_waiting_s)),
        ("GPUs in use", _share(run.gpu_utilization)),
        ("cores in use", _share(run.core_utilization)),
        ("free GPUs no gang can use", _list(_share, run.fragmentation)),
        ("fairness rho, p95, max", _list(_number, run.avg_rho, run.p95_rho, run.max_rho)),
        ("jobs worse off than alone", _share(run.share_rho_above_1)),
        ("deadlines met", f"{run.deadline_hits:,} of {run.deadlines:,}" if run.deadlines else _UNKNOWN),
        ("preemptions, moves", f"{run.preemptions:,}, {run.migrations:,}"),
        ("other sizes", f"{run.resizes:,}" if run.resizes else _UNKNOWN),
        ("overhead", _share(run.overhead_share)),
        ("simulated in", _list(_duration, run.wall_s)),
        ("events", f"{run.events:,}" + (f", {run.events_per_s:,.0f}/s" if run.events_per_s > 0 else "")),
        ("peak memory", format_memory(run.peak_memory_bytes) if run.peak_memory_bytes else _UNKNOWN),
    ]
    return [(name, value) for name, value in pairs if value != _UNKNOWN]


def waiting_by_size(run: Figures) -> Table:
    """Return (headings, rows): how long gangs of each size waited."""
    rows = [
        [
            name,
            f"{size.jobs:,}",
            _duration(size.mean_start_delay_s),
            _duration(size.p95_start_delay_s),
            _duration(size.mean_waiting_s),
            _duration(size.p95_waiting_s),
        ]
        for name, size in run.by_gang_size.items()
    ]
    return ["GPUs", "jobs", "first start", "p95", "waiting", "p95"], rows


def _duration(seconds: float) -> str:
    return _UNKNOWN if math.isnan(seconds) else format_duration(seconds)


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else _UNKNOWN


def _share(value: float) -> str:
    return _UNKNOWN if math.isnan(value) else f"{value:.1%}"


def _list(cell: Callable[[float], str], *values: float) -> str:
    return _UNKNOWN if all(map(math.isnan, values)) else ", ".join(map(cell, values))


@dataclass(frozen=True)
class _Row:
    name: str
    figure: str
    shown: Callable[[float], str]
    # Relative to the policy with the smallest mean.
    by_best: bool = False


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


_ROWS = (
    _Row("jobs", "jobs", _count),
    _Row("unfinished", "unfinished", _count),
    _Row("offered load", "offered_load", _number),
    _Row("average JCT", "avg_jct_s", format_duration, by_best=True),
    _Row("median JCT", "median_jct_s", format_duration),
    _Row("p95 JCT", "p95_jct_s", format_duration),
    _Row("p99 JCT", "p99_jct_s", format_duration),
    _Row("makespan", "makespan_s", format_duration),
    _Row("first start", "avg_start_delay_s", format_duration),
    _Row("waiting", "avg_waiting_s", format_duration),
    _Row("p95 waiting", "p95_waiting_s", format_duration, by_best=True),
    _Row("GPUs in use", "gpu_utilization", _share),
    _Row("cores in use", "core_utilization", _share),
    _Row("free GPUs no gang can use", "fragmentation", _share),
    _Row("fairness rho", "avg_rho", _number),
    _Row("p95 rho", "p95_rho", _number),
    _Row("max rho", "max_rho", _number),
    _Row("jobs worse off than alone", "share_rho_above_1", _share),
    _Row("deadlines met", "deadline_hits", _count),
    _Row("deadlines", "deadlines", _count),
    _Row("preemptions", "preemptions", _count),
    _Row("moves", "migrations", _count),
    _Row("other sizes", "resizes", _count),
    _Row("overhead", "overhead_share", _share),
    _Row("simulated in", "wall_s", format_duration),
)
# Shown only where a run has a value above zero.
_UNLESS_ZERO = {"unfinished", "deadline_hits", "deadlines", "migrations", "resizes"}


def side_by_side(runs: Mapping[str, Sequence[Figures]]) -> Table:
    """Return (headings, rows) of runs by policy, one for each seed, the seeds in the same order everywhere. With
    several seeds each cell is a mean and the half-width of its 95 % confidence interval."""
    shown = []
    for row in _ROWS:
        values = {policy: [float(getattr(run, row.figure)) for run in of_policy] for policy, of_policy in runs.items()}
        if row.figure in _UNLESS_ZERO and not any(any(of_policy) for of_policy in values.values()):
            continue
        cells = [_cell(of_policy, row.shown) for of_policy in values.values()]
        # No ratio means anything without the load it was found at.
        if all(cell == _UNKNOWN for cell in cells) and row.figure != "offered_load":
            continue
        shown.append([row.name, *cells])
        if row.by_best:
            ratios = by_best(values)
            shown.append(["  x best", *(_said(ratios[policy], _number) for policy in runs)])
    return ["", *runs], shown


# The clock of a simulation begins at a million seconds: what its steps leave of no wait at all is far below this.
_NOTHING_S = 1e-3


def by_best(values: Mapping[str, Sequence[float]]) -> dict[str, Interval | None]:
    """Return each policy's seconds, seed by seed, over those of the policy with the least mean; None where they are not
    all known and its are not all more than nothing."""
    known = {
        policy: of_policy for policy, of_policy in values.items() if of_policy and not any(map(math.isnan, of_policy))
    }
    if not known:
        return dict.fromkeys(values)
    # Of equal means the first.
    best = min(known.values(), key=lambda of_policy: sum(of_policy) / len(of_policy))
    if not all(value > _NOTHING_S for value in best):
        return dict.fromkeys(values)
    return {policy: paired_ratio(known[policy], best) if policy in known else None for policy in values}


def as_json(runs: Mapping[str, Sequence[Figures]]) -> dict[str, Any]:
    """Return for each policy its figures as {mean, half_width, runs}, null where unknown, with `avg_jct_by_best` and
    `p95_waiting_by_best`."""
    found: dict[str, dict[str, Any]] = {policy: {} for policy in runs}
    for row in _ROWS:
        values = {policy: [float(getattr(run, row.figure)) for run in of_policy] for policy, of_policy in runs.items()}
        for policy, of_policy in values.items():
            found[policy][row.figure] = _document(_interval(of_policy))
        if row.by_best:
            for policy, ratio in by_best(values).items():
                found[policy][f"{row.figure.removesuffix('_s')}_by_best"] = _document(ratio)
    return found


def _interval(values: Sequence[float]) -> Interval | None:
    return interval(values) if values and all(map(math.isfinite, values)) else None


def _cell(values: Sequence[float], shown: Callable[[float], str]) -> str:
    return _said(_interval(values), shown)


def _said(value: Interval | None, shown: Callable[[float], str]) -> str:
    if value is None:
        return _UNKNOWN
    if math.isnan(value.half_width):
        return shown(value.mean)
    return f"{shown(value.mean)} ±{shown(value.half_width)}"


def _document(value: Interval | None) -> dict[str, float | int | None] | None:
    if value is None:
        return None
    width = None if math.isnan(value.half_width) else value.half_width
    return {"mean": value.mean, "half_width": width, "runs": value.runs}


def unbounded_load_row(figures: Figures) -> list[tuple[str, str]]:
    """Return the row of the offered load for a run whose load is infinite, which the figures leave out."""
    if math.isfinite(figures.offered_load):
        return []
    return [("offered load", "all jobs are submitted at once")]
