"""Rounds that are packed anew from empty servers, as Synergy's own simulator has them (OSDI 2022, section 5).

Every round the jobs that came by its beginning are ranked, the first whose GPUs are there together run, and a tuning
places them and gives each its cores and memory; they run at the rate of their profile to the round's end, where ends
are stamped. Nothing else costs time and jobs may be elsewhere in every round: the setting of its published figures,
which the simulator of traces, where a gang stays where it is and a start takes time, does not reproduce. What decides
are the production's orders and tunings.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ganger_master.policies.facts import Capacity, Facts, Floats, Integers
from ganger_master.policies.order import Order, ranked
from ganger_master.policies.tune import (
    Gangs,
    Nodes,
    Pieces,
    Tuning,
    pieces,
    proportional_rates,
    proportionally,
    rates,
    runnable,
)
from ganger_master.policies.tune.proportional import PROPORTIONAL

ROUND_S = 300.0


@dataclass(frozen=True, eq=False)
class RoundJobs:
    """In order of arrival. `seconds`: how long each runs with its proportional share; `gangs`, with its profile."""

    arrival_s: Floats
    seconds: Floats
    gangs: Gangs

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, eq=False)
class Ended:
    """Of each job, in seconds: when it ended, and in which rounds it held its GPUs, all together."""

    end_s: Floats
    held_s: Floats


def through_rounds(jobs: RoundJobs, nodes: Nodes, order: Order, tuning: Tuning) -> Ended:
    """All jobs to their ends. The tuning must place."""
    left, end = jobs.seconds.copy(), np.full(len(jobs), np.inf)
    attained = np.zeros(len(jobs))
    before, speed = np.full(1, -1), np.zeros(1)
    capacity = Capacity(
        int(nodes.gpus.sum()), float(nodes.cores.sum()), float(nodes.memory_bytes.sum()), int(nodes.gpus.max())
    )
    now = 0.0
    while left.any():
        live = np.flatnonzero((jobs.arrival_s <= now) & (left > 0.0))
        if len(live):
            line = live[ranked(order, _facts(jobs, live, left, attained, now), now, capacity)]
            of_round = line[runnable(jobs.gangs.take(line), nodes)]
            # The same jobs are packed the same way again.
            if not np.array_equal(of_round, before):
                before, speed = of_round, _speeds(jobs.gangs.take(of_round), nodes, tuning)
            left[of_round] = np.maximum(left[of_round] - ROUND_S * speed, 0.0)
            attained[of_round[speed > 0.0]] += ROUND_S
            # what is left of a second by rounding is nothing
            left[left < 1e-6] = 0.0
            end[of_round[left[of_round] == 0.0]] = now + ROUND_S
        now += ROUND_S
    return Ended(end, attained)


def ends(jobs: RoundJobs, nodes: Nodes, order: Order, tuning: Tuning) -> Floats:
    """When each job ended."""
    return through_rounds(jobs, nodes, order, tuning).end_s


def fill(run: Gangs, nodes: Nodes) -> Pieces:
    """Gangs of one GPU each with its proportional share, server after server."""
    assert (run.gpus == 1).all(), "larger gangs need a packing"
    servers = np.repeat(np.arange(len(nodes)), nodes.gpus)[: len(run)]
    return proportionally(nodes, pieces(np.arange(len(run)), servers, run.gpus))


def _speeds(run: Gangs, nodes: Nodes, tuning: Tuning) -> Floats:
    """Of each gang, by that with its proportional share; zero for those the tuning leaves out."""
    assert tuning.place is not None, f"{tuning.name} does not place"
    placed = tuning.place(run, nodes)
    share = proportional_rates(run, nodes, placed)
    return np.divide(rates(run, placed), share, out=np.zeros(len(run)), where=share > 0.0)


FILLED = Tuning("proportional", PROPORTIONAL.tune, fill, guarantees=True)


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
    return Facts(**{column.name: known.get(column.name, np.full(count, np.nan)) for column in fields(Facts)})
