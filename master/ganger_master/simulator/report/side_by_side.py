"""Policies side by side at one load: one row for each figure, one column for each policy.

Runs that differ only in their seed give a mean and its confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ganger.units import format_duration

from ganger_master.simulator.report.figures import Figures
from ganger_master.simulator.report.tables import Table


@dataclass(frozen=True)
class Interval:
    """The mean of `runs` values lies within `half_width` of the true mean with the confidence asked for."""

    mean: float
    half_width: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if math.isnan(self.half_width) else f"{self.mean:.4g} ± {self.half_width:.2g}"


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's t over independent values; of one value the width is NaN. ValueError of none, or of NaN."""
    if not len(values) or any(math.isnan(value) for value in values):
        raise ValueError("an interval needs values that are known")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Interval(mean, math.nan, 1)
    # Loading it takes longer than a short simulation.
    from scipy.special import stdtrit

    factor = float(stdtrit(len(values) - 1, (1.0 + confidence) / 2.0))
    return Interval(mean, factor * float(np.std(values, ddof=1)) / math.sqrt(len(values)), len(values))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> Interval:
    """How many times ours is theirs, seed by seed: the interval of the ratios, since runs of one seed share their jobs
    and vary together. ValueError for different numbers of runs, or theirs not above zero."""
    if len(ours) != len(theirs) or any(not value > 0 for value in theirs):
        raise ValueError("ratios need two runs of each seed, the second above zero")
    return interval([one / other for one, other in zip(ours, theirs, strict=True)], confidence)


_UNKNOWN = "-"


@dataclass(frozen=True)
class _Row:
    name: str
    figure: str
    shown: Callable[[float], str]
    # Relative to the policy with the smallest mean.
    by_best: bool = False


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def _number(value: float) -> str:
    return f"{value:.2f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


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
# Said only where there is something to say.
_UNLESS_ZERO = {"unfinished", "deadline_hits", "deadlines", "migrations", "resizes"}


def side_by_side(runs: Mapping[str, Sequence[Figures]]) -> Table:
    """(headings, rows) of runs by policy, one for each seed, the seeds in the same order everywhere. With several
    seeds each cell is a mean and the half-width of its 95 % confidence interval."""
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
    """Each policy's seconds, seed by seed, over those of the policy with the least mean; None where they are not all
    known and its are not all more than nothing."""
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
    """For each policy its figures as {mean, half_width, runs}, null where not known, and `avg_jct_by_best` and
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
