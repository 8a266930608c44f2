"""Shortest remaining time first, by an oracle: the usual bound for average JCT, though not for gangs (see srsf)."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder, as_decimals


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return (as_decimals(facts.remaining_s),)


SRTF = JobOrder("srtf", keys, knows_durations=True, is_steady=True)
