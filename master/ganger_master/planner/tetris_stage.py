"""Tetris's pass (Grandl et al., SIGCOMM 2014): start the pending jobs that align best with free resources and have
little work left. Beyond the paper, overdue jobs (`order.aging`) come first; it bounds no wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.fit import bandwidth_of
from ganger.cluster.resources import DIMENSIONS, UNLIMITED_MB_PER_S, GangShape
from ganger.cluster.search import Claims, PlacementRequest
from ganger.cluster.view import View

from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import PlanChange, StartChange
from ganger_master.planner.context import PlanContext, PlanDraft, held_by_all
from ganger_master.planner.gang_fitting import nodes_for
from ganger_master.planner.job_table import LiveTable
from ganger_master.policies.order_registry import expected_s
from ganger_master.policies.orders import (
    Capacity,
    Facts,
    Flags,
    Floats,
    Integers,
    chosen,
    guarded,
    next_change_s,
    ranked,
)
from ganger_master.policies.placements import PlacementPreference
from ganger_master.policies.tetris import Knobs, placement_by, tetris_gangs

# The oldest pending jobs that are scored. A limit bounds the pass.
_MOST_WEIGHED = 1_000


def plan_tetris(knobs: Knobs, context: PlanContext) -> PlanDraft:
    """Return the starts to propose now. The order decides which jobs are overdue; excluded ones are left out."""
    table, order, now, excluded = context.jobs, context.order, context.now, context.excluded
    if not table.has_waiting:
        return PlanDraft()
    capacity, remaining_s, room = context.capacity, context.remaining_s, context.room
    asks = knobs.srtf_weight > 0.0
    rows, facts = table.facts(now, expects=asks and remaining_s is None)
    work = np.zeros(len(facts))
    if asks:
        left = expected_s(facts) if remaining_s is None else remaining_s(facts.number)
        work = (_parts(facts, capacity).sum(axis=0) + _bandwidth_parts(table, rows, room.view).sum(axis=0)) * left
    line = ranked(order, facts, now, capacity)
    line = line[table.is_waiting(rows)[line]]
    refused = list(excluded.not_started)
    waiting = line[~np.isin(facts.number[line], refused)][:_MOST_WEIGHED] if refused else line[:_MOST_WEIGHED]
    overdue, _ = guarded(order, facts, capacity.gpus)
    jobs = [job for row in rows[waiting].tolist() if (job := table.jobs[row]) is not None]
    room.follow()
    starting = _Starting(knobs, jobs, table, room)
    shares = _shares(facts, np.concatenate((_parts(facts, capacity), _bandwidth_parts(table, rows, room.view))))
    work, shares = work[waiting], shares[waiting]
    ahead, behind = starting.overdue(np.flatnonzero(overdue[waiting]))
    is_first = _first_by_teams(facts, waiting, room.free_devices)
    starting.best(ahead, work, shares, is_first)
    with room.excluding(starting.kept):
        starting.best(behind, work, shares, is_first)
    starts = starting.undone()
    return PlanDraft(starts, len(starts) < len(jobs), next_change_s(order, facts, now), facts.number[line])


def _first_by_teams(facts: Facts, waiting: Integers, free: int) -> Flags:
    """Return which pending jobs have so many free GPUs by the shares of teams; without teams all of them."""
    if facts.teams is None:
        return np.ones(len(waiting), bool)
    found = np.zeros(len(waiting), bool)
    found[chosen(np.arange(len(waiting)), facts.gpus[waiting], free)] = True
    return found


class _Starting:
    def __init__(self, knobs: Knobs, jobs: Sequence[JobRecord], table: LiveTable, room: CapacityIndex) -> None:
        self._knobs, self._jobs, self._table = knobs, jobs, table
        self._room = room
        self._found: list[tuple[int, Claims]] = []
        # Nodes where overdue jobs that fit nowhere could run.
        self.kept = frozenset[str]()

    def overdue(self, overdue: Integers) -> tuple[Integers, Integers]:
        """Start overdue jobs (positions), in order. Return the others before and behind the first that fits nowhere."""
        placement, room = placement_by(self._knobs), self._room
        count = len(self._jobs)
        first = count
        for at in overdue.tolist():
            shape = self._jobs[at].shape
            claims = placement.place(room, PlacementRequest(shape, avoid=self.kept))
            if claims is not None:
                room.take(claims)
                self._found.append((at, claims))
            elif self._would_fit(placement, shape):
                first = min(first, at)
                self.kept |= nodes_for(room.view, shape)
        others = np.setdiff1d(np.arange(count), overdue)
        return others[others < first], others[others > first]

    def best(self, positions: Integers, work: Floats, shares: Floats, is_first: Flags) -> None:
        """Start the jobs that align best with free resources, those of `is_first` first. Each partition is served
        by itself, so that a queue in one leaves no node of another idle. The amounts and flags are those of all pending
        jobs."""
        first = is_first[positions]
        for part in (*self._by_partition(positions[first]), *self._by_partition(positions[~first])):
            shapes = [self._jobs[at].shape for at in part.tolist()]
            for at, claims in tetris_gangs(self._room, shapes, work[part], shares[part], self._knobs):
                self._found.append((int(part[at]), claims))

    def _by_partition(self, positions: Integers) -> list[Integers]:
        """Return the jobs of each partition, those of the highest priority first, and apart from them jobs that some of
        its nodes are closed to; without partitions and closed nodes all of them."""
        if not self._table.is_partitioned:
            return [positions]
        found: dict[tuple[int, str, int], list[int]] = {}
        numbers: dict[frozenset[str], int] = {}
        for at in positions.tolist():
            terms, closed = self._jobs[at].partition, self._jobs[at].closed_nodes
            found.setdefault((-terms.priority, terms.name, numbers.setdefault(closed, len(numbers))), []).append(at)
        return [np.array(found[key], np.int64) for key in sorted(found)]

    def undone(self) -> tuple[PlanChange, ...]:
        """Restore the capacity index, and return the starts in the order in which they were found."""
        for _, claims in reversed(self._found):
            self._room.give(claims)
        jobs = self._jobs
        return tuple([StartChange(jobs[at].number, jobs[at].revision, claims) for at, claims in self._found])

    def _would_fit(self, placement: PlacementPreference, shape: GangShape) -> bool:
        trial = Trial(self._room)
        for claims in held_by_all(self._table):
            trial.give(claims)
        found = placement.place(self._room, PlacementRequest(shape))
        trial.undo()
        return found is not None


def _shares(facts: Facts, parts: Floats) -> Floats:
    """Return for each job its user's largest share of any resource, by the user's weight. `parts`: resources x jobs."""
    held = np.where(facts.is_running, parts, 0.0)
    users = int(facts.user.max(initial=0)) + 1
    by_user = np.array([np.bincount(facts.user, part, users) for part in held]).max(axis=0)
    return np.asarray(by_user[facts.user] / facts.weight, float)


def _parts(facts: Facts, capacity: Capacity) -> Floats:
    """Return the parts of all GPUs, cores and memory that each gang takes (resources x jobs)."""
    amounts = np.array([facts.gpus, facts.cores, facts.memory_bytes], float)
    there_is = np.array([capacity.gpus, capacity.cores, capacity.memory_bytes])[:, None]
    return np.asarray(np.divide(amounts, there_is, out=np.zeros_like(amounts), where=there_is > 0), float)


def _bandwidth_parts(table: LiveTable, rows: Integers, view: View) -> Floats:
    """Return the parts of all declared disk and network bandwidth that each gang takes; no rows if none is declared."""
    if not view.bandwidth:
        return np.zeros((0, len(rows)))
    whole = [view.topologies[slot].configuration_set.bandwidth for slot in view.bandwidth if view.available[slot]]
    declared = [[amount for amount in column if amount < UNLIMITED_MB_PER_S] for column in zip(*whole, strict=True)]
    jobs = [table.jobs[row] for row in rows.tolist()]
    tasks = [[] if job is None else [role.tasks for role in job.shape.roles] for job in jobs]
    wanted = [() if job is None else bandwidth_of(job.shape, own) for job, own in zip(jobs, tasks, strict=True)]
    amounts = np.array([one or (0,) * len(DIMENSIONS) for one in wanted], float).reshape(len(jobs), len(DIMENSIONS)).T
    there_is = np.array([float(sum(column)) for column in declared] or [0.0] * len(DIMENSIONS))[:, None]
    return np.asarray(np.divide(amounts, there_is, out=np.zeros_like(amounts), where=there_is > 0), float)
