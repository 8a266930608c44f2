"""Which live jobs go first: one file per order, each a pure function from facts to columns to sort by.

Smaller goes first. The first column decides, then the second, and so on; every tie that is left is broken by arrival
and then by number. A job's priority goes before all of them (`ranked`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.facts import Capacity, Facts, Integers

# The columns, most significant first, from the facts, the time and the cluster.
Keys: TypeAlias = Callable[[Facts, float, Capacity], tuple[NDArray[Any], ...]]


@dataclass(frozen=True, slots=True)
class Order:
    """`preempts`: who goes first may take the place of who runs. `is_strict`: nobody passes a job that does not fit.
    `knows_durations`: it asks an oracle, so it serves for comparison only."""

    name: str
    keys: Keys
    preempts: bool = True
    is_strict: bool = False
    knows_durations: bool = False


def ranked(order: Order, facts: Facts, now: float, capacity: Capacity) -> Integers:
    """Positions in the facts, first job first."""
    columns = order.keys(facts, now, capacity)
    # lexsort takes the most significant column last.
    return np.lexsort((facts.number, facts.arrival_s, *reversed(columns), -facts.priority))
