"""Jobs nobody recorded: Synergy's synthetic workload, for runs at a chosen rate of arrivals.

Synergy (Mohan et al., OSDI 2022, section 5) and its public simulator (runner.py, utils.get_gavel_like_iter): Poisson
arrivals; durations of 10^U(1.5, 3) minutes for four jobs in five and 10^U(3, 4) for the fifth; gangs of 1, 2, 4 and 8
GPUs in 70, 10, 15 and 5 % of jobs, or of one GPU only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ganger_master.simulator.traces.workload import Workload, workload

MULTI_GPU: Mapping[int, float] = {1: 0.70, 2: 0.10, 4: 0.15, 8: 0.05}
SINGLE_GPU: Mapping[int, float] = {1: 1.0}
_LONG_SHARE = 0.2
_SHORT_EXPONENTS = (1.5, 3.0)
_LONG_EXPONENTS = (3.0, 4.0)


def synthetic(jobs: int, jobs_per_hour: float, seed: int, gangs: Mapping[int, float] = MULTI_GPU) -> Workload:
    """So many jobs, the first at time 0, numbered from 0 in order of arrival; the same seed gives the same jobs, and
    the first of a longer workload are those of a shorter one. `gangs`: share of jobs by GPUs. ValueError for a rate or
    shares that are not above zero, or a negative number of jobs."""
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
