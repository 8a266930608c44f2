"""Orders that read the true remaining time of each job, for comparison in the simulator."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder, as_decimals
from ganger_master.policies.orders.finish_time_fairness import finish_time_fairness


def srtf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Shortest remaining time first, by an oracle: the usual bound for average JCT, though not for gangs (see srsf)."""
    return (as_decimals(facts.remaining_s),)


def srsf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Shortest remaining service first, by an oracle: remaining time x GPUs (Tiresias's `shortest-gpu`, NSDI 2019)."""
    return (as_decimals(facts.remaining_s * facts.gpus),)


def lrtf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Longest remaining time first, by an oracle: minimises the makespan alone (Graham's LPT rule, 1969)."""
    return (as_decimals(-facts.remaining_s),)


def ftf_oracle_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Finish-time fairness with an oracle's remaining times, for comparison with `ftf`."""
    return (-finish_time_fairness(facts, facts.remaining_s, now, capacity),)


SRTF = JobOrder("srtf", srtf_keys, knows_durations=True, is_steady=True)
SRSF = JobOrder("srsf", srsf_keys, knows_durations=True, is_steady=True)
LRTF = JobOrder("lrtf", lrtf_keys, knows_durations=True, is_steady=True)
FTF_ORACLE = JobOrder("ftf-oracle", ftf_oracle_keys, knows_durations=True)
