"""Place pending gangs one after the other, with the jobs that are preempted for them.

Jobs further back do not take devices that are to be returned first, or that are kept for overdue jobs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from functools import cached_property
from operator import add, ge

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex, Trial
from ganger.cluster.claims import is_counted
from ganger.cluster.resources import Bandwidth, GangShape, exceeds, more_bandwidth
from ganger.cluster.search import PlacementRequest, widest_now
from ganger.cluster.view import View
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.gang_model import Gang
from ganger_master.core.gang_orders import same_place
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.plan_changes import PlanChange, StartChange, SuspendChange
from ganger_master.planner.context import PlanContext, held_by_all, held_of
from ganger_master.planner.device_groups import Claims, Unit, units
from ganger_master.policies.make_room import Movable, Movables, RoomPlan, no_further, room_for
from ganger_master.policies.orders import Facts, Flags, Integers

_NOWHERE: frozenset[str] = frozenset()
# So many jobs that wait for devices to be returned have their places kept, first job first.
_MOST_KEPT = 8


class GangFitting:
    """Takes places in the capacity index until `undo`. Where the placement needs only counts, the index is neither
    refreshed nor changed before more than counts matters."""

    def __init__(self, context: PlanContext) -> None:
        self._table, self._now, self._terms = context.jobs, context.now, context.terms
        self._placement = placement = context.policy.placement
        self._index = room = context.room
        # None: the capacity index counts, and is up to date.
        self._counted = None if placement.counts is None else placement.counts(room.view)
        if self._counted is None:
            room.follow()
        # Places that the index does not show yet: all that were found by counts, else only the newest one, because no
        # search follows the last placement of a pass.
        self._unseen: list[Claims] = []
        self._starts: list[PlanChange] = []
        self._stops: list[PlanChange] = []
        # Shapes for which no preferred place is free.
        self._not_preferred: set[tuple[GangShape, frozenset[str]]] = set()
        # Numbers of preempted jobs without another place.
        self.displaced: set[int] = set()
        # All that the pass takes and returns, though neither has happened yet.
        self._trial = Trial(room)
        # Nodes with claims that are to be returned first, or that are kept for a job.
        self._busy: set[str] = set()
        # By number: overdue jobs, and jobs that may start before them. `waited_for`: overdue jobs that would fit on an
        # empty cluster; `_kept`: the nodes that could hold them.
        self._overdue: Set[int] = frozenset()
        self._passing: Set[int] = frozenset()
        self.waited_for: set[int] = set()
        self._kept: frozenset[str] = _NOWHERE

    @property
    def _room(self) -> CapacityIndex:
        self._see()
        return self._index

    def _see(self) -> None:
        if self._counted is not None:
            self._counted = None
            self._index.follow()
        for claims in self._unseen:
            self._trial.take(claims)
        self._unseen.clear()

    @property
    def changes(self) -> tuple[PlanChange, ...]:
        self.undo()
        return (*self._stops, *self._starts)

    def stop(self, gangs: Iterable[tuple[JobRecord, Gang]]) -> None:
        self._stops += [SuspendChange(job.number, job.revision, level=SuspendLevel.CHECKPOINT) for job, _ in gangs]

    def _displace(self, unit: Unit) -> None:
        self.stop(unit)
        self.displaced.update(job.number for job, _ in unit)

    def keep_for(self, overdue: Set[int], passing: Set[int]) -> None:
        """Once one of the `overdue` jobs fits nowhere, only the `passing` ones start where it could run."""
        self._overdue, self._passing = overdue, passing

    def starts_all(self, jobs: Iterable[JobRecord]) -> bool:
        """Start all jobs, and return whether they all fit. If not, the caller undoes the pass."""
        for job in jobs:
            claims = self._hold(job, _NOWHERE, set())
            if claims is None:
                return False
            self._starts.append(StartChange(job.number, job.revision, claims))
        return True

    def start(
        self, jobs: Iterable[JobRecord], beside_others: bool = False, going: Sequence[tuple[JobRecord, Gang]] = ()
    ) -> list[JobRecord]:
        """Start the jobs that fit; return the others. `beside_others`: not on nodes where other jobs leave or will
        come. `going`: jobs that return their devices, which are kept for the first jobs that wait for them."""
        avoid = frozenset(self._busy) if beside_others else _NOWHERE
        unserved = []
        vain: set[GangShape] = set()
        held_up: set[GangShape] = set()
        kept: set[GangShape] = set()
        most_kept = _MOST_KEPT if going else 0
        for job in jobs:
            is_held_up = bool(self._kept) and job.number not in self._passing
            claims = self._hold(job, avoid | self._kept, held_up) if is_held_up else self._hold(job, avoid, vain)
            if claims is not None:
                self._starts.append(StartChange(job.number, job.revision, claims))
                continue
            if job.number in self._overdue:
                self._wait_for(job)
            elif is_held_up:
                continue
            unserved.append(job)
            # An equal shape is behind the first one, and would wait for the same devices.
            if len(kept) < most_kept and (shape := self._terms.shape(job)) not in kept:
                kept.add(shape)
                avoid |= self._would_be(job, [held_of(gang) for _, gang in going], avoid)
        return unserved

    def make_way(
        self,
        unserved: Sequence[JobRecord],
        leaving: Sequence[Unit],
        going: Sequence[tuple[JobRecord, Gang]],
        staying: PreemptionCandidates | None,
    ) -> list[JobRecord]:
        """Preempt jobs for `unserved`, which found no free devices: the `leaving` ones that are in the way, and of
        `staying` where that is not enough. Return the jobs that fit nowhere even so. `going`: jobs that already return
        their devices."""
        counts = self._placement.by_counts and not self._table.is_partitioned
        if counts and self._takes_all(unserved, leaving, going):
            for unit in leaving:
                self._displace(unit)
            return []
        held = [(unit, self._terms.held_by(unit)) for unit in leaving]
        gone = [held_of(gang) for _, gang in going]
        for back in (*(claims for _, claims in held), *gone):
            self._give(back)
        unplaced: list[JobRecord] = []
        vain: set[GangShape] = set()
        wanted: set[str] = set()
        for job in unserved:
            claims = self._hold(job, _NOWHERE, vain)
            if claims is None and staying is not None:
                claims = self._make_hole(job, staying, wanted)
            if claims is None:
                unplaced.append(job)
            else:
                wanted.update(claim.node for claim in claims)
        for unit, its in held:
            here = tuple([claim for claim in its if claim.node in wanted])
            if self._are_free(here):
                self._take(here)
            else:
                self._displace(unit)
        self._busy.update(wanted)
        self._busy.update(claim.node for claims in (*(claims for _, claims in held), *gone) for claim in claims)
        return unplaced

    def _takes_all(
        self, unserved: Iterable[JobRecord], leaving: Iterable[Unit], going: Iterable[tuple[JobRecord, Gang]]
    ) -> bool:
        """Return whether, by counts, the unserved jobs fit if all leaving ones are preempted, and only then."""
        held = [sum([claim.device_mask.bit_count() for claim in self._terms.held(unit[0][1])]) for unit in leaving]
        gone = [claim.device_mask.bit_count() for _, gang in going for claim in held_of(gang)]
        taken = sum([self._terms.shape(job).gpus for job in unserved])
        free = self._room.free_devices if self._counted is None else self._counted.count
        return 0 <= free + sum(held) + sum(gone) - taken < min(held, default=math.inf)

    def undo(self, mark: int = 0) -> None:
        """Restore the state at a mark, or the initial one."""
        if self._counted is not None:
            for claims in self._unseen:
                self._counted.give(claims)
        self._unseen.clear()
        self._trial.undo(mark)

    def _make_hole(self, job: JobRecord, staying: PreemptionCandidates, wanted: set[str]) -> Claims | None:
        """Preempt or move lower-ranked jobs for `job`. Return its claims, which are taken; add nodes to `wanted`."""
        shape = self._terms.shape(job)
        if widest_now(shape, self._waited(job)) != widest_now(job.shape, self._waited(job)):
            # It waits for a better place than the free ones: no job is preempted for that.
            return None
        self._see()
        room_plan = staying.room_plan(job, no_further(shape, widest_now(shape, self._waited(job))))
        if room_plan is None:
            return None
        for move in room_plan.moves:
            self._give(move.gang.held)
            unit = staying.units[move.number]
            if move.claims:
                self.stop(unit)
            else:
                self._displace(unit)
            self._busy.update(claim.node for claim in move.gang.claims)
        for move in room_plan.moves:
            self._take(move.claims)
            wanted.update(claim.node for claim in move.claims)
        self._take(room_plan.claims)
        return room_plan.claims

    def _would_be(self, job: JobRecord, given: Iterable[Claims], avoid: frozenset[str]) -> frozenset[str]:
        """Return the nodes that a job would use if these claims were returned; empty if it does not fit even then."""
        self._see()
        mark = self._trial.mark
        for back in given:
            self._give(back)
        claims = self._hold(job, avoid, set())
        self.undo(mark)
        return frozenset(claim.node for claim in claims or ())

    def _wait_for(self, job: JobRecord) -> None:
        """Keep free the nodes where an overdue job could run, if it would fit on an empty cluster."""
        self._see()
        # This pass may have given claims of running jobs to others already.
        undone = self._trial.undo()
        there = self._would_be(job, held_by_all(self._table, self._terms.held), _NOWHERE)
        self._trial.redo(undone)
        if there:
            self.waited_for.add(job.number)
            self._kept |= nodes_for(self._room.view, self._terms.shape(job))

    def _waited(self, job: JobRecord) -> float:
        return max(0.0, self._now - job.pending_since)

    def _hold(self, job: JobRecord, avoid: frozenset[str], vain: set[GangShape]) -> Claims | None:
        """Find a place for a job and take it. None if it does not fit. `vain`: shapes that did not fit before."""
        shape = self._terms.shape(job)
        if self._terms.has_preferred and not job.epoch and shape not in vain:
            claims = self._preferred(job, shape, avoid)
            if claims is not None:
                self._take(claims)
                return claims
        if not (job.epoch or shape.locality.wish):
            if shape in vain:
                return None
            if self._counted is not None and not avoid and is_counted(shape):
                claims = self._counted.take(shape)
            else:
                claims = self._placement.place(self._room, PlacementRequest(shape, avoid=avoid))
            if claims is None:
                vain.add(shape)
                return None
        else:
            gang = self._table.gangs[self._table.row(job.number)] if job.epoch else None
            parked = () if gang is None else gang.parked_claims
            request = PlacementRequest(shape, self._waited(job), parked, avoid=avoid)
            claims = self._placement.place(self._room, request)
            if claims is None:
                return None
            if gang is not None and same_place(claims, parked):
                # It holds a part of the place already.
                self._give(held_of(gang))
        self._take(claims)
        return claims

    def _preferred(self, job: JobRecord, shape: GangShape, avoid: frozenset[str]) -> Claims | None:
        """Return the place that measurements prefer; None without one, or where it is not free."""
        self._see()
        preferred = self._terms.preferred(job)
        if preferred is None:
            return None
        liked = replace(shape, device_type=preferred.device_type)
        if (liked, avoid) in self._not_preferred:
            return None
        request = PlacementRequest(liked, self._waited(job), avoid=avoid | preferred.avoid)
        claims = self._placement.place(self._room, request)
        if claims is None:
            self._not_preferred.add((liked, avoid))
        return claims

    def _are_free(self, claims: Claims) -> bool:
        """Return whether all of these claims, which were there together before, fit again."""
        view = self._room.view
        masks: dict[int, int] = {}
        memory: Counter[int] = Counter()
        cores: dict[int, tuple[int, ...]] = {}
        bandwidth: dict[int, Bandwidth] = {}
        for claim in claims:
            slot = view.slots.get(claim.node)
            if slot is None:
                continue
            masks[slot] = masks.get(slot, 0) | claim.device_mask
            memory[slot] += claim.memory_bytes + claim.arena_bytes
            before = cores.get(slot, ())
            cores[slot] = tuple(map(add, before, claim.millicores)) if before else claim.millicores
            bandwidth[slot] = more_bandwidth(bandwidth.get(slot, ()), claim.bandwidth)
        return all(
            view.free[slot] & mask == mask
            and view.memory[slot] >= memory[slot]
            and all(map(ge, view.millicores[slot], cores[slot]))
            and not exceeds(bandwidth[slot], view.bandwidth.get(slot, ()))
            for slot, mask in masks.items()
        )

    def _take(self, claims: Claims) -> None:
        if self._counted is None:
            self._see()
        self._unseen.append(claims)

    def _give(self, claims: Claims) -> None:
        self._see()
        self._trial.give(claims)


def nodes_for(view: View, shape: GangShape) -> frozenset[str]:
    """Return the nodes whose devices suit the gang, whatever runs there now."""
    kind = shape.device_type if all(role.shape.gpus for role in shape.roles) else ""
    there = zip(view.nodes, view.topologies, strict=True)
    found = [name for name, topology in there if name and topology.accepts(kind, shape.partition)]
    return frozenset(found) - shape.closed_nodes


class ChosenJobs(Struct, frozen=True, eq=False, gc=False):
    """The jobs that should run, by counts.

    line: positions of all candidates, first job first.
    queue: numbers of all pending jobs, in the same order.
    overdue, passing: as in `orders.guarded`.
    changes_at: as `PlanDraft.next_change_s`.
    All else is by position.
    """

    rows: Integers
    facts: Facts
    line: Integers
    queue: Integers
    # Jobs that could start.
    waiting: Flags
    is_chosen: Flags
    overdue: Flags
    passing: Flags
    changes_at: float


# So many pending jobs of a pass get a make-room search, first job first.
_MOST_SEARCHES = 8


class PreemptionCandidates:
    """Running, preemptible jobs of a choice, and the search for the fewest of them to preempt or move."""

    def __init__(self, choice: ChosenJobs, context: PlanContext) -> None:
        self._choice, self._placement = choice, context.policy.placement
        self._table, self._terms, self._room = context.jobs, context.terms, context.room
        self._regroups = context.order.regroups
        self._searches = 0
        # Shapes whose search failed; a lower-ranked job of that shape has fewer candidates.
        self._vain: set[GangShape] = set()
        self._stopped: set[int] = set()

    @cached_property
    def units(self) -> dict[int, Unit]:
        """Return the jobs or groups of co-located jobs, by the number of the first one in line."""
        choice = self._choice
        may_stop = choice.facts.is_running & choice.is_chosen & choice.facts.is_preemptible
        positions = choice.line[may_stop[choice.line]]
        found = units(self._table.gangs_at(choice.rows[positions]), self._terms.co_located)
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

    def room_plan(self, job: JobRecord, shape: GangShape) -> RoomPlan | None:
        """Return the jobs to preempt for this job, and the new places of those that fit elsewhere; None if there are
        none. Under an order that regroups, the search first moves jobs of any rank and at most equal priority."""
        if shape in self._vain or self._searches == _MOST_SEARCHES:
            return None
        self._searches += 1
        found = None
        if self._regroups and self._free_gpus >= shape.gpus:
            above = {number for number, unit in self.units.items() if unit[0][0].priority > job.priority}
            stay = above | self._stopped
            found = room_for(self._room, self._movable, shape, placement=self._placement, stay=stay)
        if found is None:
            rank, most = self._ranks[job.number], len(self.units)
            stay = {other for other in self.units if self._ranks[other] < rank} | self._stopped
            found = room_for(self._room, self._stoppable, shape, placement=self._placement, stay=stay, most_moves=most)
        if found is None:
            self._vain.add(shape)
        else:
            self._stopped.update(move.number for move in found.moves)
        return found
