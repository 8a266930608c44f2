"""Least attained service first, counted in GPU-seconds: continuous, as in Synergy's simulator.

Tiresias's two-dimensional LAS (NSDI 2019, section 4) puts it into queues, so that jobs do not take turns for ever: see
`tiresias`.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder, as_decimals


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return (as_decimals(facts.service),)


LAS2D = JobOrder("las2d", keys, is_steady=True)
