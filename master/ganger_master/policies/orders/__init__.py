"""Which live jobs go first: one file per order, each a pure function from facts to columns to sort by.

Smaller goes first. The first column decides, then the second, and so on; every tie that is left is broken by arrival
and then by number. A job's priority goes before all of them (`ranked`).
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

# The columns, most significant first, from the facts, the time and the cluster.
Keys: TypeAlias = Callable[[Facts, float, Capacity], tuple[NDArray[Any], ...]]

# Seconds that count as nothing where a clock is held against a limit: a change that was seen coming is there when its
# time has come, however the sums were rounded, and the next one is at least this far away.
SLACK_S = 1e-3


@dataclass(frozen=True, slots=True)
class JobOrder:
    """`preempts`: who goes first may take the place of who runs. `is_strict`: nobody passes a job that does not fit.
    `knows_durations`: it asks an oracle, so it serves for comparison only. `learns`: it goes by indices
    learned from other jobs (`estimators.run_time`). `with_history`: itself,
    for the GPU-seconds of jobs that have ended.

    `next_change`: when it will rank differently though nothing happens, if that comes in jumps. `overdue`: who has
    waited too long, of a cluster of so many GPUs, so that nobody may pass them for good (`selection.selected`).
    `overdue_share`: the part of the cluster that may go to them at once (`aging`). `regroups`: those it runs change
    places where that makes room for a gang that finds none. `rests`: who was stopped for others starts again only when
    it could be stopped again. `placement`: where gangs go unless a policy's name says.
    `is_steady`: nobody ranks otherwise for having been started or stopped, until time has passed. `by_arrival`: who
    waits does so in the order of submission, as in the master's queue.
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
    """Seconds, or GPU-seconds, to go by: those that are equal in decimals are, however their sums were rounded."""
    rounded: Floats = amounts.round(6)
    return rounded


def ranked(order: JobOrder, facts: Facts, now: float, capacity: Capacity) -> Integers:
    """Positions in the facts, first job first."""
    return sorted_by(*ranks(order, facts, now, capacity))


def ranks(order: JobOrder, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """The columns that jobs are sorted by, most significant first; no two jobs are equal in all of them."""
    return (-facts.priority, *order.keys(facts, now, capacity), facts.arrival_s, facts.number)


def next_change_s(order: JobOrder, facts: Facts, now: float) -> float:
    """The earliest time after now at which the order may change by itself (a job enters another queue, a wait becomes
    too long, a deadline passes); infinite if it does not before something happens. Orders that change all the time
    (las, las2d, ftf, and an index within a queue) are asked anew by rounds instead."""
    return math.inf if order.next_change is None else order.next_change(facts, now)
