"""Tiresias (Gu et al., NSDI 2019, section 3.3): queues by attained GPU-seconds, without a history (2D-LAS) and with one
(2D-Gittins).

A job starts in the first queue and drops into the next as its GPU-seconds reach each threshold. Earlier queues go
first. Inside a queue running jobs keep their places; then the earlier start goes first, then the earlier arrival.
With a promote knob a job returns to the first queue once it has waited `knob` x as long as it had run.

Differences from the authors' simulator (`dlas-gpu`, `gittins`):

* A demotion comes after (threshold / GPUs - executed) seconds of running, not after (threshold - executed) / GPUs.
* A promotion does not reset attained service. It lasts for the stretch that it starts: queues count from the beginning
  of that stretch, and all attained service counts again afterwards.
* The expectation in Gittins's index is of S - a, not of S, which would make long-served jobs look worse than they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Flags, Floats, Integers
from ganger_master.policies.orders import SLACK_S, JobOrder
from ganger_master.policies.service_history import ServiceHistory

# GPU-seconds; three queues, as in the authors' simulator (Pollux's port has one threshold, 57,600).
THRESHOLDS = (3250.0, 7200.0)


@dataclass(frozen=True, slots=True)
class Queues:
    """Tiresias's queues. `thresholds`: ascending, in GPU-seconds, one less than there are queues. `promote_knob`: None
    promotes no job."""

    thresholds: tuple[float, ...] = THRESHOLDS
    promote_knob: float | None = None

    def __post_init__(self) -> None:
        assert all(a < b for a, b in zip((0.0, *self.thresholds), self.thresholds, strict=False)), self.thresholds
        assert self.promote_knob is None or self.promote_knob > 0, self.promote_knob

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        """Tiresias without a history (2D-LAS): few attained GPU-seconds first, in queues, to limit preemptions."""
        return (self.queue(facts), ~facts.is_running, facts.started_s)

    def queue(self, facts: Facts) -> Integers:
        """Return the queue of each job; 0 goes first."""
        return self._queue(self.counted_s(facts), facts.gpus)

    def counted_s(self, facts: Facts) -> Floats:
        """Return the seconds of running that count for the queue."""
        counted: Floats = np.where(self._is_promoted(facts), facts.stretch_s, facts.attained_s)
        return counted

    def until_demotion(self, facts: Facts) -> Floats:
        """Return the GPU-seconds until the next queue; infinite in the last."""
        counted_s = self.counted_s(facts)
        limits = np.array((*self.thresholds, np.inf))
        rest: Floats = limits[self._queue(counted_s, facts.gpus)] - counted_s * facts.gpus
        return rest

    def next_change(self, facts: Facts, now: float) -> float:
        """Return when the first running job is demoted or the first pending one promoted."""
        is_held = facts.is_running & (facts.gpus > 0)
        delays_s = self.until_demotion(facts)[is_held] / facts.gpus[is_held]
        soonest_s = float(delays_s.min(initial=np.inf))
        if self.promote_knob is not None:
            can_rise = ~facts.is_running & (self._queue(facts.attained_s, facts.gpus) > 0) & ~self._is_promoted(facts)
            delays_s = self.promote_knob * facts.attained_s[can_rise] - facts.waited_s[can_rise]
            soonest_s = min(soonest_s, float(delays_s.min(initial=np.inf)))
        return now + soonest_s

    def _is_promoted(self, facts: Facts) -> Flags:
        """Return which jobs are promoted by their present wait, or by the wait before their present stretch."""
        if self.promote_knob is None:
            return np.zeros(len(facts), bool)
        before_s = facts.attained_s - facts.stretch_s
        wait_s = np.where(facts.is_running, facts.waited_before_s, facts.waited_s)
        promoted: Flags = (self._queue(before_s, facts.gpus) > 0) & (wait_s + SLACK_S >= self.promote_knob * before_s)
        return promoted

    def _queue(self, seconds: Floats, gpus: Integers) -> Integers:
        return np.searchsorted(self.thresholds, (seconds + SLACK_S) * gpus, side="right")


def tiresias(thresholds: tuple[float, ...] = THRESHOLDS, promote_knob: float | None = None) -> JobOrder:
    """Return the 2D-LAS order with these queues."""
    queues = Queues(thresholds, promote_knob)
    return JobOrder("tiresias", queues.keys, next_change=queues.next_change)


TIRESIAS = tiresias()


@dataclass(frozen=True, slots=True, eq=False)
class GittinsQueues:
    """Tiresias's queues, each sorted by Gittins's index.

    With S the GPU-seconds of ended jobs, a those that a job has attained and D those until it drops into the next queue
    (no limit in the last), the index is (Gittins 1989)

        G(a, D) = P(S - a <= D | S > a) / E[min(S - a, D) | S > a].

    A job that has outlived the whole history has index 0. Ties rank as in `tiresias`.
    """

    queues: Queues
    history: ServiceHistory

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        """Tiresias with a history (2D-Gittins): as `tiresias`; in a queue the job likeliest to end soon goes first."""
        index = self.history.index(facts.service, self.queues.until_demotion(facts))
        return (self.queues.queue(facts), -index, ~facts.is_running, facts.started_s)


def tiresias_gittins(
    history: ServiceHistory, thresholds: tuple[float, ...] = THRESHOLDS, promote_knob: float | None = None
) -> JobOrder:
    """Return the 2D-Gittins order with these queues and this history."""
    queues = Queues(thresholds, promote_knob)
    return JobOrder(
        "tiresias-gittins",
        GittinsQueues(queues, history).keys,
        next_change=queues.next_change,
        with_history=partial(tiresias_gittins, thresholds=thresholds, promote_knob=promote_knob),
    )
