"""Finish-time fairness with an oracle's remaining times, for comparison with `ftf`."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.orders.finish_time_fairness import finish_time_fairness


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return (-finish_time_fairness(facts, facts.remaining_s, now, capacity),)


FTF_ORACLE = JobOrder("ftf-oracle", keys, knows_durations=True)
