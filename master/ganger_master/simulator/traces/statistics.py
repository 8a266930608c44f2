"""What kind of trace it is: how many jobs, how large, how long, how bursty, how much work for how many GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ganger_master.simulator.traces.workload import Floats, Integers, Workload

_HOUR = 3600.0
_DAY = 86_400.0
PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class Statistics:
    """Figures of a workload. NaN where they cannot be told: of one job, or of unknown durations.

    `span_s` is from first to last submission. `interarrival_cv` is standard deviation by mean of the times between
    submissions: 1 for Poisson arrivals, more for bursts. `gpu_shares` are shares of jobs by `size_class`.
    `mean_demand_gpus` is GPU-seconds submitted by span: the GPUs kept busy if nothing waited.
    """

    jobs: int
    span_s: float
    jobs_per_hour: float
    busiest_hour_jobs: int
    interarrival_cv: float
    gpu_shares: Mapping[str, float]
    gpus_mean: float
    gpus_max: int
    durations_known: int
    duration_percentiles_s: Mapping[int, float]
    duration_mean_s: float
    duration_max_s: float
    gpu_hours: float
    mean_demand_gpus: float


def statistics(jobs: Workload) -> Statistics:
    """Of a workload with at least one job; ValueError of none."""
    if not len(jobs):
        raise ValueError("a workload without jobs has no statistics")
    span = float(jobs.submit_s[-1] - jobs.submit_s[0])
    known = jobs.duration_s[~np.isnan(jobs.duration_s)]
    gpu_seconds = float(np.nansum(jobs.gpu_seconds)) if len(known) else math.nan
    between = np.diff(jobs.submit_s)
    mean_between = float(between.mean()) if len(between) else 0.0
    return Statistics(
        jobs=len(jobs),
        span_s=span,
        jobs_per_hour=_ratio(len(jobs) * _HOUR, span),
        busiest_hour_jobs=int(np.unique(jobs.submit_s // _HOUR, return_counts=True)[1].max()),
        interarrival_cv=_ratio(float(between.std()) if len(between) else 0.0, mean_between),
        gpu_shares=_size_shares(jobs.gpus),
        gpus_mean=float(jobs.gpus.mean()),
        gpus_max=int(jobs.gpus.max()),
        durations_known=len(known),
        duration_percentiles_s={percent: percentile(known, percent) for percent in PERCENTILES},
        duration_mean_s=float(known.mean()) if len(known) else math.nan,
        duration_max_s=float(known.max()) if len(known) else math.nan,
        gpu_hours=gpu_seconds / _HOUR,
        mean_demand_gpus=_ratio(gpu_seconds, span),
    )


def offered_load(jobs: Workload, gpus: int) -> float:
    """GPU-seconds submitted by GPU-seconds there are between first and last submission: above 1, queues only grow.
    Infinite for jobs submitted at once. ValueError without GPUs, without jobs or with unknown durations."""
    if gpus < 1:
        raise ValueError("a cluster without GPUs has no load")
    if not len(jobs) or np.isnan(jobs.duration_s).any():
        raise ValueError("load needs jobs with known durations")
    span = float(jobs.submit_s[-1] - jobs.submit_s[0])
    return float(jobs.gpu_seconds.sum()) / (span * gpus) if span > 0 else math.inf


def percentile(values: Floats | Integers | Sequence[float], percent: float) -> float:
    """The smallest value that more than `percent` % of the values do not exceed, the largest for 100; NaN of no values.
    An observed value always, none in between; where nearest-rank, for which `percent` % are enough, falls on a whole
    number of values, this is the next one."""
    count = len(values)
    if not count:
        return math.nan
    # In millionths of a percent, so that the rank of 99.9 % of 1,000 is what it is in decimals.
    rank = min(count * round(percent * 1e6) // 100_000_000, count - 1)
    return float(np.partition(np.asarray(values), rank)[rank])


def size_class(gpus: int) -> str:
    """Gangs in powers of two: "1", "2", "3-4", "5-8", "9-16", ..."""
    if gpus <= 2:
        return str(gpus)
    top = 1 << (gpus - 1).bit_length()
    return f"{top // 2 + 1}-{top}"


def size_names(gpus: Integers) -> list[str]:
    """The size classes that occur, smallest first."""
    return list(dict.fromkeys(size_class(size) for size in sorted(set(gpus.tolist()))))


def text(figures: Statistics) -> str:
    """Three lines for people."""
    shares = ", ".join(f"{name}: {share:.1%}" for name, share in figures.gpu_shares.items())
    lines = [
        f"jobs {figures.jobs:,}; span {figures.span_s / _DAY:.4g} d; arrivals {figures.jobs_per_hour:.4g}/h mean, "
        f"{figures.busiest_hour_jobs:,} in the busiest hour, inter-arrival CV {figures.interarrival_cv:.4g}",
        f"GPUs per job: {shares}; mean {figures.gpus_mean:.4g}, max {figures.gpus_max:,}",
    ]
    if figures.durations_known:
        percentiles = ", ".join(f"p{name} {value:,.0f}" for name, value in figures.duration_percentiles_s.items())
        lines.append(
            f"duration (s): {percentiles}, max {figures.duration_max_s:,.0f}, mean {figures.duration_mean_s:,.0f}; "
            f"{figures.gpu_hours:,.0f} GPU-hours; mean demand {figures.mean_demand_gpus:.4g} GPUs"
        )
    return "\n".join(lines)


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else math.nan


def _size_shares(gpus: Integers) -> dict[str, float]:
    shares: dict[str, float] = {}
    for size, count in zip(*np.unique(gpus, return_counts=True), strict=True):
        name = size_class(int(size))
        shares[name] = shares.get(name, 0.0) + int(count) / len(gpus)
    return shares
