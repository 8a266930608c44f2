"""Transformations of a trace: scale its load, select or sample jobs, drop jobs that a cluster cannot hold.

Also the synthetic workload of Synergy, for runs at a chosen arrival rate.

Synergy (Mohan et al., OSDI 2022, section 5) and its public simulator (runner.py, utils.get_gavel_like_iter): Poisson
arrivals; durations of 10^U(1.5, 3) minutes for four jobs in five and 10^U(3, 4) for the fifth; gangs of 1, 2, 4 and 8
GPUs in 70, 10, 15 and 5 % of jobs, or of one GPU only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ganger_master.simulator.traces.rows import MOST_S, RowFinding, RowFindingCounts, RowFindingKind
from ganger_master.simulator.traces.servers import Servers
from ganger_master.simulator.traces.workload import Floats, Workload, offered_load, workload

MULTI_GPU: Mapping[int, float] = {1: 0.70, 2: 0.10, 4: 0.15, 8: 0.05}
SINGLE_GPU: Mapping[int, float] = {1: 1.0}
_LONG_SHARE = 0.2
_SHORT_EXPONENTS = (1.5, 3.0)
_LONG_EXPONENTS = (3.0, 4.0)


def synthetic(jobs: int, jobs_per_hour: float, seed: int, gangs: Mapping[int, float] = MULTI_GPU) -> Workload:
    """Return random jobs, the first at time 0, numbered from 0 in order of arrival. The same seed gives the same jobs,
    and the first of a longer workload are those of a shorter one. `gangs`: share of jobs by GPUs. Raises ValueError for
    a rate or shares that are not above zero, or a negative number of jobs."""
    if jobs < 0 or not 0 < jobs_per_hour < np.inf:
        raise ValueError(f"{jobs} jobs at {jobs_per_hour} an hour are no workload")
    shares = np.array(list(gangs.values()), float)
    if not (len(shares) and (shares > 0).all()):
        raise ValueError("gangs need shares above zero")
    # One stream for each quantity, so that a longer workload begins as a shorter one does.
    arrivals, lengths, sizes = (np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(3))
    between = arrivals.exponential(3600.0 / jobs_per_hour, jobs)
    between[:1] = 0.0
    draws = lengths.random((jobs, 2))
    long = draws[:, 0] < _LONG_SHARE
    low, high = (
        np.where(long, of_long, of_short) for of_short, of_long in zip(_SHORT_EXPONENTS, _LONG_EXPONENTS, strict=True)
    )
    minutes = 10.0 ** (low + (high - low) * draws[:, 1])
    size = np.searchsorted(np.cumsum(shares / shares.sum()), sizes.random(jobs), side="right")
    gpus = np.array(list(gangs), np.int64)[np.minimum(size, len(shares) - 1)]
    return workload(map(str, range(jobs)), np.cumsum(between), gpus, minutes * 60.0)


def scaled_to_load(jobs: Workload, gpus: int, load: float) -> Workload:
    """Return the same jobs, submitted closer together or further apart, so that they offer `load` to `gpus` GPUs.

    Times between submissions are multiplied by one factor; gangs, durations and the time each job has until its
    deadline stay. The first submission keeps its time. ValueError where there is nothing to scale: a load not above
    zero, no GPUs, unknown durations, all jobs submitted at once, a load so low that no calendar holds the trace.
    """
    if not (load > 0 and np.isfinite(load)):
        raise ValueError(f"a load of {load} cannot be offered: give a number above zero")
    now = offered_load(jobs, gpus)
    if not np.isfinite(now):
        raise ValueError("jobs that are all submitted at once offer no load that could be scaled")
    first, last, stretch = float(jobs.submit_s[0]), float(jobs.submit_s[-1]), now / load
    if first + (last - first) * stretch > MOST_S:
        raise ValueError(f"a load of {load:g} cannot be offered: the trace would take thousands of years")
    submit = first + (jobs.submit_s - first) * stretch
    return jobs.with_columns(submit_s=submit, deadline_s=submit + (jobs.deadline_s - jobs.submit_s))


def with_loads(jobs: Workload, gpus: int, phases: Sequence[tuple[float, float]]) -> Workload:
    """Return the trace stretched and squeezed so that it offers one load after another: `phases` are (seconds, load).

    The trace's clock runs load / (load of the whole trace) times as fast in each phase, so bursts stay bursts; jobs
    beyond the last phase are left out, and the time until deadlines stays. ValueError for phases that are not longer
    than zero or whose load is not above it, and for a trace too short to fill them.
    """
    if not phases or any(not (0 < seconds < np.inf and 0 < load < np.inf) for seconds, load in phases):
        raise ValueError(f"phases {list(phases)} are not all (seconds, load) above zero")
    whole = offered_load(jobs, gpus)
    ends = np.cumsum([seconds for seconds, _ in phases])
    taken = np.cumsum([seconds * load / whole for seconds, load in phases])
    first, last = float(jobs.submit_s[0]), float(jobs.submit_s[-1])
    if taken[-1] > last - first:
        raise ValueError(f"the trace spans {last - first:,.0f} s; these loads would need {taken[-1]:,.0f} s of it")
    part = window(jobs, first, first + float(taken[-1]))
    submit = first + np.interp(part.submit_s - first, np.append(0.0, taken), np.append(0.0, ends))
    return part.with_columns(submit_s=submit, deadline_s=submit + (part.deadline_s - part.submit_s))


def window(jobs: Workload, first_s: float, end_s: float) -> Workload:
    """Return the jobs submitted from `first_s` to before `end_s`, on the trace's clock, at the times they had."""
    return jobs.take((jobs.submit_s >= first_s) & (jobs.submit_s < end_s))


def from_zero(jobs: Workload) -> Workload:
    """Return the same jobs on a clock that starts with the first submission."""
    if not len(jobs):
        return jobs
    first = jobs.submit_s[0]
    return jobs.with_columns(submit_s=jobs.submit_s - first, deadline_s=jobs.deadline_s - first)


def sample(jobs: Workload, count: int, seed: int) -> Workload:
    """Return `count` of the jobs, each equally likely, at the times they had: the load falls with them. ValueError for
    a negative count or more than there are."""
    if not 0 <= count <= len(jobs):
        raise ValueError(f"cannot sample {count:,} of {len(jobs):,} jobs")
    return jobs.take(np.random.default_rng(seed).choice(len(jobs), count, replace=False))


def with_durations(jobs: Workload, duration_s: Floats) -> Workload:
    """Return the jobs with run times for those that have none; recorded ones stay."""
    return jobs.with_columns(duration_s=np.where(np.isnan(jobs.duration_s), duration_s, jobs.duration_s))


def with_sizes(jobs: Workload, times: float, most: int) -> Workload:
    """Make jobs of one size elastic, from one GPU to `times` theirs, but no more than `most` unless they request more.
    Jobs that are elastic already stay."""
    is_fixed = jobs.min_gpus == jobs.max_gpus
    largest = np.maximum(jobs.gpus, np.minimum((jobs.gpus * times).astype(np.int64), most))
    return jobs.with_columns(
        min_gpus=np.where(is_fixed, 1, jobs.min_gpus), max_gpus=np.where(is_fixed, largest, jobs.max_gpus)
    )


def that_fit(jobs: Workload, servers: Servers) -> tuple[Workload, tuple[RowFinding, ...]]:
    """Return (jobs whose gang the idle cluster could hold, findings on those that are left out).

    A gang must fit into the GPUs of the types it accepts; cores and memory, where the trace states them, into what
    those servers have together. Whether it fits with all its wishes of locality is decided when it is placed.
    """
    tally = RowFindingCounts()
    fits = np.ones(len(jobs), bool)
    for code, accepted in enumerate(jobs.gpu_type.names):
        of_type = jobs.gpu_type.codes == code
        room = servers.of_types(accepted)
        if not room.gpus:
            tally.note(
                RowFindingKind.SKIPPED, f"needs GPUs of type {accepted}, of which there are none", jobs.lines[of_type]
            )
            fits &= ~of_type
            continue
        for what, needed, there in (
            ("GPUs", jobs.gpus, room.gpus),
            ("cores", jobs.cpus, room.millicores / 1000),
            ("bytes of memory", jobs.memory_bytes, room.memory_bytes),
        ):
            # NaN is no request: the trace does not state it.
            too_large = of_type & fits & (needed > there)
            kind = f" of type {accepted}" if accepted else ""
            tally.note(
                RowFindingKind.SKIPPED,
                f"needs more {what} than the {there:,.0f} of the cluster's servers{kind}",
                jobs.lines[too_large],
            )
            fits &= ~too_large
    return jobs if fits.all() else jobs.take(fits), tally.findings()
