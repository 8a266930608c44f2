"""Shortest remaining service first, by an oracle: remaining time x GPUs (Tiresias's `shortest-gpu`, NSDI 2019)."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder, as_decimals


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return (as_decimals(facts.remaining_s * facts.gpus),)


SRSF = JobOrder("srsf", keys, knows_durations=True, is_steady=True)
