"""First in, first out: strict, and with backfill."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder


def fifo_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """By arrival; no job passes another, and no running job is preempted (Tiresias's `fifo`)."""
    return ()


def backfill_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """By arrival, skipping jobs that do not fit; no running job is preempted (Tiresias's `fjf`)."""
    return ()


FIFO = JobOrder("fifo", fifo_keys, preempts=False, is_strict=True, is_steady=True, by_arrival=True)
FIFO_BACKFILL = JobOrder("fifo-backfill", backfill_keys, preempts=False, is_steady=True, by_arrival=True)
