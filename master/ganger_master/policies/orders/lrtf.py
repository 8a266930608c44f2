"""Longest remaining time first, by an oracle: for the makespan alone (Graham's rule for machines alike, 1969)."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder, as_decimals


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return (as_decimals(-facts.remaining_s),)


LRTF = JobOrder("lrtf", keys, knows_durations=True, is_steady=True)
