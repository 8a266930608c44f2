"""Tasks of several resources on a few nodes, one by one as there is room: what the Tetris studies schedule.

The production core carries gangs of GPUs, cores and memory that start whole; jobs made of tasks that start and end each
for itself, and demands for disk and network, it does not have. Hence this small simulation; what
decides in it is `tetris_pass`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from ganger_master.policies.job_facts import Floats, Integers
from ganger_master.policies.tetris import Alignment, Knobs

from experiments.tetris_pass import aligned, tetris_pass

# Shares of nodes are sums of floats.
_SLACK = 1e-9
_DIGITS = 9


@dataclass(frozen=True, eq=False)
class TaskJobs:
    """In order of arrival. `demands` (jobs x resources) of each task in shares of a node; `seconds` (jobs x tasks)."""

    arrival_s: Floats
    demands: Floats
    seconds: Floats

    @property
    def work(self) -> Floats:
        """(resources) node-seconds of all tasks."""
        return np.asarray(self.seconds.sum(axis=1) @ self.demands, float)


@dataclass(eq=False)
class LiveTasks:
    """What a rule may look at: of jobs that have come, tasks that have not begun, and what is free on each node.
    `changed`: nodes on which something was freed, or None: a job came, so that all are to be looked at."""

    jobs: TaskJobs
    pending: Integers
    free: Floats
    running: Integers
    changed: int | None

    @property
    def come(self) -> list[int]:
        """Jobs with tasks that wait, first come first."""
        return np.flatnonzero(self.pending > 0).tolist()


# Which tasks begin now: (job, node) one after the other, each of which fits.
Rule: TypeAlias = Callable[[LiveTasks], list[tuple[int, int]]]


def simulated(jobs: TaskJobs, nodes: int, rule: Rule) -> tuple[float, Floats]:
    """(makespan, time of each job from arrival to the end of its last task), seconds; the first arrival is at 0."""
    count, tasks = jobs.seconds.shape
    live = LiveTasks(
        jobs, np.zeros(count, np.int64), np.ones((nodes, jobs.demands.shape[1])), np.zeros(count, np.int64), None
    )
    ends: list[tuple[float, int, int]] = []
    finished = np.zeros(count)
    next_arrival = 0
    while next_arrival < count or ends:
        arrival = float(jobs.arrival_s[next_arrival]) if next_arrival < count else np.inf
        if ends and ends[0][0] < arrival:
            now, job, node = heapq.heappop(ends)
            live.free[node] += jobs.demands[job]
            live.running[job] -= 1
            finished[job], live.changed = now, node
        else:
            now = arrival
            live.pending[next_arrival] = tasks
            next_arrival += 1
            live.changed = None
        for job, node in rule(live):
            begun = tasks - int(live.pending[job])
            live.free[node] -= jobs.demands[job]
            live.pending[job] -= 1
            live.running[job] += 1
            assert (live.free[node] >= -_SLACK * tasks).all(), "a node was given away twice"
            heapq.heappush(ends, (now + float(jobs.seconds[job, begun]), job, node))
    assert not live.pending.any(), "tasks were left behind"
    return float(finished.max() - jobs.arrival_s[0]), finished - jobs.arrival_s


def fifo(is_strict: bool) -> Rule:
    """First come first served, each task on the first node it fits. Strict: a task that does not fit blocks the
    rest."""
    return _one_by_one(lambda free, demand: np.zeros(len(free)), is_strict)


def best_node(kind: Alignment) -> Rule:
    """First come first served; a task that does not fit is skipped; each task on the node it is best aligned with."""
    return _one_by_one(lambda free, demand: aligned(demand[None], free, kind)[0], is_strict=False)


def tetris(knobs: Knobs) -> Rule:
    """Tetris's own: each node takes the task that suits it best."""

    def rule(live: LiveTasks) -> list[tuple[int, int]]:
        jobs = live.jobs
        nodes = np.arange(len(live.free)) if live.changed is None else np.array([live.changed])
        left = live.pending + live.running
        work = jobs.demands.sum(axis=1) * jobs.seconds.mean(axis=1) * left
        held = (jobs.demands * live.running[:, None]).max(axis=1)
        placed = tetris_pass(jobs.demands, live.pending, work, live.free[nodes], held, knobs=knobs)
        return [
            (job, int(nodes[place]))
            for job, place in zip(*map(np.ndarray.tolist, np.nonzero(placed)), strict=True)
            for _ in range(int(placed[job, place]))
        ]

    return rule


def _one_by_one(score: Callable[[Floats, Floats], Floats], is_strict: bool) -> Rule:
    def rule(live: LiveTasks) -> list[tuple[int, int]]:
        free = live.free.copy()
        begun: list[tuple[int, int]] = []
        for job in live.come:
            demand = live.jobs.demands[job]
            for _ in range(int(live.pending[job])):
                fits = (free >= demand - _SLACK).all(axis=1)
                if not fits.any():
                    if is_strict:
                        return begun
                    break
                node = int(np.argmax(np.where(fits, np.round(score(free, demand), _DIGITS), -np.inf)))
                free[node] -= demand
                begun.append((job, node))
        return begun

    return rule
