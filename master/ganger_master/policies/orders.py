"""Orders of live jobs: pure functions from facts to the columns that jobs are sorted by, smallest first; bounded
waiting in any order; and the selection of the first jobs whose gangs fit together. Priority goes before all columns.

`Facts` about live jobs are columns, too. Seconds are on the master's clock. A job is live from its submission to its
end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
from msgspec import Struct, structs
from numpy.typing import ArrayLike, NDArray

from ganger_master.policies.partition_room import PartitionBounds, taken_by_partition

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Resources of the nodes that accept gangs."""

    gpus: int
    cores: float
    memory_bytes: float
    # Of the largest node.
    gpus_per_node: int


class Precedence(Protocol):
    """What goes before the order of any policy, job by job."""

    def take(self, jobs: NDArray[Any]) -> Precedence:
        """Return that of the jobs at these positions, or where this mask is true."""

    def places(self, order: JobOrder, facts: Facts, line: Integers, gpus: int) -> Integers:
        """Return the place of each job in the queue. line: positions of the jobs by priority and by the order. gpus:
        GPUs of the cluster."""


class Facts(Struct, frozen=True, eq=False, gc=False):
    """One entry per live job, in any order."""

    number: Integers
    arrival_s: Floats
    # The gang that it has or asks for.
    gpus: Integers
    cores: Floats
    memory_bytes: Floats
    priority: Integers
    weight: Floats
    # The same number for the jobs of one user.
    user: Integers
    # Infinite: none.
    deadline_s: Floats
    # Holds a gang that it has not been ordered to release.
    is_running: Flags
    is_preemptible: Flags
    # Seconds that it has run, over all stretches.
    attained_s: Floats
    # Seconds since it last ran, or since it was submitted; zero while it runs.
    waited_s: Floats
    # When it first held a gang; infinite: never yet.
    started_s: Floats
    # Length of the present stretch of running, and of the wait before it; zero while the job is pending.
    stretch_s: Floats
    waited_before_s: Floats
    # Estimate from its own progress or similar jobs, at the rate of its whole gang alone; NaN: no estimate.
    expected_remaining_s: Floats
    # Gittins's index from similar jobs, in 1 / GPU-seconds; NaN: the order does not learn.
    index: Floats
    # An oracle's value, at the rate of its whole gang alone; NaN where the order has none (`JobOrder.knows_durations`),
    # so that no other order can read it.
    remaining_s: Floats
    # None: priority and policy alone decide.
    teams: Precedence | None = None

    def __len__(self) -> int:
        return len(self.number)

    @property
    def service(self) -> Floats:
        """Attained GPU-seconds."""
        return self.attained_s * self.gpus

    def take(self, jobs: NDArray[Any]) -> Facts:
        """Return the jobs at these positions, or where this mask is true."""
        teams = None if self.teams is None else self.teams.take(jobs)
        return structs.replace(self, teams=teams, **{name: getattr(self, name)[jobs] for name in FACT_COLUMNS})


# Names of the columns of facts.
FACT_COLUMNS = tuple([column.name for column in structs.fields(Facts) if column.name != "teams"])


def sorted_by(*columns: NDArray[Any]) -> Integers:
    """Return positions, smallest first: the first column decides, then the next. Ties keep their order; NaN is last."""
    return np.lexsort(columns[::-1])


def behind(columns: Sequence[NDArray[Any]], at: int) -> Flags:
    """Return which rows sort after the one at this position; a row that equals it in all columns does not."""
    found, is_tied = np.zeros(len(columns[0]), bool), np.ones(len(columns[0]), bool)
    for column in columns:
        value = column[at]
        if value != value:
            is_tied &= column != column
        else:
            found |= is_tied & ~(column <= value)
            is_tied &= column == value
        if np.count_nonzero(is_tied) == 1:
            # Only the row itself is still tied.
            break
    return found


@dataclass(frozen=True, slots=True, eq=False)
class ServiceHistory:
    """GPU-seconds of ended jobs, ascending. Construction sorts them all, so callers renew it once the new ends would
    shift it (about a twentieth more), not at every end."""

    services: Floats
    _sums: Floats = field(repr=False)

    @classmethod
    def of(cls, services: ArrayLike) -> ServiceHistory:
        """Make a history of GPU-seconds in any order; values that are not positive and finite are ignored."""
        given = np.asarray(services, float).ravel()
        known = np.sort(given[np.isfinite(given) & (given > 0)])
        return cls(known, np.concatenate(((0.0,), np.cumsum(known))))

    def index(self, attained: Floats, quantum: Floats) -> Floats:
        """Return Gittins's index of each job, in 1 / GPU-seconds. `attained`, `quantum` (> 0 or infinite): GPU-s."""
        first = np.searchsorted(self.services, attained, side="right")
        last = np.searchsorted(self.services, attained + quantum, side="right")
        ending = last - first
        longer = len(self.services) - last
        taken = self._sums[last] - self._sums[first] - attained * ending
        # Avoids infinite x 0 where the quantum is infinite and no job is longer.
        taken += np.where(longer > 0, quantum, 0.0) * longer
        return np.asarray(np.divide(ending, taken, out=np.zeros(len(attained)), where=taken > 0), float)


NO_HISTORY = ServiceHistory.of(())
# Ended jobs that a history is made from, and the share of them by which it may lag behind.
_HISTORY, _STALE = 20_000, 0.05


class RecentServices:
    """The service history of the jobs that ended last, renewed after every twentieth part of them."""

    def __init__(self) -> None:
        self._services: deque[float] = deque(maxlen=_HISTORY)
        self._history, self._since = NO_HISTORY, 0

    def add(self, gpu_seconds: float) -> None:
        """Record a job that has ended."""
        self._services.append(gpu_seconds)
        self._since += 1

    @property
    def history(self) -> ServiceHistory:
        if self._since > _STALE * len(self._history.services):
            self._history, self._since = ServiceHistory.of(self._services), 0
        return self._history


# (facts, now, capacity) -> columns, most significant first.
Keys: TypeAlias = Callable[[Facts, float, Capacity], tuple[NDArray[Any], ...]]

# Tolerance where a clock is compared with a limit. A predicted change has happened when its time comes, whatever the
# rounding of sums, and the next one is at least this far away.
SLACK_S = 1e-3


@dataclass(frozen=True, slots=True)
class JobOrder:
    """An order by name. The docstring of `keys` begins with a line that describes the order (`order_registry.summary`).

    * `preempts`: a job may take the place of a running job that ranks below it. Else `packs` and `slices` are refused.
    * `is_strict`: no job passes one that does not fit.
    * `knows_durations`: reads an oracle's remaining times, so it serves for comparison only.
    * `learns`: reads indices that are estimated from other jobs (`estimators.run_time`).
    * `next_change`: when the ranking changes without an event, if it changes in jumps.
    * `overdue`: the jobs, on a cluster of so many GPUs, that have waited too long (`selected`).
    * `overdue_share`: the part of the cluster that overdue jobs may take at once (`aging`).
    * `regroups`: running jobs are restarted elsewhere to make room for a gang that fits nowhere.
    * `rests`: a preempted job starts again only in a plan that may preempt.
    * `placement`: the placement, unless the policy's name has one.
    * `with_history`: returns this order for the GPU-seconds of ended jobs.
    * `with_interval`: returns this order for a minimum time in seconds between two plans that preempt.
    * `by_arrival`: `keys` is empty. Without preemption the master's queue then serves, which needs no planner.
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
    with_interval: Callable[[float], JobOrder] | None = None
    by_arrival: bool = False

    @property
    def needs_planner(self) -> bool:
        """Return whether only a planner can follow it. The master's own queue is by arrival, and preempts no job."""
        return self.preempts or not self.by_arrival


def as_decimals(amounts: Floats) -> Floats:
    """Round seconds or GPU-seconds, so that equal amounts compare equal whatever the rounding of their sums."""
    return np.asarray(amounts.round(6), float)


def ranked(order: JobOrder, facts: Facts, now: float, capacity: Capacity) -> Integers:
    """Return positions in the facts, first job first."""
    return sorted_by(*ranks(order, facts, now, capacity))


def ranks(order: JobOrder, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    """Return all columns that jobs are sorted by, most significant first; no two jobs are equal in all of them."""
    columns = (-facts.priority, *order.keys(facts, now, capacity), facts.arrival_s, facts.number)
    if facts.teams is None:
        return columns
    return (-facts.priority, facts.teams.places(order, facts, sorted_by(*columns), capacity.gpus))


def next_change_s(order: JobOrder, facts: Facts, now: float) -> float:
    """Return the earliest time after now at which the ranking may change without an event; infinite if there is none.
    Such changes are: a job enters another queue, a wait becomes overdue, a deadline passes. Rankings that change all
    the time (las, las2d, ftf, an index inside a queue) are recomputed at intervals instead."""
    return math.inf if order.next_change is None else order.next_change(facts, now)


WEEK_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Aging:
    """An order with bounded waiting.

    A job is overdue once its wait has lasted `after_s` and `factor` x the time it had run before. It then goes before
    all others of its priority, in order of when the waits began, and once started keeps its place until it has run for
    `share` x that wait. While an overdue gang does not fit, only jobs that can be preempted for it start before it. So
    an overdue wait lasts at most as long as the jobs then live need when they run one after the other.

    Under overload ever more jobs become overdue. So `JobOrder.overdue_share` limits their part of the cluster: the
    earliest waits go first until they fill it; the very first goes whatever its size.
    """

    order: JobOrder
    after_s: float
    factor: float
    share: float

    def __post_init__(self) -> None:
        assert self.after_s > 0, self
        assert self.factor >= 0, self
        assert self.share > 0, self

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        """Overdue jobs by when their waits began, then all others by the order below."""
        overdue = self.overdue(facts, capacity.gpus)
        if not overdue.any():
            return self.order.keys(facts, now, capacity)
        # To the millisecond: waits that began together are ties, whatever the rounding of sums.
        waiting_since = np.round(now - _since_began_s(facts), 3)
        # Overdue jobs that run, overdue jobs that wait, all others.
        group = np.where(overdue, np.where(facts.is_running, 0, 1), 2)
        return (group, np.where(overdue, waiting_since, 0.0), *self.order.keys(facts, now, capacity))

    def overdue(self, facts: Facts, gpus: int) -> Flags:
        """Return the overdue jobs that go first now, on a cluster of `gpus` GPUs."""
        if not self._may_be_due(facts):
            return np.zeros(len(facts), bool)
        overdue = self._is_due(facts)
        if self.order.overdue_share < 1 and overdue.any():
            jobs = np.flatnonzero(overdue)
            since_s = np.round(_since_began_s(facts)[jobs], 3)
            jobs = jobs[sorted_by(-facts.priority[jobs], -since_s, facts.arrival_s[jobs], facts.number[jobs])]
            within = np.cumsum(facts.gpus[jobs]) <= self.order.overdue_share * gpus
            within[0] = True
            overdue[jobs[~within]] = False
        return overdue

    def _is_due(self, facts: Facts) -> Flags:
        waited_s, limit_s = self._waits(facts)
        is_protected = ~facts.is_running | (facts.stretch_s + SLACK_S < self.share * waited_s)
        return np.asarray((waited_s + SLACK_S >= limit_s) & is_protected, bool)

    def next_change(self, facts: Facts, now: float) -> float:
        """Return when the next wait becomes overdue, the next protected stretch ends, or the order below changes."""
        if not self._may_be_due(facts):
            # Computing the limits of pending jobs only is much faster than of all jobs.
            pending = np.flatnonzero(~facts.is_running)
            limit_s = np.maximum(self.after_s, self.factor * (facts.attained_s - facts.stretch_s)[pending])
            soonest_s = float((limit_s - facts.waited_s[pending]).min(initial=np.inf))
            return min(now + soonest_s, next_change_s(self.order, facts, now))
        waited_s, limit_s = self._waits(facts)
        overdue = self._is_due(facts)
        until_overdue_s = (limit_s - waited_s)[~facts.is_running & ~overdue]
        until_end_s = (self.share * waited_s - facts.stretch_s)[facts.is_running & overdue]
        soonest_s = min(float(until_overdue_s.min(initial=np.inf)), float(until_end_s.min(initial=np.inf)))
        return min(now + soonest_s, next_change_s(self.order, facts, now))

    def _may_be_due(self, facts: Facts) -> bool:
        """Return whether any wait has lasted `after_s`."""
        # `reduce` takes half the time of `max`, and each pass calls this several times.
        longest_s = max([np.maximum.reduce(waits, initial=0.0) for waits in (facts.waited_s, facts.waited_before_s)])
        return bool(longest_s + SLACK_S >= self.after_s)

    def _waits(self, facts: Facts) -> tuple[Floats, Floats]:
        """Return the seconds of the present wait, or of the one before the present stretch, and its limit."""
        waited_s = np.where(facts.is_running, facts.waited_before_s, facts.waited_s)
        return waited_s, np.maximum(self.after_s, self.factor * (facts.attained_s - facts.stretch_s))


def _since_began_s(facts: Facts) -> Floats:
    """Return the seconds since the present wait began, or the one before the present stretch."""
    return facts.waited_s + facts.stretch_s + facts.waited_before_s


def with_aging(order: JobOrder, after_s: float = WEEK_S, factor: float = 1.0, share: float = 0.1) -> JobOrder:
    """Return the order with bounded waiting, under its own name."""
    aging = Aging(order, after_s, factor, share)
    renewed = order.with_history
    return replace(
        order,
        keys=aging.keys,
        next_change=aging.next_change,
        overdue=aging.overdue,
        with_history=None if renewed is None else partial(_with_history, renewed, after_s, factor, share),
    )


def _with_history(
    renewed: Callable[[ServiceHistory], JobOrder], after_s: float, factor: float, share: float, history: ServiceHistory
) -> JobOrder:
    return with_aging(renewed(history), after_s, factor, share)


def selected(
    order: JobOrder,
    facts: Facts,
    line: Integers,
    free: int,
    guards: tuple[Flags, Flags] | None = None,
    bounds: PartitionBounds | None = None,
) -> Integers:
    """Return the positions of the jobs that should hold GPUs now.

    `line`: positions as `order` ranked them. `free`: GPUs in all, held ones included. `guards`: the result of `guarded`
    where the caller has it. Running jobs that may not be preempted keep their GPUs. While an overdue gang does not fit,
    only jobs that can be preempted for it start before it. `bounds`: those of partitions, if there are any.
    """
    may_stop = facts.is_preemptible if order.preempts else np.zeros(len(facts), bool)
    stays = facts.is_running & ~may_stop
    overdue, passing = guards or guarded(order, facts, free)
    if not overdue.any():
        return chosen(line, facts.gpus, free, order.is_strict, stays, bounds=bounds)
    return chosen(line, facts.gpus, free, order.is_strict, stays, overdue, passing, bounds)


def guarded(order: JobOrder, facts: Facts, free: int) -> tuple[Flags, Flags]:
    """Return by position which jobs are overdue, with `free` GPUs in all, and which may start before them nevertheless.
    The latter can be preempted for an overdue job again. While no job is overdue, both are empty."""
    none = np.zeros(len(facts), bool)
    if order.overdue is None:
        return none, none
    # No job waits for a gang that would not fit an empty cluster.
    overdue = order.overdue(facts, free) & (facts.gpus <= free)
    if not overdue.any():
        return none, none
    return overdue, (facts.is_preemptible if order.preempts else none) & ~overdue


def chosen(
    ranked: Integers,
    gpus: Integers,
    free: int,
    is_strict: bool = False,
    kept: Flags | None = None,
    guarded: Flags | None = None,
    passing: Flags | None = None,
    bounds: PartitionBounds | None = None,
) -> Integers:
    """Return the positions of the jobs that fit into `free` GPUs, in order, and into the GPUs of their partitions.

    `ranked`: positions, first job first. `gpus`, `kept`, `guarded`, `passing`: by position. A job that does not fit is
    skipped, or ends the pass if it `is_strict`. The `kept` jobs are chosen before all others. Once one of the `guarded`
    does not fit, only `passing` jobs are considered. Where there are partitions, a job that does not fit concerns only
    those that have nodes in common with its own.
    """
    staying = ranked[:0]
    if kept is not None:
        is_kept = kept[ranked]
        if np.count_nonzero(is_kept):
            staying, ranked = ranked[is_kept], ranked[~is_kept]
            free -= int(gpus[staying].sum())
    if bounds is not None:
        taken = taken_by_partition(ranked, gpus, free, is_strict, guarded, passing, bounds, staying)
        return np.concatenate((staying, np.array(taken, np.int64)))
    taken = []
    is_guarded = False
    sizes = gpus[ranked].tolist()
    least = min(sizes, default=0)
    for job, size in zip(ranked.tolist(), sizes, strict=True):
        if free < least:
            break
        if is_guarded and passing is not None and not passing[job]:
            continue
        if size <= free:
            taken.append(job)
            free -= size
        elif is_strict:
            break
        elif guarded is not None and guarded[job]:
            is_guarded = True
    return np.concatenate((staying, np.array(taken, np.int64)))
