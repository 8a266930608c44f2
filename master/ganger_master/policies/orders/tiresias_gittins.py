"""Tiresias with a history (2D-Gittins): as `tiresias`, and in a queue who most probably ends soon goes first.

Gu et al., NSDI 2019, section 3.3, after Gittins 1989: with S the GPU-seconds of jobs that have ended, a those a job has
attained and D those it may take until it falls into the next queue (no limit in the last),

    G(a, D) = P(S - a <= D | S > a) / E[min(S - a, D) | S > a].

Different from the authors' simulator, whose expectation sums S instead of S - a, so that long-served jobs look worse
than they are. A job that has outlived all of the history has index 0; ties are ranked as in `tiresias`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.job_facts import Capacity, Facts
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.orders.tiresias import THRESHOLDS, Queues
from ganger_master.policies.service_history import ServiceHistory


@dataclass(frozen=True, slots=True, eq=False)
class GittinsQueues:
    queues: Queues
    history: ServiceHistory

    def keys(self, facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
        index = self.history.index(facts.service, self.queues.until_demotion(facts))
        return (self.queues.queue(facts), -index, ~facts.is_running, facts.started_s)


def tiresias_gittins(
    history: ServiceHistory, thresholds: tuple[float, ...] = THRESHOLDS, promote_knob: float | None = None
) -> JobOrder:
    queues = Queues(thresholds, promote_knob)
    return JobOrder(
        "tiresias-gittins",
        GittinsQueues(queues, history).keys,
        next_change=queues.next_change,
        with_history=partial(tiresias_gittins, thresholds=thresholds, promote_knob=promote_knob),
    )
