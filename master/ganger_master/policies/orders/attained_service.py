"""Orders that need only the clocks of a job: least attained service, in seconds or GPU-seconds, and round robin."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder, as_decimals


def las_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Least attained service first, counted in seconds (Nuyens and Wierman 2008 call it foreground-background)."""
    return (as_decimals(facts.attained_s),)


def las2d_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Least attained service first, counted in GPU-seconds: continuous, as in Synergy's simulator.

    Tiresias's two-dimensional LAS (NSDI 2019, section 4) sorts jobs into queues instead, so that two jobs do not
    preempt each other for ever: see `tiresias`.
    """
    return (as_decimals(facts.service),)


def round_robin_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Round robin: the job with the longest wait since it last ran first, the one with the longest stretch last.

    Time slicing as in Gandiva (Xiao et al., OSDI 2018, section 3.1), over the whole cluster: a slice lasts from one
    plan to the next. The order uses no estimate, so short jobs end late. It is the baseline of Tiresias's study (NSDI
    2019, section 5).
    """
    return (-facts.waited_s, facts.stretch_s)


LAS = JobOrder("las", las_keys, is_steady=True)
LAS2D = JobOrder("las2d", las2d_keys, is_steady=True)
ROUND_ROBIN = JobOrder("round-robin", round_robin_keys)
