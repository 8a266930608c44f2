"""Dominant resource fairness, weighted: the user with the smallest dominant share gets the next gang.

Ghodsi et al., NSDI 2011, section 4 (Algorithm 1, progressive filling) with gangs as units: a user's dominant share is
the largest of their shares of GPUs, cores and memory, divided by their weight. A gang that does not fit any more is
passed over and counts for nobody. The sequence in which gangs are visited is the order; those passed over follow as
they arrived. Who runs and may not be stopped is visited before all.

Synergy's "DRF" sorts jobs by the share of their own demand: that is something else, no user has a share in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Flags, Floats, Integers
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.sorting import sorted_by

# Shares are compared to this many decimals, so that how sums were rounded decides no tie.
_DECIMALS = 9
# Gangs sorted at the first look: most clusters are full after so many, or nearly.
_FIRST_GLANCE = 1_024


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    is_kept = facts.is_running & ~facts.is_preemptible
    line = sorted_by(-facts.priority, facts.arrival_s, facts.number)
    line = np.concatenate((line[is_kept[line]], line[~is_kept[line]]))
    visits, _ = filled(
        np.array((facts.gpus, facts.cores, facts.memory_bytes), float).take(line, axis=1),
        np.array((capacity.gpus, capacity.cores, capacity.memory_bytes), float),
        facts.user[line],
        facts.weight[line],
        _levels(is_kept[line], facts.priority[line]),
    )
    position = np.empty(len(facts), np.int64)
    position[line[visits]] = np.arange(len(facts))
    return (position,)


def filled(
    demands: Floats, capacity: Floats, user: Integers, weight: Floats, level: Integers | None = None
) -> tuple[Integers, int]:
    """The gangs in the sequence of their visits, those passed over last, and how many of them were served.

    `demands` (resources, gangs) in the line in which users want them served, which also breaks ties; `capacity`
    (resources,), where 0 means that the resource is not shared; `weight` > 0, of a user that of their first gang;
    `level`, rising along the line: all of a level are visited before the next.
    """
    count = len(user)
    level = np.zeros(count, np.int64) if level is None else level
    is_shared = capacity > 0
    demands, capacity = demands[is_shared], capacity[is_shared, None]
    users = _Users(user, weight, demands / capacity)
    free = capacity.copy()
    served: list[Integers] = []
    is_left = np.ones(count, bool)
    fitting = np.flatnonzero((demands <= free).all(axis=0))
    glance = _FIRST_GLANCE
    while len(fitting):
        line = _first(glance, fitting, level, users.shares(fitting))
        fits = (np.cumsum(demands.take(line, axis=1), axis=1) <= free).all(axis=0)
        # The first fits, so every look serves somebody.
        stretch = line if fits.all() else line[: int(np.argmin(fits))]
        glance = 4 * glance if len(stretch) == len(line) else _FIRST_GLANCE
        served.append(stretch)
        users.give(stretch)
        free = free - demands.take(stretch, axis=1).sum(axis=1, keepdims=True)
        is_left[stretch] = False
        fitting = np.flatnonzero(is_left & (demands <= free).all(axis=0))
    sequence = np.concatenate((*served, np.empty(0, np.int64)))
    return np.concatenate((sequence, np.flatnonzero(is_left))), len(sequence)


def _first(count: int, gangs: Integers, level: Integers, shares: Floats) -> Integers:
    """These gangs in the sequence of their visits: about the first `count`, and all that are tied with them."""
    if len(gangs) > count:
        # Levels rise along the line; of the last one that is reached, the smallest shares.
        reached = level[gangs[count - 1]]
        is_last = level[gangs] == reached
        before = int(np.argmax(is_last))
        most = np.partition(shares[is_last], count - 1 - before)[count - 1 - before]
        is_near = (level[gangs] < reached) | (is_last & (shares <= most))
        gangs, shares = gangs[is_near], shares[is_near]
    return gangs[sorted_by(level[gangs], shares)]


class _Users:
    """What users have got so far."""

    def __init__(self, user: Integers, weight: Floats, wanted: Floats) -> None:
        """`wanted` (resources, gangs): shares of the cluster."""
        names, self._position = np.unique(user, return_inverse=True)
        self._given = wanted
        # Few users fit into few bits, and few bits are sorted by counting.
        self._line = np.argsort(self._position.astype(np.min_scalar_type(len(names))), kind="stable")
        # Along the lines of the users, one behind the other.
        self._user = self._position[self._line]
        self._wanted = wanted.take(self._line, axis=1)
        self._begins = np.flatnonzero(np.diff(self._user, prepend=-1))
        self._weight = weight[self._line[self._begins]][self._user]
        self._held = np.zeros((len(wanted), len(names)))

    def give(self, gangs: Integers) -> None:
        for held, wanted in zip(self._held, self._given, strict=True):
            held += np.bincount(self._position[gangs], wanted[gangs], len(held))

    def shares(self, gangs: Integers) -> Floats:
        """The dominant share, by weight, at which each of these gangs is visited: what its user has, and what those of
        these before it in the user's line will have taken. It only grows along each user's line, so that to merge the
        lines is to sort by it."""
        is_asked = np.zeros(len(self._user), bool)
        is_asked[gangs] = True
        wanted = self._wanted * is_asked[self._line]
        before = np.cumsum(wanted, axis=1) - wanted
        before += (self._held - before[:, self._begins]).take(self._user, axis=1)
        shares = np.empty(len(self._user))
        shares[self._line] = np.round(before.max(axis=0, initial=0.0) / self._weight, _DECIMALS)
        found: Floats = shares[gangs]
        return found


def _levels(is_kept: Flags, priority: Integers) -> Integers:
    """Numbers that rise whenever the next of the line is of another level."""
    differs = (np.diff(priority) != 0) | (np.diff(is_kept.astype(np.int8)) != 0)
    return np.concatenate((np.zeros(min(1, len(priority)), np.int64), np.cumsum(differs)))


DRF = JobOrder("drf", keys)
