"""Tiresias without knowledge (2D-LAS): few attained GPU-seconds first, in queues, so that jobs take few turns.

Gu et al., NSDI 2019, section 3.3, and the authors' simulator (`dlas-gpu`). A job starts in the first queue and falls
into the next as its GPU-seconds reach each threshold. Earlier queues go first; in a queue who runs keeps its place,
then who started earlier goes first, then who arrived earlier. With a knob a job that waits knob x as long as it had
run before is promoted to the first queue.

Different from the simulator: a demotion comes after (threshold / GPUs - executed) seconds of running, not after
(threshold - executed) / GPUs; and a promotion does not set attained service to zero. It lasts for the stretch that it
brings: queues count from the beginning of that stretch, and all that was attained counts again once it is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts, Flags, Floats, Integers
from ganger_master.policies.orders import SLACK_S, JobOrder

# GPU-seconds; three queues, as in the authors' simulator (Pollux's port has one threshold, 57,600).
THRESHOLDS = (3250.0, 7200.0)


@dataclass(frozen=True, slots=True)
class Queues:
    """`thresholds`: ascending GPU-seconds, one less than there are queues. `promote_knob`: none promotes nobody."""

    thresholds: tuple[float, ...] = THRESHOLDS
    promote_knob: float | None = None

    def __post_init__(self) -> None:
        assert all(a < b for a, b in zip((0.0, *self.thresholds), self.thresholds, strict=False)), self.thresholds
        assert self.promote_knob is None or self.promote_knob > 0, self.promote_knob

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        return (self.queue(facts), ~facts.is_running, facts.started_s)

    def queue(self, facts: Facts) -> Integers:
        """In which queue each job is; 0 goes first."""
        return self._queue(self.counted_s(facts), facts.gpus)

    def counted_s(self, facts: Facts) -> Floats:
        """Seconds of running that count for the queue."""
        counted: Floats = np.where(self._is_promoted(facts), facts.stretch_s, facts.attained_s)
        return counted

    def until_demotion(self, facts: Facts) -> Floats:
        """GPU-seconds until the next queue; infinite in the last."""
        counted_s = self.counted_s(facts)
        limits = np.array((*self.thresholds, np.inf))
        rest: Floats = limits[self._queue(counted_s, facts.gpus)] - counted_s * facts.gpus
        return rest

    def next_change(self, facts: Facts, now: float) -> float:
        """When the first who runs is demoted, or the first who waits is promoted."""
        runs = facts.is_running & (facts.gpus > 0)
        delays = self.until_demotion(facts)[runs] / facts.gpus[runs]
        soonest = float(delays.min(initial=np.inf))
        if self.promote_knob is not None:
            waits = ~facts.is_running & (self._queue(facts.attained_s, facts.gpus) > 0) & ~self._is_promoted(facts)
            delays = self.promote_knob * facts.attained_s[waits] - facts.waited_s[waits]
            soonest = min(soonest, float(delays.min(initial=np.inf)))
        return now + soonest

    def _is_promoted(self, facts: Facts) -> Flags:
        """By the wait it is in, or the one before the stretch it is in; never twice by the same."""
        if self.promote_knob is None:
            return np.zeros(len(facts), bool)
        before_s = facts.attained_s - facts.stretch_s
        wait_s = np.where(facts.is_running, facts.waited_before_s, facts.waited_s)
        promoted: Flags = (self._queue(before_s, facts.gpus) > 0) & (wait_s + SLACK_S >= self.promote_knob * before_s)
        return promoted

    def _queue(self, seconds: Floats, gpus: Integers) -> Integers:
        return np.searchsorted(self.thresholds, (seconds + SLACK_S) * gpus, side="right")


def tiresias(thresholds: tuple[float, ...] = THRESHOLDS, promote_knob: float | None = None) -> JobOrder:
    queues = Queues(thresholds, promote_knob)
    return JobOrder("tiresias", queues.keys, next_change=queues.next_change)


TIRESIAS = tiresias()
