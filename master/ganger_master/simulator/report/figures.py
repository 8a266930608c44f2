"""The figures of one run: how long jobs took and waited, how full the cluster was, how fair, and what it cost.

Themis (Mahajan et al., NSDI 2020, section 3): finish-time fairness rho = T_shared / T_independent, where the
independent cluster has 1/N of the GPUs, N being the jobs that contend. rho <= 1 is the promise of sharing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ganger.text import format_duration, format_memory

from ganger_master.policies.orders import SLACK_S
from ganger_master.simulator.report.outcomes import Outcomes, Run, StepSeries
from ganger_master.simulator.traces.workload import Floats, Integers, percentile, size_class, size_names


def finish_time_fairness(
    submit_s: Floats, end_s: Floats, gpus: Integers, duration_s: Floats, cluster_gpus: int, now_s: float | None = None
) -> Floats:
    """Return rho of each job: JCT / (duration x max(1, gang x N / GPUs of the cluster)); NaN for jobs that have not
    ended or whose duration is unknown.

    N is the time-weighted mean of the jobs that were live (submitted, not ended) between the job's submission and its
    end. A gang larger than its part of the cluster is time-sliced there, as in Gavel's isolated share (OSDI 2020,
    section 4.2): it takes gang / part times as long. A job without `end_s` counts as live until `now_s`, the end of the
    run."""
    if not len(submit_s):
        return np.empty(0)
    last = np.nanmax(np.append(end_s, submit_s.max())) if now_s is None else now_s
    ends = np.where(np.isnan(end_s), last, end_s)
    contention = mean_contention(submit_s, ends)
    alone = duration_s * np.maximum(1.0, gpus * contention / cluster_gpus)
    return np.asarray((end_s - submit_s) / alone)


def mean_contention(submit_s: Floats, end_s: Floats) -> Floats:
    """Return the mean number of live jobs, itself among them, over each job's life; 1 for a life without length."""
    live = live_jobs(submit_s, end_s)
    life = end_s - submit_s
    area = live.integral_to(end_s) - live.integral_to(submit_s)
    return np.divide(area, life, out=np.ones(len(life)), where=life > 0)


def live_jobs(submit_s: Floats, end_s: Floats) -> StepSeries:
    """Return the number of jobs submitted and not ended, over time; for at least one job."""
    moments = np.concatenate((submit_s, end_s))
    changes = np.concatenate((np.ones(len(submit_s)), -np.ones(len(end_s))))
    times, position = np.unique(moments, return_inverse=True)
    return StepSeries.of(times, np.cumsum(np.bincount(position, changes, len(times))), float(times[-1]))


@dataclass(frozen=True)
class SizeFigures:
    """Jobs of one size class of gangs: how long until they first ran, and how long they waited in all."""

    jobs: int
    mean_start_delay_s: float
    p95_start_delay_s: float
    mean_waiting_s: float
    p95_waiting_s: float


@dataclass(frozen=True)
class Figures:
    """The figures of a run, NaN where unknown. Times are of jobs that ended; percentiles are observed values
    (`statistics.percentile`), the median is the usual one. A millisecond late is in time.

    `jobs` were submitted, `unfinished` of them had not ended. `makespan_s` runs
    from the first submission to the last end, NaN with jobs unfinished. `gpu_utilization` and `core_utilization` are
    what was held by what there was, over the makespan. `fragmentation` is the share of free GPUs that the
    next gang could not use, `fragmented_gpus` their mean number. `rho` is Themis's finish-time fairness. Waiting is all
    time without a gang. `overhead_share` is the share of held GPU time that went into starting, stopping and moving.
    """

    policy: str
    seed: int
    offered_load: float
    jobs: int
    unfinished: int
    avg_jct_s: float
    median_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    makespan_s: float
    avg_start_delay_s: float
    p95_start_delay_s: float
    avg_waiting_s: float
    p95_waiting_s: float
    by_gang_size: Mapping[str, SizeFigures]
    gpu_utilization: float
    core_utilization: float
    fragmented_gpus: float
    fragmentation: float
    avg_rho: float
    p95_rho: float
    max_rho: float
    share_rho_above_1: float
    deadlines: int
    deadline_hits: int
    preemptions: int
    migrations: int
    resizes: int
    overhead_s: float
    overhead_share: float
    wall_s: float
    cpu_s: float
    events: int
    events_per_s: float
    peak_memory_bytes: int


def figures(run: Run) -> Figures:
    """Return the figures of a run."""
    jobs = run.outcomes
    rho, jct_s = _fairness(run)
    done = jobs.take(jobs.finished)
    begin, end = (float(jobs.submit_s.min()), run.end_s) if len(jobs) else (run.start_s, run.end_s)
    makespan = math.nan
    if len(jobs) and len(done) == len(jobs):
        end = float(done.end_s.max())
        makespan = end - begin
    fragmented = _series_mean(run, "fragmented_gpus", begin, end)
    # From the jobs it is more exact than from the recorded series, which counts once what jobs share.
    used_gpus = _ratio(float(jobs.gpu_seconds.sum()), end - begin)
    if run.shares:
        used_gpus = _series_mean(run, "used_gpus", begin, end)
    used_cores = _ratio(float(jobs.core_seconds.sum()), end - begin)
    deadlines = ~np.isnan(jobs.deadline_s)
    held = float(jobs.gpu_seconds.sum())
    return Figures(
        policy=run.policy,
        seed=run.seed,
        offered_load=run.offered_load,
        jobs=len(jobs),
        unfinished=len(jobs) - len(done),
        avg_jct_s=_mean(done.jct_s),
        median_jct_s=_median(done.jct_s),
        p95_jct_s=percentile(done.jct_s, 95),
        p99_jct_s=percentile(done.jct_s, 99),
        makespan_s=makespan,
        avg_start_delay_s=_mean(_known(jobs.start_delay_s)),
        p95_start_delay_s=percentile(_known(jobs.start_delay_s), 95),
        avg_waiting_s=_mean(done.waiting_s),
        p95_waiting_s=percentile(done.waiting_s, 95),
        by_gang_size=by_gang_size(jobs),
        gpu_utilization=_ratio(used_gpus, run.gpus),
        core_utilization=_ratio(used_cores, run.cores),
        fragmented_gpus=fragmented,
        fragmentation=_ratio(fragmented, run.gpus - used_gpus),
        avg_rho=_mean(rho),
        p95_rho=percentile(rho, 95),
        max_rho=float(rho.max()) if len(rho) else math.nan,
        # Longer than it would have taken alone, jct / rho, by more than sums of times are rounded.
        share_rho_above_1=_mean(jct_s * (rho - 1.0) > SLACK_S * rho),
        deadlines=int(deadlines.sum()),
        # A job that has not ended compares as NaN: no hit.
        deadline_hits=int((jobs.end_s[deadlines] <= jobs.deadline_s[deadlines] + SLACK_S).sum()),
        preemptions=int(jobs.preemptions.sum()),
        migrations=int(jobs.migrations.sum()),
        resizes=int(jobs.resizes.sum()),
        overhead_s=float(jobs.overhead_s.sum()),
        overhead_share=_ratio(float((jobs.overhead_s * _mean_gpus(jobs)).sum()), held),
        wall_s=run.wall_s,
        cpu_s=run.cpu_s,
        events=run.events,
        events_per_s=_ratio(run.events, run.wall_s),
        peak_memory_bytes=run.peak_memory_bytes,
    )


def _fairness(run: Run) -> tuple[Floats, Floats]:
    jobs = run.outcomes
    rho = finish_time_fairness(jobs.submit_s, jobs.end_s, jobs.gpus, jobs.duration_s, max(run.gpus, 1), run.end_s)
    known = ~np.isnan(rho)
    return rho[known], jobs.jct_s[known]


def by_gang_size(jobs: Outcomes) -> dict[str, SizeFigures]:
    """Return the figures of each size class, smallest first."""
    names = size_names(jobs.gpus)
    class_of = {size: names.index(size_class(size)) for size in set(jobs.gpus.tolist())}
    codes = np.array([class_of[size] for size in jobs.gpus.tolist()], int)
    found = {}
    for code, name in enumerate(names):
        of_size = codes == code
        delays = _known(jobs.start_delay_s[of_size])
        waiting = _known(jobs.waiting_s[of_size])
        found[name] = SizeFigures(
            int(of_size.sum()), _mean(delays), percentile(delays, 95), _mean(waiting), percentile(waiting, 95)
        )
    return found


def _series_mean(run: Run, name: str, begin: float, end: float) -> float:
    series = run.series.get(name)
    return math.nan if series is None else series.mean(begin, end)


def _mean_gpus(jobs: Outcomes) -> Floats:
    """Return the mean number of GPUs of each job while it held any; an elastic job may have had several sizes."""
    held = ~np.isnan(jobs.gpu_seconds) & (jobs.service_s > 0)
    mean: Floats = np.divide(jobs.gpu_seconds, jobs.service_s, out=jobs.gpus.astype(float), where=held)
    return mean


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _median(values: Floats) -> float:
    """Return the median; NaN of nothing. NumPy's own function would import masked arrays."""
    if not len(values):
        return math.nan
    middle = [(len(values) - 1) // 2, len(values) // 2]
    lower, upper = np.partition(values, middle)[middle].tolist()
    return float((lower + upper) / 2)


def _mean(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float64]] | np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
) -> float:
    return float(values.mean()) if len(values) else math.nan


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else math.nan


@dataclass(frozen=True)
class Interval:
    """The mean of `runs` values lies within `half_width` of the true mean with the chosen confidence."""

    mean: float
    half_width: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if math.isnan(self.half_width) else f"{self.mean:.4g} ± {self.half_width:.2g}"


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the interval by Student's t over independent values; of one value the width is NaN. Raises ValueError for
    no value, or NaN."""
    if not len(values) or any(math.isnan(value) for value in values):
        raise ValueError("an interval needs values that are known")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Interval(mean, math.nan, 1)
    # Loading it takes longer than a short simulation.
    from scipy.special import stdtrit

    factor = float(stdtrit(len(values) - 1, (1.0 + confidence) / 2.0))
    return Interval(mean, factor * float(np.std(values, ddof=1)) / math.sqrt(len(values)), len(values))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return how many times ours is theirs, seed by seed: the interval of the ratios, since runs of one seed share
    their jobs and vary together. Raises ValueError for different numbers of runs, or theirs not above zero."""
    if len(ours) != len(theirs) or any(not value > 0 for value in theirs):
        raise ValueError("ratios need two runs of each seed, the second above zero")
    return interval([one / other for one, other in zip(ours, theirs, strict=True)])


# -- tables ------------------------------------------------------------------------------------------------------------

Table = tuple[list[str], list[list[str]]]

_UNKNOWN = "-"


def details(run: Figures) -> list[tuple[str, str]]:
    """Return the names and values of one run; what is not known is left out."""
    pairs = [
        ("policy", f"{run.policy}, seed {run.seed}"),
        ("offered load", _number(run.offered_load)),
        ("jobs", f"{run.jobs:,}" + (f", {run.unfinished:,} unfinished" if run.unfinished else "")),
        ("average JCT", _duration(run.avg_jct_s)),
        ("median, p95, p99 JCT", _listed(_duration, run.median_jct_s, run.p95_jct_s, run.p99_jct_s)),
        ("makespan", _duration(run.makespan_s)),
        ("first start, p95", _listed(_duration, run.avg_start_delay_s, run.p95_start_delay_s)),
        ("waiting, p95", _listed(_duration, run.avg_waiting_s, run.p95_waiting_s)),
        ("GPUs in use", _share(run.gpu_utilization)),
        ("cores in use", _share(run.core_utilization)),
        ("free GPUs no gang can use", _listed(_share, run.fragmentation)),
        ("fairness rho, p95, max", _listed(_number, run.avg_rho, run.p95_rho, run.max_rho)),
        ("jobs worse off than alone", _share(run.share_rho_above_1)),
        ("deadlines met", f"{run.deadline_hits:,} of {run.deadlines:,}" if run.deadlines else _UNKNOWN),
        ("preemptions, moves", f"{run.preemptions:,}, {run.migrations:,}"),
        ("other sizes", f"{run.resizes:,}" if run.resizes else _UNKNOWN),
        ("overhead", _share(run.overhead_share)),
        ("simulated in", _listed(_duration, run.wall_s)),
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


def _listed(cell: Callable[[float], str], *values: float) -> str:
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
        cells = [_said(_interval(of_policy), row.shown) for of_policy in values.values()]
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


def comparison(runs: Mapping[str, Sequence[Figures]]) -> dict[str, Any]:
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
