"""Turns for everybody: whoever has waited longest since it last ran goes first, and who has run longest on end leaves.

Time slicing as in Gandiva (Xiao et al., OSDI 2018, section 3.1), over the whole cluster: a turn lasts from one plan to
the next. It knows nothing of jobs, so it finishes short ones late, and serves as the baseline it is in Tiresias's study
(NSDI 2019, section 5).
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return (-facts.waited_s, facts.stretch_s)


ROUND_ROBIN = JobOrder("round-robin", keys)
