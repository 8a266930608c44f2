"""Figures as tables for people: several policies side by side, one policy in full, waiting by size of gang."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ganger.units import format_duration, format_memory

from ganger_master.sim.report.figures import Figures

Table = tuple[list[str], list[list[str]]]

_UNKNOWN = "-"


def comparison(runs: Sequence[Figures]) -> Table:
    """(headings, rows): one row for each policy, in the order given; JCT and waiting also against the best of them.
    The offered load stands beside them: no ratio means anything without it."""
    best_jct = _least([run.avg_jct_s for run in runs])
    best_waiting = _least([run.p95_waiting_s for run in runs])
    columns: list[tuple[str, Callable[[Figures], str]]] = [
        ("policy", lambda run: run.policy),
        ("load", lambda run: _number(run.offered_load)),
        ("jobs", lambda run: f"{run.jobs:,}" + (f" ({run.unfinished:,} unfinished)" if run.unfinished else "")),
        ("avg JCT", lambda run: _duration(run.avg_jct_s)),
        ("x best", lambda run: _number(_over(run.avg_jct_s, best_jct))),
        ("median", lambda run: _duration(run.median_jct_s)),
        ("p95", lambda run: _duration(run.p95_jct_s)),
        ("p99", lambda run: _duration(run.p99_jct_s)),
        ("makespan", lambda run: _duration(run.makespan_s)),
        ("first start", lambda run: _duration(run.avg_start_delay_s)),
        ("p95 waiting", lambda run: _duration(run.p95_waiting_s)),
        ("x best", lambda run: _number(_over(run.p95_waiting_s, best_waiting))),
        ("GPUs", lambda run: _share(run.gpu_utilization)),
        ("cores", lambda run: _share(run.core_utilization)),
        ("fragm.", lambda run: _share(run.fragmentation)),
        ("max rho", lambda run: _number(run.max_rho)),
        ("deadlines", lambda run: f"{run.deadline_hits:,}/{run.deadlines:,}" if run.deadlines else _UNKNOWN),
        ("preempt.", lambda run: f"{run.preemptions:,}"),
        ("moves", lambda run: f"{run.migrations:,}"),
        ("overhead", lambda run: _share(run.overhead_share)),
        ("wall", lambda run: _duration(run.wall_s)),
    ]
    # A column nobody has anything to say in only takes room.
    shown = [
        (name, cells)
        for name, cells in ((name, [cell(run) for run in runs]) for name, cell in columns)
        if any(cell != _UNKNOWN for cell in cells)
    ]
    return [name for name, _ in shown], [list(row) for row in zip(*(cells for _, cells in shown), strict=True)]


def details(run: Figures) -> list[tuple[str, str]]:
    """Names and values of one run; what is not known is left out."""
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
        ("overhead", _share(run.overhead_share)),
        ("simulated in", _list(_duration, run.wall_s)),
        ("events", f"{run.events:,}" + (f", {run.events_per_s:,.0f}/s" if run.events_per_s > 0 else "")),
        ("peak memory", format_memory(run.peak_memory_bytes) if run.peak_memory_bytes else _UNKNOWN),
    ]
    return [(name, value) for name, value in pairs if value != _UNKNOWN]


def waiting_by_size(run: Figures) -> Table:
    """(headings, rows): how long gangs of each size waited."""
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


def _least(values: Sequence[float]) -> float:
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def _over(value: float, best: float) -> float:
    return value / best if best > 0 else math.nan
