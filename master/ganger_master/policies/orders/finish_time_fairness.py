"""Finish-time fairness: whoever sharing sets back most goes first, judged by an estimate of what is left.

Themis (Mahajan et al., NSDI 2020, section 3): rho = T_shared / T_independent. T_shared is what has passed since the
arrival plus what is left at the rate of the whole gang; T_independent is the whole job on its part of the cluster, its
weight over that of all live jobs: a gang larger than that part takes turns there, as in Gavel's isolated share (OSDI
2020, section 4.2). Contention is what it is now; Themis takes its mean over the job's life. Instead of the auction the
order is the plain one: rho descending. Synergy's simulator sorts it ascending, which serves the best off.

What is left is what may be expected; where nothing is known, as much as was attained: for lives with
P(S > s) ~ 1/s that is the median of what remains, at any age. A minute at least, so that a young job has a rho at all.
What the jobs submitted next to it let expect (`estimators.run_time`) is not used here: it lowers the average JCT
(shockwave
120 jobs: 9,730 to 8,983 s; gavel's 96: 10,983 to 10,663 s, on 32 GPUs), but who is expected to run for long and does
not is set back more, and the largest rho is what this order is for (1.23 to 1.51, 1.12 to 1.28).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Floats
from ganger_master.policies.orders import JobOrder

# Nothing that trains is over sooner.
LEAST_REMAINING_S = 60.0


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return (-finish_time_fairness(facts, expected_s(facts), now, capacity),)


def expected_s(facts: Facts) -> Floats:
    """Seconds of running that are left, as far as one may know."""
    known = facts.expected_remaining_s
    return np.maximum(np.where(np.isnan(known), facts.attained_s, known), LEAST_REMAINING_S)


def finish_time_fairness(facts: Facts, remaining_s: Floats, now: float, capacity: Capacity) -> Floats:
    """rho of each job if it ran from now on; above 1 is worse than an equal part of the cluster, all its own.
    `remaining_s` >= 0, and above 0 for who has attained nothing."""
    contention = facts.weight.sum() / facts.weight
    turns = np.maximum(1.0, facts.gpus * contention / max(capacity.gpus, 1))
    rho: Floats = (now - facts.arrival_s + remaining_s) / ((facts.attained_s + remaining_s) * turns)
    return rho


FTF = JobOrder("ftf", keys)
