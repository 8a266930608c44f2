"""The figures of one run: how long jobs took and waited, how full the cluster was, how fair, and what it cost.

Whether a shared cluster served each job at least as well as an equal part of it, all its own, would have.

Themis (Mahajan et al., NSDI 2020, section 3): finish-time fairness rho = T_shared / T_independent, where the
independent cluster has 1/N of the GPUs, N being the jobs that contend. rho <= 1 is the promise of sharing.

The kinds of gangs in a workload and their frequencies, from which fragmentation is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ganger.cluster.feasibility import MOST_KINDS, GangMix

from ganger_master.policies.job_facts import Flags
from ganger_master.policies.orders import SLACK_S
from ganger_master.simulator.report.outcomes import Outcomes, Run, StepSeries
from ganger_master.simulator.traces.workload import Floats, Integers, Workload, percentile, size_class, size_names


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


def demand_of(jobs: Workload, device_types: tuple[str, ...]) -> GangMix:
    """Return the 128 most frequent kinds of gangs in a workload. Raises ValueError if there is none."""
    if not len(jobs):
        raise ValueError("the workload has no jobs")
    per_gpu = np.column_stack(
        (
            jobs.gpus,
            np.nan_to_num(jobs.cpus) * 1000 / jobs.gpus,
            np.nan_to_num(jobs.memory_bytes) / jobs.gpus,
            jobs.gpu_type.codes,
        )
    )
    kinds, counts = np.unique(per_gpu, axis=0, return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[:MOST_KINDS]
    kinds, counts = kinds[frequent], counts[frequent]
    accepted = [jobs.gpu_type.names[int(code)] for code in kinds[:, 3]]
    accepts = [[not wish or kind in wish.split("|") for kind in device_types] for wish in accepted]
    return GangMix(
        kinds[:, 0].astype(np.int64),
        kinds[:, 1],
        kinds[:, 2],
        np.array(accepts, bool).reshape(len(kinds), len(device_types)),
        counts / counts.sum(),
        device_types,
    )


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

    `jobs` were submitted (in the window, if there is one), `unfinished` of them had not ended. `makespan_s` runs
    from the first submission to the last end, NaN with jobs unfinished. `gpu_utilization` and `core_utilization` are
    what was held by what there was, over the makespan or window. `fragmentation` is the share of free GPUs that the
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


def figures(run: Run, window_s: tuple[float, float] | None = None) -> Figures:
    """Return the figures of a run.

    With a window, those of the jobs submitted in it (from its first second to before its second), and of the cluster
    during it: the steady part of a run, without its start and its end.
    """
    every = run.outcomes
    chosen = np.ones(len(every), bool)
    if window_s is not None:
        chosen = (every.submit_s >= window_s[0]) & (every.submit_s < window_s[1])
    rho, jct_s = _fairness(run, chosen)
    jobs = every if window_s is None else every.take(chosen)
    done = jobs.take(jobs.finished)
    last_end = float(done.end_s.max()) if len(jobs) and len(done) == len(jobs) else math.nan
    makespan = last_end - float(jobs.submit_s.min()) if len(jobs) else math.nan
    begin, end = _span_s(run, last_end) if window_s is None else window_s
    fragmented = _series_mean(run, "fragmented_gpus", begin, end)
    used_gpus = _used(run, "used_gpus", every.gpu_seconds, window_s, begin, end)
    used_cores = _used(run, "used_cores", every.core_seconds, window_s, begin, end)
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


def _span_s(run: Run, last_end_s: float) -> tuple[float, float]:
    """Return the first and the last second of a run: from the first submission to the last end, if all jobs ended."""
    if not len(run.outcomes):
        return run.start_s, run.end_s
    return float(run.outcomes.submit_s.min()), run.end_s if math.isnan(last_end_s) else last_end_s


def _fairness(run: Run, chosen: Flags) -> tuple[Floats, Floats]:
    """Return rho and the JCT in seconds of the chosen jobs that have a rho; contention is that of all jobs."""
    every = run.outcomes
    rho = finish_time_fairness(every.submit_s, every.end_s, every.gpus, every.duration_s, max(run.gpus, 1), run.end_s)
    known = chosen & ~np.isnan(rho)
    return rho[known], every.jct_s[known]


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


def _used(run: Run, name: str, held_s: Floats, window_s: tuple[float, float] | None, begin: float, end: float) -> float:
    """Return the mean of what was in use; what jobs share counts once. For a whole run it is computed from the jobs,
    which is more exact than the recorded series."""
    if window_s is None and not (run.shares and name == "used_gpus"):
        return _ratio(float(held_s.sum()), end - begin)
    return _series_mean(run, name, begin, end)


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


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return how many times ours is theirs, seed by seed: the interval of the ratios, since runs of one seed share
    their jobs and vary together. Raises ValueError for different numbers of runs, or theirs not above zero."""
    if len(ours) != len(theirs) or any(not value > 0 for value in theirs):
        raise ValueError("ratios need two runs of each seed, the second above zero")
    return interval([one / other for one, other in zip(ours, theirs, strict=True)], confidence)
