"""Bounded waiting for any order: overdue jobs go first and keep their places for a while.

A job is overdue once its wait has lasted `after_s` and `factor` x the time it had run before. It then goes before all
others of its priority, in order of when the waits began. Once started it keeps its place until it has run for `share` x
that wait, so that the order below does not preempt it at once. While an overdue gang does not fit, only jobs that can
be preempted for it start before it (`selection.selected`).

Under overload ever more jobs become overdue, and all of them first in, first out would replace any better order. So an
order may limit their part of the cluster (`JobOrder.overdue_share`): the earliest waits go first until they fill that
share; the very first goes whatever its size.

The guarantee: from the moment a wait is overdue, it lasts at most as long as the jobs then live need when they run one
after the other, since no later job of equal priority goes before it. Each wait earns the job at least `share` of its
length, so with finite load every job ends. Higher priorities always go first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Flags, Floats
from ganger_master.policies.orders import SLACK_S, JobOrder, next_change_s
from ganger_master.policies.service_history import ServiceHistory
from ganger_master.policies.sorting import sorted_by

WEEK_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Aging:
    """An order with bounded waiting; see the module for `after_s`, `factor` and `share`."""

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
        overdue: Flags = (waited_s + SLACK_S >= limit_s) & is_protected
        return overdue

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
        is_steady=False,
        with_history=None if renewed is None else partial(_with_history, renewed, after_s, factor, share),
    )


def _with_history(
    renewed: Callable[[ServiceHistory], JobOrder], after_s: float, factor: float, share: float, history: ServiceHistory
) -> JobOrder:
    return with_aging(renewed(history), after_s, factor, share)
