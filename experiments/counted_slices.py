"""Time slices on a cluster of which any free GPUs serve: running jobs are chosen by counts, as in the public simulator
of Tiresias with its placement `count`.

At the beginning of each turn all jobs that have come are ranked and the first that fit together run; between slices
no job is stopped, and GPUs that are free go to the first in order that fits. Switching costs nothing. What decides are
the production's orders.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ganger_master.policies.job_facts import Capacity, Facts, Floats
from ganger_master.policies.orders import JobOrder, ranked, selected
from ganger_master.simulator.traces.workload import Workload
from msgspec.structs import fields

# What is left of a second by rounding is nothing.
_NOTHING_S = 1e-6


@dataclass(frozen=True, eq=False)
class CountedSlices:
    """Of each job, in seconds: when it ended, and when it first ran."""

    end_s: Floats
    started_s: Floats


def in_turns(jobs: Workload, gpus: int, order: JobOrder, turn_s: float) -> CountedSlices:
    """All jobs to their ends, on a cluster of so many GPUs; none asks for more."""
    assert (jobs.gpus <= gpus).all(), "a gang is larger than the cluster"
    count = len(jobs)
    left, end, started = jobs.duration_s.copy(), np.full(count, np.inf), np.full(count, np.inf)
    # When each began to run, and to wait, and how long it had waited before it ran.
    began, waits_since, waited_before = np.zeros(count), jobs.submit_s.copy(), np.zeros(count)
    runs = np.zeros(count, bool)
    capacity = Capacity(gpus, 0.0, 0.0, gpus)
    now, next_turn = 0.0, 0.0
    while left.any():
        is_turn = now >= next_turn
        if is_turn:
            next_turn = turn_s * (np.floor(now / turn_s) + 1.0)
        live = np.flatnonzero((jobs.submit_s <= now) & (left > 0.0))
        known = {
            "number": live + 1,
            "arrival_s": jobs.submit_s[live],
            "gpus": jobs.gpus[live],
            "priority": np.zeros(len(live), np.int64),
            "weight": np.ones(len(live)),
            "is_running": runs[live],
            "is_preemptible": np.full(len(live), is_turn),
            "attained_s": (jobs.duration_s - left)[live],
            "waited_s": np.where(runs, 0.0, now - waits_since)[live],
            "started_s": started[live],
            "stretch_s": np.where(runs, now - began, 0.0)[live],
            "waited_before_s": waited_before[live],
            "remaining_s": left[live],
        }
        facts = Facts(**{column.name: known.get(column.name, np.full(len(live), np.nan)) for column in fields(Facts)})
        chosen = np.zeros(count, bool)
        chosen[live[selected(order, facts, ranked(order, facts, now, capacity), gpus)]] = True
        entering, leaving = chosen & ~runs, runs & ~chosen
        began[entering], waited_before[entering] = now, (now - waits_since)[entering]
        started[entering] = np.minimum(started[entering], now)
        waits_since[leaving] = now
        runs = chosen
        # Until a job ends or comes; while a job is live, at most one slice.
        coming = jobs.submit_s[jobs.submit_s > now]
        upto = min(
            float((now + left[runs]).min(initial=np.inf)),
            float(coming.min(initial=np.inf)),
            next_turn if len(live) else np.inf,
        )
        left[runs] -= upto - now
        over = runs & (left < _NOTHING_S)
        end[over], left[over], runs = upto, 0.0, runs & ~over
        now = upto
    return CountedSlices(end, started)
