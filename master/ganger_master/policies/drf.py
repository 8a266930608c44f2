"""Dominant resource fairness with gangs as units (Ghodsi et al., NSDI 2011, section 4: progressive filling).

A user's dominant share is the largest of their shares of GPUs, cores and memory, divided by their weight. The user with
the smallest one receives the next gang. A gang that does not fit any more is skipped and counts for no user. The order
is the sequence of the visits; skipped gangs follow in order of arrival. Running gangs that may not be preempted are
visited first.

Synergy's "DRF" is another order: it sorts jobs by the share of their own demand, and users have no shares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Flags, Floats, Integers, sorted_by
from ganger_master.policies.orders import JobOrder

# Shares are rounded to this many decimals, so that rounding errors of sums decide no tie.
_DECIMALS = 9
# Gangs sorted in the first batch: most clusters are full, or nearly so, after this many.
_FIRST_BATCH = 1_024


def drf_keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Dominant resource fairness, weighted: the user with the smallest dominant share gets the next gang."""
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
    """Return the gangs in the sequence of their visits, skipped ones last, and the number of gangs served.

    `demands` (resources, gangs): in the order in which each user wants gangs served, which also breaks ties.
    `capacity` (resources,): 0 means that the resource is not shared. `user`, `weight` (gangs,): a user has the weight,
    above 0, of their first gang. `level` (gangs,), ascending: all gangs of a level are visited before the next level.
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
    batch = _FIRST_BATCH
    while len(fitting):
        line = _first(batch, fitting, level, users.shares(fitting))
        fits = (np.cumsum(demands.take(line, axis=1), axis=1) <= free).all(axis=0)
        # The first gang fits, so every iteration serves at least one.
        stretch = line if fits.all() else line[: int(np.argmin(fits))]
        batch = 4 * batch if len(stretch) == len(line) else _FIRST_BATCH
        served.append(stretch)
        users.give(stretch)
        free = free - demands.take(stretch, axis=1).sum(axis=1, keepdims=True)
        is_left[stretch] = False
        fitting = np.flatnonzero(is_left & (demands <= free).all(axis=0))
    sequence = np.concatenate((*served, np.empty(0, np.int64)))
    return np.concatenate((sequence, np.flatnonzero(is_left))), len(sequence)


def _first(count: int, gangs: Integers, level: Integers, shares: Floats) -> Integers:
    """Return about the first `count` gangs in the sequence of their visits, and all that are tied with them."""
    if len(gangs) > count:
        # Whole levels, and the smallest shares of the last level that is reached.
        reached = level[gangs[count - 1]]
        is_last = level[gangs] == reached
        before = int(np.argmax(is_last))
        most = np.partition(shares[is_last], count - 1 - before)[count - 1 - before]
        is_near = (level[gangs] < reached) | (is_last & (shares <= most))
        gangs, shares = gangs[is_near], shares[is_near]
    return gangs[sorted_by(level[gangs], shares)]


class _Users:
    """Shares of the cluster that users hold so far."""

    def __init__(self, user: Integers, weight: Floats, wanted: Floats) -> None:
        """`wanted` (resources, gangs): shares of the cluster."""
        names, self._position = np.unique(user, return_inverse=True)
        self._of_gang = wanted
        # A small integer type makes NumPy use a radix sort.
        self._line = np.argsort(self._position.astype(np.min_scalar_type(len(names))), kind="stable")
        # Arrays over the concatenated lines of all users.
        self._user = self._position[self._line]
        self._wanted = wanted.take(self._line, axis=1)
        self._begins = np.flatnonzero(np.diff(self._user, prepend=-1))
        self._weight = weight[self._line[self._begins]][self._user]
        self._held = np.zeros((len(wanted), len(names)))

    def give(self, gangs: Integers) -> None:
        """Add these gangs to the shares of their users."""
        for held, wanted in zip(self._held, self._of_gang, strict=True):
            held += np.bincount(self._position[gangs], wanted[gangs], len(held))

    def shares(self, gangs: Integers) -> Floats:
        """Return the weighted dominant share at which each of these gangs is visited.

        It counts what the user holds and the gangs before this one in the user's line. It never falls along a user's
        line, so sorting by it merges the lines.
        """
        is_counted = np.zeros(len(self._user), bool)
        is_counted[gangs] = True
        wanted = self._wanted * is_counted[self._line]
        before = np.cumsum(wanted, axis=1) - wanted
        before += (self._held - before[:, self._begins]).take(self._user, axis=1)
        shares = np.empty(len(self._user))
        shares[self._line] = np.round(before.max(axis=0, initial=0.0) / self._weight, _DECIMALS)
        found: Floats = shares[gangs]
        return found


def _levels(is_kept: Flags, priority: Integers) -> Integers:
    """Return numbers that rise wherever priority or `is_kept` changes along the line."""
    differs = (np.diff(priority) != 0) | (np.diff(is_kept.astype(np.int8)) != 0)
    return np.concatenate((np.zeros(min(1, len(priority)), np.int64), np.cumsum(differs)))


DRF = JobOrder("drf", drf_keys)
