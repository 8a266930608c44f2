"""Least attained service first, counted in seconds (Nuyens and Wierman 2008 call it foreground-background)."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder, as_decimals


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return (as_decimals(facts.attained_s),)


LAS = JobOrder("las", keys, is_steady=True)
