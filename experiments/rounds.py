"""Rounds that are packed anew from empty servers, as Synergy's own simulator has them (OSDI 2022, section 5).

Every round the jobs that came by its beginning are ranked, the first whose GPUs are there together run, and a tuning
places them and gives each its cores and memory; they run at the rate of their profile to the round's end, where ends
are stamped. Jobs may be elsewhere in every round, which costs nothing unless told: the setting of its published
figures, which the simulator of traces, where a gang stays where it is and a start takes time, does not reproduce. What
decides are the production's orders and tunings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ganger_master.policies.orders import FACT_COLUMNS, Capacity, Facts, Floats, Integers, JobOrder, ranked
from ganger_master.policies.tunings import (
    Gangs,
    Pieces,
    Tuning,
    TuningNodes,
    pieces,
    proportionally,
    rates,
    runnable,
)
from ganger_master.policies.tunings.catalogue import PROPORTIONAL
from scipy.optimize import linear_sum_assignment

ROUND_S = 300.0
_NOWHERE = -1


@dataclass(frozen=True, eq=False)
class RoundJobs:
    """In order of arrival. `seconds`: how long each runs with its proportional share; `gangs`, with its profile."""

    arrival_s: Floats
    seconds: Floats
    gangs: Gangs

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, eq=False)
class RoundTimes:
    """Of each job, in seconds: when it ended, and in which rounds it held its GPUs, all together."""

    end_s: Floats
    held_s: Floats


def through_rounds(
    jobs: RoundJobs,
    nodes: TuningNodes,
    order: JobOrder,
    tuning: Tuning,
    measured: slice = slice(None),
    move_s: float = 0.0,
) -> RoundTimes:
    """Until the measured jobs have ended; infinite for those that run even then. The tuning must place, or be
    proportional: then it makes no difference where a gang lies. `move_s`: seconds that a gang of one GPU loses when it
    is on another server than in the round before. Servers must be alike; they are renamed so that the fewest move."""
    left, end = jobs.seconds.copy(), np.full(len(jobs), np.inf)
    attained = np.zeros(len(jobs))
    before, speed = np.full(1, -1), np.zeros(1)
    was_on = np.full(len(jobs), _NOWHERE)
    capacity = Capacity(
        int(nodes.gpus.sum()), float(nodes.cores.sum()), float(nodes.memory_bytes.sum()), int(nodes.gpus.max())
    )
    now = 0.0
    while left[measured].any():
        live = np.flatnonzero((jobs.arrival_s <= now) & (left > 0.0))
        if len(live):
            line = live[ranked(order, _facts(jobs, live, left, attained, now), now, capacity)]
            of_round = line[runnable(jobs.gangs.take(line), nodes)]
            trained_s = ROUND_S * speed
            # The same jobs are packed the same way again.
            if not np.array_equal(of_round, before):
                run = jobs.gangs.take(of_round)
                placed = _placed(run, nodes, tuning)
                before, speed = of_round, _speeds(run, nodes, placed)
                trained_s = ROUND_S * speed
                if move_s and placed is not None:
                    is_on = _renamed(_servers(run, placed), was_on[of_round], len(nodes))
                    has_moved = (was_on[of_round] != _NOWHERE) & (is_on != _NOWHERE) & (is_on != was_on[of_round])
                    trained_s[has_moved] -= move_s * speed[has_moved]
                    was_on[:] = _NOWHERE
                    was_on[of_round] = is_on
            left[of_round] = np.maximum(left[of_round] - trained_s, 0.0)
            attained[of_round[speed > 0.0]] += ROUND_S
            # what is left of a second by rounding is nothing
            left[left < 1e-6] = 0.0
            end[of_round[left[of_round] == 0.0]] = now + ROUND_S
        now += ROUND_S
    return RoundTimes(end, attained)


def ends(jobs: RoundJobs, nodes: TuningNodes, order: JobOrder, tuning: Tuning, measured: slice = slice(None)) -> Floats:
    """When each job ended."""
    return through_rounds(jobs, nodes, order, tuning, measured).end_s


def fill(run: Gangs, nodes: TuningNodes) -> Pieces:
    """Gangs of one GPU each with its proportional share, server after server."""
    assert (run.gpus == 1).all(), "larger gangs need a packing"
    servers = np.repeat(np.arange(len(nodes)), nodes.gpus)[: len(run)]
    return proportionally(nodes, pieces(np.arange(len(run)), servers, run.gpus))


def _placed(run: Gangs, nodes: TuningNodes, tuning: Tuning) -> Pieces | None:
    """None: anywhere."""
    if tuning.place is None:
        assert tuning is PROPORTIONAL, f"{tuning.name} does not place"
        return None
    return tuning.place(run, nodes)


def _speeds(run: Gangs, nodes: TuningNodes, placed: Pieces | None) -> Floats:
    """Of each gang, by that with its proportional share; zero for those that are not placed."""
    if placed is None:
        return np.ones(len(run))
    share = rates(run, proportionally(nodes, placed))
    return np.divide(rates(run, placed), share, out=np.zeros(len(run)), where=share > 0.0)


def _servers(run: Gangs, placed: Pieces) -> Integers:
    assert (run.gpus == 1).all(), "larger gangs may be on several servers"
    found = np.full(len(run), _NOWHERE)
    found[placed.gang] = placed.node
    return found


def _renamed(is_on: Integers, was_on: Integers, servers: int) -> Integers:
    """`is_on` with the servers renamed so that as many gangs as can be are where they were."""
    together = np.zeros((servers, servers))
    both = (is_on != _NOWHERE) & (was_on != _NOWHERE)
    np.add.at(together, (is_on[both], was_on[both]), 1.0)
    names = linear_sum_assignment(together, maximize=True)[1]
    return np.where(is_on == _NOWHERE, _NOWHERE, names[is_on])


def _facts(jobs: RoundJobs, live: Integers, left: Floats, attained: Floats, now: float) -> Facts:
    """What these orders look at; whatever else there is to know is unknown."""
    count = len(live)
    known = {
        "number": live + 1,
        "arrival_s": jobs.arrival_s[live],
        "gpus": jobs.gangs.gpus[live],
        "priority": np.zeros(count, np.int64),
        "weight": np.ones(count),
        "attained_s": attained[live],
        "waited_s": now - jobs.arrival_s[live],
        "remaining_s": left[live],
    }
    columns: dict[str, Any] = {name: known.get(name, np.full(count, np.nan)) for name in FACT_COLUMNS}
    return Facts(**columns)
