"""By arrival, nobody passes anybody, and nobody running is stopped (Tiresias's `fifo`)."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return ()


def keys_passing(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """By arrival, passing over what does not fit, and nobody running is stopped (Tiresias's `fjf`)."""
    return ()


FIFO = JobOrder("fifo", keys, preempts=False, is_strict=True, is_steady=True, by_arrival=True)
FIFO_BACKFILL = JobOrder("fifo-backfill", keys_passing, preempts=False, is_steady=True, by_arrival=True)
