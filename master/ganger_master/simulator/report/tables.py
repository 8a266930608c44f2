"""The figures of a run as tables for people: in full, and waiting by size of gang."""

from __future__ import annotations

import math
from collections.abc import Callable

from ganger.units import format_duration, format_memory

from ganger_master.simulator.report.figures import Figures

Table = tuple[list[str], list[list[str]]]

_UNKNOWN = "-"


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
        ("other sizes", f"{run.resizes:,}" if run.resizes else _UNKNOWN),
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
