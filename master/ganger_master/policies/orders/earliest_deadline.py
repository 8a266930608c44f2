"""Earliest deadline first; a deadline that has passed yields to those that can still be met, no deadline to all.

Liu and Layland 1973, section 7. Alone it falls like dominoes under overload, each job late for one that is late
already: hence the second group, and advice before a job is taken (`policies/deadlines.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Floats, Integers
from ganger_master.policies.orders import SLACK_S, JobOrder

# Groups, in the order in which they go.
AHEAD, MISSED, NONE = 0, 1, 2


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return (group(facts.deadline_s, now), facts.deadline_s)


def group(deadline_s: Floats, now: float) -> Integers:
    return np.where(np.isinf(deadline_s), NONE, np.where(deadline_s <= now + SLACK_S, MISSED, AHEAD))


def next_change(facts: Facts, now: float) -> float:
    """When the next deadline passes."""
    ahead = facts.deadline_s[facts.deadline_s > now + SLACK_S]
    return float(ahead.min(initial=np.inf))


EDF = JobOrder("edf", keys, next_change=next_change)
