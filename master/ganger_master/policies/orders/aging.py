"""Bounded waiting for any order: who has waited too long goes first, and keeps its place for a while.

A wait is too long once it lasts `after_s` and `factor` x what the job had attained before it. The job then goes before
all others of its priority (first in, first out by when the waits began), and once started it keeps its place until it
has run for `share` x that wait, so that an order that would rather run others does not stop it at once. Nobody who
could not be stopped again starts past a gang that is overdue and does not fit yet (`selection.selected`).

An order may keep most of the cluster for its own line (`Order.overdue_share`): then those whose wait began first go
before all others until they fill that share, the first of them whatever it takes. More work than the cluster can do
makes ever more jobs overdue; first in, first out for all of them would be the end of any better order.

What that promises: from the moment a wait is too long, it lasts no longer than what is left of the jobs that are live
then takes, one after the other; nobody of equal priority who comes later is ahead. A job waits so for at most
max(after_s, factor x attained) plus that, and each wait earns it at least `share` of its length: with finite load
every job ends. Among priorities the higher one always goes first: that is the operator's word.
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
    order: JobOrder
    after_s: float
    factor: float
    share: float

    def __post_init__(self) -> None:
        assert self.after_s > 0, self
        assert self.factor >= 0, self
        assert self.share > 0, self

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        overdue = self.overdue(facts, capacity.gpus)
        if not overdue.any():
            return self.order.keys(facts, now, capacity)
        # To the millisecond: waits that began together are ties, however the sums were rounded.
        waiting_since = np.round(now - _since_began(facts), 3)
        # Who has its turn, then who should have, then everybody else.
        group = np.where(overdue, np.where(facts.is_running, 0, 1), 2)
        return (group, np.where(overdue, waiting_since, 0.0), *self.order.keys(facts, now, capacity))

    def overdue(self, facts: Facts, gpus: int) -> Flags:
        """Of who waits too long, or has not had its turn for a wait that was, those who go first now."""
        if self._nobody_is_due(facts):
            return np.zeros(len(facts), bool)
        overdue = self._is_due(facts)
        if self.order.overdue_share < 1 and overdue.any():
            # By priority, then by when the waits began, whether they are over or not.
            jobs = np.flatnonzero(overdue)
            since = np.round(_since_began(facts)[jobs], 3)
            jobs = jobs[sorted_by(-facts.priority[jobs], -since, facts.arrival_s[jobs], facts.number[jobs])]
            within = np.cumsum(facts.gpus[jobs]) <= self.order.overdue_share * gpus
            within[0] = True
            overdue[jobs[~within]] = False
        return overdue

    def _is_due(self, facts: Facts) -> Flags:
        waited_s, limit_s = self._waits(facts)
        has_turn = ~facts.is_running | (facts.stretch_s + SLACK_S < self.share * waited_s)
        overdue: Flags = (waited_s + SLACK_S >= limit_s) & has_turn
        return overdue

    def next_change(self, facts: Facts, now: float) -> float:
        """When the first wait becomes too long, the first turn ends, or the order below changes."""
        if self._nobody_is_due(facts):
            # Most are neither overdue nor wait.
            waits = np.flatnonzero(~facts.is_running)
            limit_s = np.maximum(self.after_s, self.factor * (facts.attained_s - facts.stretch_s)[waits])
            soonest = float((limit_s - facts.waited_s[waits]).min(initial=np.inf))
            return min(now + soonest, next_change_s(self.order, facts, now))
        waited_s, limit_s = self._waits(facts)
        overdue = self._is_due(facts)
        until_overdue = (limit_s - waited_s)[~facts.is_running & ~overdue]
        until_end = (self.share * waited_s - facts.stretch_s)[facts.is_running & overdue]
        soonest = min(float(until_overdue.min(initial=np.inf)), float(until_end.min(initial=np.inf)))
        return min(now + soonest, next_change_s(self.order, facts, now))

    def _nobody_is_due(self, facts: Facts) -> bool:
        """By the least wait that is too long."""
        # As `max` of the columns, which takes twice as long: this is asked several times in each pass.
        longest_s = max([np.maximum.reduce(waits, initial=0.0) for waits in (facts.waited_s, facts.waited_before_s)])
        return bool(longest_s + SLACK_S < self.after_s)

    def _waits(self, facts: Facts) -> tuple[Floats, Floats]:
        """Seconds of the present wait, or the one before the present stretch, and what is too long for it."""
        waited_s = np.where(facts.is_running, facts.waited_before_s, facts.waited_s)
        return waited_s, np.maximum(self.after_s, self.factor * (facts.attained_s - facts.stretch_s))


def _since_began(facts: Facts) -> Floats:
    """Seconds since the present wait began, or the one before the present stretch."""
    return facts.waited_s + facts.stretch_s + facts.waited_before_s


def with_aging(order: JobOrder, after_s: float = WEEK_S, factor: float = 1.0, share: float = 0.1) -> JobOrder:
    """The order, with bounded waiting; named as before."""
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
