"""Orders of live jobs: pure functions from facts to the columns that jobs are sorted by.

Smaller goes first. The first column decides, then the second, and so on; arrival and then the job's number break the
remaining ties. Priority goes before all columns (`ranked`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Flags, Floats, Integers
from ganger_master.policies.service_history import ServiceHistory
from ganger_master.policies.sorting import sorted_by

# (facts, now, capacity) -> columns, most significant first.
Keys: TypeAlias = Callable[[Facts, float, Capacity], tuple[NDArray[Any], ...]]

# Tolerance where a clock is compared with a limit. A predicted change has happened when its time comes, whatever the
# rounding of sums, and the next one is at least this far away.
SLACK_S = 1e-3


@dataclass(frozen=True, slots=True)
class JobOrder:
    """An order by name. The docstring of `keys` begins with a line that describes the order (`registry.summary`).

    * `preempts`: a job may take the place of a running job that ranks below it.
    * `is_strict`: no job passes one that does not fit.
    * `knows_durations`: reads an oracle's remaining times, so it serves for comparison only.
    * `learns`: reads indices that are estimated from other jobs (`estimators.run_time`).
    * `next_change`: when the ranking changes without an event, if it changes in jumps.
    * `overdue`: the jobs, on a cluster of so many GPUs, that have waited too long (`selection.selected`).
    * `overdue_share`: the part of the cluster that overdue jobs may take at once (`aging`).
    * `regroups`: running jobs are restarted elsewhere to make room for a gang that fits nowhere.
    * `rests`: a preempted job starts again only in a plan that may preempt.
    * `placement`: the placement, unless the policy's name has one.
    * `with_history`: returns this order for the GPU-seconds of ended jobs.
    * `is_steady`: starting or stopping a job changes no rank until time has passed.
    * `by_arrival`: pending jobs are in the order of submission, as in the master's queue.
    """

    name: str
    keys: Keys
    preempts: bool = True
    is_strict: bool = False
    knows_durations: bool = False
    learns: bool = False
    next_change: Callable[[Facts, float], float] | None = None
    overdue: Callable[[Facts, int], Flags] | None = None
    overdue_share: float = 1.0
    regroups: bool = False
    rests: bool = False
    placement: str = "gandiva"
    with_history: Callable[[ServiceHistory], JobOrder] | None = None
    is_steady: bool = False
    by_arrival: bool = False


def as_decimals(amounts: Floats) -> Floats:
    """Round seconds or GPU-seconds, so that equal amounts compare equal whatever the rounding of their sums."""
    rounded: Floats = amounts.round(6)
    return rounded


def ranked(order: JobOrder, facts: Facts, now: float, capacity: Capacity) -> Integers:
    """Return positions in the facts, first job first."""
    return sorted_by(*ranks(order, facts, now, capacity))


def ranks(order: JobOrder, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Return all columns that jobs are sorted by, most significant first; no two jobs are equal in all of them."""
    return (-facts.priority, *order.keys(facts, now, capacity), facts.arrival_s, facts.number)


def next_change_s(order: JobOrder, facts: Facts, now: float) -> float:
    """Return the earliest time after now at which the ranking may change without an event; infinite if there is none.

    Such changes are: a job enters another queue, a wait becomes overdue, a deadline passes. Rankings that change all
    the time (las, las2d, ftf, an index inside a queue) are recomputed at intervals instead.
    """
    return math.inf if order.next_change is None else order.next_change(facts, now)
