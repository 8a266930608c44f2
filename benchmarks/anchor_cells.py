"""How `ganger` compares with the policies of the papers on real traces: what is run, and how a cell of it is judged.

A cell is a trace at an offered load. Of the jobs with recorded run times one after another are taken, a thousand at a
time: drawn at random they would not stand beside the jobs they were submitted with. The cluster has eight servers of 8
GPUs, or more, so that the largest gang takes half of it. Times between submissions are scaled to the load. Jobs ask for
GPUs of any type and a part of a server in proportion, and all have one priority: the cores, types and priorities of
another cluster mean nothing here. Every job runs to its end, every job counts from the first on, and no policy knows
anything of the time before: there is no warm-up. Costs of switching and the interval of plans are the
simulator's, for every policy.

Not among the anchors is `edf`: where these traces have deadlines they were made from the recorded run times, so
a policy that uses them knows durations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from ganger_master.policies.orders import SLACK_S
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.run import simulate
from ganger_master.simulator.traces.reader import read_trace
from ganger_master.simulator.traces.servers import Servers, servers_from_flags
from ganger_master.simulator.traces.workload import Workload, percentile, scaled_to_load, workload

# Recorded on real clusters, or (muri, chronus) drawn from such records by others.
TRACES: Final = (
    "philly_2017-09-04_2017-10-15",
    "itp_cluster05",
    "helios_venus_2020-04_05",
    "pai2020_days00-31",
    "itp_cluster08",
    "muri_trace1",
    "itp_cluster07",
    "helios_venus_2020-09",
    "itp_cluster01",
    "philly_2017-11-01_2017-11-15",
    "openb2023_days000-132",
    "helios_venus_2vc_2020-09_status",
    "itp_cluster03",
    "muri_trace3",
    "muri_testbed400",
    "dlrm2025_even_apps",
    "chronus_philly_mix1",
)
LOADS: Final = (1.0, 1.3, 0.7)
OURS: Final = "ganger"
ANCHORS: Final = ("las2d", "las", "ftf", "tiresias-gittins", "fifo-backfill", "drf", "fifo")
ORACLES: Final = ("srtf", "srsf")
JOBS: Final = 1_000
_SERVERS: Final = 8
_PER_SERVER: Final = 8


@dataclass(frozen=True, slots=True)
class AnchorRow:
    """One run. Seconds; `waiting` is all time from submission to end without a gang."""

    trace: str
    load: float
    window: int
    policy: str
    jobs: int
    gpus: int
    avg_jct_s: float
    p95_waiting_s: float
    avg_waiting_s: float
    preemptions: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class AnchorCell:
    """A trace at a load. Ratios: ours to the best anchor's; `to_oracle` to that of srtf."""

    trace: str
    load: float
    window: int
    jobs: int
    gpus: int
    avg_jct_s: float
    best: str
    jct_ratio: float
    p95_waiting_s: float
    best_waiting: str
    waiting_ratio: float
    to_oracle: float
    # What the best anchor's is of srtf's.
    best_to_oracle: float


def _from_zero(jobs: Workload) -> Workload:
    """Return the same jobs on a clock that starts with the first submission."""
    if not len(jobs):
        return jobs
    first = jobs.submit_s[0]
    return jobs.with_columns(submit_s=jobs.submit_s - first, deadline_s=jobs.deadline_s - first)


def prepared(folder: Path, trace: str, count: int, window: int) -> tuple[Workload, Servers]:
    """The jobs of a window at the times they had, and the cluster they are for. TraceError, OSError; No
    jobs where the trace ends before it."""
    read = read_trace(folder / f"jobs_{trace}.csv").workload
    known = np.flatnonzero(~np.isnan(read.duration_s))[window * count : (window + 1) * count]
    jobs = read.take(known)
    jobs = _from_zero(
        workload(
            jobs.job_ids,
            jobs.submit_s,
            jobs.gpus,
            jobs.duration_s,
            labels={"user": jobs.user, "tenant": jobs.tenant, "model": jobs.model},
        )
    )
    servers = max(_SERVERS, math.ceil(2 * int(jobs.gpus.max(initial=0)) / _PER_SERVER))
    return jobs, servers_from_flags(nodes=servers, gpus_per_node=_PER_SERVER)


def run(folder: Path, trace: str, load: float, window: int, policy: str, count: int = JOBS) -> AnchorRow:
    """Of one policy in one cell."""
    jobs, servers = prepared(folder, trace, count, window)
    ran = simulate(scaled_to_load(jobs, servers.gpus, load), servers, policy, ReplayOptions())
    outcomes = ran.outcomes
    return AnchorRow(
        trace,
        load,
        window,
        policy,
        len(jobs),
        servers.gpus,
        float(outcomes.jct_s.mean()),
        percentile(outcomes.waiting_s, 95),
        float(outcomes.waiting_s.mean()),
        int(outcomes.preemptions.sum()),
        ran.cpu_s,
    )


def judged(rows: Iterable[AnchorRow], anchors: Sequence[str] = ANCHORS) -> list[AnchorCell]:
    """The cells of which all rows are there: ours, every anchor's and srtf's; in the order of `TRACES` and `LOADS`."""
    by_cell: dict[tuple[str, float, int, int], dict[str, AnchorRow]] = {}
    for row in rows:
        by_cell.setdefault((row.trace, row.load, row.window, row.jobs), {})[row.policy] = row
    needed = {OURS, *anchors, "srtf"}
    cells = [_judged(found, anchors) for found in by_cell.values() if needed <= found.keys()]
    return sorted(cells, key=lambda cell: (TRACES.index(cell.trace), cell.load, cell.window))


def _judged(found: Mapping[str, AnchorRow], anchors: Sequence[str]) -> AnchorCell:
    ours, oracle = found[OURS], found["srtf"]
    best = min((found[name] for name in anchors), key=lambda row: row.avg_jct_s)
    calm = min((found[name] for name in anchors), key=lambda row: row.p95_waiting_s)
    return AnchorCell(
        ours.trace,
        ours.load,
        ours.window,
        ours.jobs,
        ours.gpus,
        ours.avg_jct_s,
        best.policy,
        ours.avg_jct_s / best.avg_jct_s,
        ours.p95_waiting_s,
        calm.policy,
        _ratio(ours.p95_waiting_s, calm.p95_waiting_s),
        ours.avg_jct_s / oracle.avg_jct_s,
        best.avg_jct_s / oracle.avg_jct_s,
    )


def figures(cells: Sequence[AnchorCell]) -> dict[str, float]:
    """What is claimed of all cells; NaN of none."""
    if not cells:
        return {"cells": 0}
    jct = np.array([cell.jct_ratio for cell in cells])
    waiting = np.array([cell.waiting_ratio for cell in cells])
    return {
        "cells": len(cells),
        "lowest_jct_share": float((jct <= 1.0).mean()),
        "jct_ratio_max": float(jct.max()),
        "jct_ratio_mean": float(jct.mean()),
        "jct_within_1.03_share": float((jct <= 1.03).mean()),
        "p95_waiting_ratio_max": float(waiting.max()),
        "p95_waiting_within_1.1_share": float((waiting <= 1.1).mean()),
        "to_srtf_mean": float(np.mean([cell.to_oracle for cell in cells])),
        "best_anchor_to_srtf_mean": float(np.mean([cell.best_to_oracle for cell in cells])),
    }


def table(cells: Sequence[AnchorCell]) -> str:
    """For documents: Markdown, a row a cell."""
    lines = [
        "| trace | load | GPUs | ganger's average JCT (s) | to the best anchor | p95 waiting (s) | to the best "
        "| to srtf | best anchor to srtf |",
        "|---|---:|---:|---:|---|---:|---|---:|---:|",
    ]
    lines += [
        f"| {cell.trace} | {cell.load} | {cell.gpus} | {cell.avg_jct_s:,.0f} | {cell.jct_ratio:.3f} of {cell.best} "
        f"| {cell.p95_waiting_s:,.0f} | {cell.waiting_ratio:.2f} of {cell.best_waiting} | {cell.to_oracle:.2f} "
        f"| {cell.best_to_oracle:.2f} |"
        for cell in cells
    ]
    return "\n".join(lines)


def _ratio(one: float, other: float) -> float:
    """1 of nothing to nothing; what rounding leaves of sums of seconds is nothing."""
    return one / other if other > SLACK_S else (1.0 if one <= SLACK_S else math.inf)
