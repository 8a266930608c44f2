"""Preemption candidates: chosen running jobs that a higher-ranked job may preempt or move."""

from __future__ import annotations

import math
from collections.abc import Set
from functools import cached_property

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.resources import GangShape

from ganger_master.core.job_model import JobRecord
from ganger_master.planner.device_groups import Unit, units
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.order_stage import ChosenJobs
from ganger_master.planner.terms import PassTerms
from ganger_master.policies.make_room import Hole, Movable, Movables, hole_for
from ganger_master.policies.orders import JobOrder
from ganger_master.policies.placements import PlacementPreference

# So many pending jobs of a pass get a make-room search, first job first.
_MOST_HOLES = 8


class PreemptionCandidates:
    """Running, preemptible jobs of a choice, and the search for the fewest of them to preempt or move."""

    def __init__(
        self, order: JobOrder, table: LiveTable, choice: ChosenJobs, terms: PassTerms, room: CapacityIndex
    ) -> None:
        self._table, self._choice, self._terms, self._room = table, choice, terms, room
        self._regroups = order.regroups
        self._holes = 0
        # Shapes whose search failed; a lower-ranked job of that shape has fewer candidates.
        self._vain: set[GangShape] = set()
        self._stopped: set[int] = set()

    @cached_property
    def units(self) -> dict[int, Unit]:
        """Return the jobs or groups of co-located jobs, by the number of the first one in line."""
        choice = self._choice
        may_stop = choice.facts.is_running & choice.is_chosen & choice.facts.is_preemptible
        positions = choice.line[may_stop[choice.line]]
        found = units(self._table.gangs_at(choice.rows[positions]), self._terms.mates)
        return {unit[0][0].number: unit for unit in found}

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {number: rank for rank, number in enumerate(self._choice.facts.number[self._choice.line].tolist())}

    @cached_property
    def _stoppable(self) -> Movables:
        return self._priced(move=math.inf, stop=1.0)

    @cached_property
    def _movable(self) -> Movables:
        return self._priced(move=1.0, stop=math.inf)

    def _priced(self, move: float, stop: float) -> Movables:
        """Return the candidates with costs per GPU: to move or to preempt means a checkpoint and a start of every
        process. Co-located jobs cannot be moved."""
        gangs = []
        for number, unit in self.units.items():
            shape, held = unit[0][0].shape, [self._terms.held(gang) for _, gang in unit]
            gpus = max(1, sum([job.gpus for job, _ in unit]))
            beside = tuple([claim for claims in held[1:] for claim in claims])
            move_cost = math.inf if beside else move * gpus
            gangs.append(Movable(number, shape, held[0], move_cost, stop * gpus, beside=beside))
        return Movables(self._room.view, gangs)

    @property
    def _free_gpus(self) -> int:
        return int(np.bitwise_count(self._room.view.columns().free).sum())

    def hole(self, placement: PlacementPreference, job: JobRecord, shape: GangShape, avoid: Set[str]) -> Hole | None:
        """Return the jobs to preempt for this job, and the new places of those that fit elsewhere; None if there are
        none. Under an order that regroups, the search first moves jobs of any rank and at most equal priority."""
        if shape in self._vain or self._holes == _MOST_HOLES:
            return None
        self._holes += 1
        found = None
        if self._regroups and self._free_gpus >= shape.gpus:
            above = {number for number, unit in self.units.items() if unit[0][0].spec.priority > job.spec.priority}
            stay = above | self._stopped
            found = hole_for(self._room, self._movable, shape, placement=placement, avoid=avoid, stay=stay)
        if found is None:
            rank, most = self._ranks[job.number], len(self.units)
            stay = {other for other in self.units if self._ranks[other] < rank} | self._stopped
            found = hole_for(
                self._room, self._stoppable, shape, placement=placement, avoid=avoid, stay=stay, most_moves=most
            )
        if found is None:
            self._vain.add(shape)
        else:
            self._stopped.update(move.number for move in found.moves)
        return found
