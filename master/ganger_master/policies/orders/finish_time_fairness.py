"""Finish-time fairness of Themis (Mahajan et al., NSDI 2020, section 3): rho = T_shared / T_independent, descending.

* T_shared: seconds since the arrival plus the remaining seconds at the rate of the whole gang.
* T_independent: the whole job on its part of the cluster, which is its weight over that of all live jobs. A gang larger
  than that part is time-sliced there, as in Gavel's isolated share (OSDI 2020, section 4.2).

Differences: contention is the present one, where Themis takes the mean over the job's life; sorting replaces the
auction. Synergy's simulator sorts ascending, which favours the best-off jobs.

The remaining time is the expected one. Where there is no expectation it equals the attained time: for lifetimes with
P(S > s) ~ 1/s that is the median of the rest at any age. It is at least a minute, so that a young job has a rho.
The order does not use the estimates of `estimators.run_time`. They shorten the average JCT (shockwave 120 jobs: 9,730
to 8,983 s; gavel's 96: 10,983 to 10,663 s, on 32 GPUs), but set back a job whose estimate is too long, and this order
exists to keep the largest rho small (it rises from 1.23 to 1.51, and from 1.12 to 1.28).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Floats
from ganger_master.policies.orders import JobOrder

# A lower bound of the remaining time of any job.
LEAST_REMAINING_S = 60.0


def ftf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Finish-time fairness: the job that sharing delays most first, by an estimate of its remaining time."""
    return (-finish_time_fairness(facts, expected_s(facts), now, capacity),)


def expected_s(facts: Facts) -> Floats:
    """Return the expected remaining seconds of each job."""
    known = facts.expected_remaining_s
    return np.maximum(np.where(np.isnan(known), facts.attained_s, known), LEAST_REMAINING_S)


def finish_time_fairness(facts: Facts, remaining_s: Floats, now: float, capacity: Capacity) -> Floats:
    """Return rho of each job if it ran from now on; above 1 is worse than an equal part of the cluster of its own.

    `remaining_s` >= 0, and above 0 for a job that has attained nothing.
    """
    contention = facts.weight.sum() / facts.weight
    slices = np.maximum(1.0, facts.gpus * contention / max(capacity.gpus, 1))
    rho: Floats = (now - facts.arrival_s + remaining_s) / ((facts.attained_s + remaining_s) * slices)
    return rho


FTF = JobOrder("ftf", ftf_keys)
