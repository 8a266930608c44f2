"""Earliest deadline first (Liu and Layland 1973, section 7).

Under overload the plain rule makes one job after another late. So jobs whose deadline has passed form a second group,
and `policies/deadlines.py` warns at submission.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Floats, Integers
from ganger_master.policies.orders import SLACK_S, JobOrder

# Groups in their order: deadline ahead, deadline missed, no deadline.
AHEAD, MISSED, NONE = 0, 1, 2


def edf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Earliest deadline first; then jobs whose deadline has passed; then jobs without a deadline."""
    return (group(facts.deadline_s, now), facts.deadline_s)


def group(deadline_s: Floats, now: float) -> Integers:
    """Return the group of each deadline: AHEAD, MISSED or NONE."""
    return np.where(np.isinf(deadline_s), NONE, np.where(deadline_s <= now + SLACK_S, MISSED, AHEAD))


def next_change(facts: Facts, now: float) -> float:
    """Return when the next deadline passes."""
    ahead = facts.deadline_s[facts.deadline_s > now + SLACK_S]
    return float(ahead.min(initial=np.inf))


EDF = JobOrder("edf", edf_keys, next_change=next_change)
