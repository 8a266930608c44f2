"""Where gangs fit, one after the other: places taken in a room, who is stopped for them, and all undone in the end.

Who finds no place as it is has others stopped who are leaving anyhow, or a hole made among those who stay; places that
somebody has to leave first, or that are kept for who has waited too long, are passed over by all behind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from operator import add, ge

from ganger.cluster.counted import is_counted
from ganger.cluster.placement import widest_now
from ganger.cluster.resources import GangShape
from ganger.cluster.room import CapacityIndex
from ganger.cluster.view import View
from msgspec.structs import replace

from ganger_master.core.commands import Change
from ganger_master.core.gang_orders import same_place
from ganger_master.core.model import Gang, JobRecord, SuspendLevel
from ganger_master.planner.context import Unit
from ganger_master.planner.job_table import LiveTable
from ganger_master.planner.preempt_stage import Staying
from ganger_master.planner.refusal_backoff import KeptOut
from ganger_master.planner.terms import Claims, PassTerms, held_by_all, held_of
from ganger_master.policies.placements import PlacementPreference, Want

_ANYTHING = Want()
_NOWHERE: frozenset[str] = frozenset()
# So many who wait for others to leave have their places kept; first job first.
_MOST_KEPT = 8


class Fitting:
    """Fits gangs into a room, which first follows what has happened, and undoes it. Where the placement counts, neither
    is done before more than counts matters."""

    def __init__(
        self,
        placement: PlacementPreference,
        room: CapacityIndex,
        table: LiveTable,
        now: float,
        kept_out: KeptOut,
        terms: PassTerms,
    ) -> None:
        self._placement = placement
        self._what_if = room
        # None: the room says what is free, and follows.
        self._counted = None if placement.counts is None else placement.counts(room.view)
        if self._counted is None:
            room.refresh()
        # Places that the room does not show yet: all that were found by counts, else the last one, for of the last one
        # of all nobody asks.
        self._unseen: list[Claims] = []
        self._table = table
        self._now = now
        self._closed = kept_out.nodes
        self._terms = terms
        self._starts: list[Change] = []
        self._stops: list[Change] = []
        # By number: who is stopped and has no other place.
        self.displaced: set[int] = set()
        # Held in the room (None), or given back by nodes of these affinities, though nothing happened yet; in this
        # order.
        self._done: list[tuple[Claims, list[int] | None]] = []
        # Nodes where pieces are somebody's who leaves, or are kept for somebody.
        self._busy: set[str] = set()
        # By number: who has waited too long, and who may start past them; those of the former who are waited for, and
        # the nodes where they could be.
        self._overdue: Set[int] = frozenset()
        self._passing: Set[int] = frozenset()
        self.waited_for: set[int] = set()
        self._kept: frozenset[str] = _NOWHERE

    @property
    def _room(self) -> CapacityIndex:
        """With all that is held in it by now."""
        self._see()
        return self._what_if

    def _see(self) -> None:
        if self._counted is not None:
            self._counted = None
            self._what_if.refresh()
        for claims in self._unseen:
            self._what_if.take(claims)
            self._done.append((claims, None))
        self._unseen.clear()

    def _mark(self) -> int:
        """To `undo` to."""
        self._see()
        return len(self._done)

    @property
    def changes(self) -> tuple[Change, ...]:
        self.undo()
        return (*self._stops, *self._starts)

    def stop(self, gangs: Iterable[tuple[JobRecord, Gang]]) -> None:
        self._stops += [Change(job.number, job.revision, "SUSPEND", level=SuspendLevel.CHECKPOINT) for job, _ in gangs]

    def _displace(self, unit: Unit) -> None:
        self.stop(unit)
        self.displaced.update(job.number for job, _ in unit)

    def keep_for(self, overdue: Set[int], passing: Set[int]) -> None:
        """Once one of the `overdue` finds no room only the `passing` start where it could be."""
        self._overdue, self._passing = overdue, passing

    def starts_all(self, jobs: Iterable[JobRecord]) -> bool:
        """Whether all of them find room; if so, they start."""
        for job in jobs:
            claims = self._hold(job, _NOWHERE, set())
            if claims is None:
                return False
            self._starts.append(Change(job.number, job.revision, "START", claims))
        return True

    def start(
        self, jobs: Iterable[JobRecord], beside_others: bool = False, going: Sequence[tuple[JobRecord, Gang]] = ()
    ) -> list[JobRecord]:
        """Starts who finds room; the others. `beside_others`: not on nodes where others leave or will come. Who is
        `going` makes room: the first ones that wait for it have it kept."""
        avoid = frozenset(self._busy) if beside_others else _NOWHERE
        crowded = []
        vain: set[GangShape] = set()
        held_up: set[GangShape] = set()
        kept: set[GangShape] = set()
        most_kept = _MOST_KEPT if going else 0
        for job in jobs:
            is_held_up = bool(self._kept) and job.number not in self._passing
            claims = self._hold(job, avoid | self._kept, held_up) if is_held_up else self._hold(job, avoid, vain)
            if claims is not None:
                self._starts.append(Change(job.number, job.revision, "START", claims))
                continue
            if job.number in self._overdue:
                self._wait_for(job)
            elif is_held_up:
                continue
            crowded.append(job)
            # Whoever is like one before it comes after it.
            if len(kept) < most_kept and (shape := self._terms.shape(job)) not in kept:
                kept.add(shape)
                avoid |= self._comes_to(job, going, avoid)
        return crowded

    def make_way(
        self,
        crowded: Sequence[JobRecord],
        leaving: Sequence[Unit],
        going: Sequence[tuple[JobRecord, Gang]],
        staying: Staying | None,
    ) -> list[JobRecord]:
        """Stops who is `leaving` and in the way of the crowded, in order, and who is `staying` where that is not
        enough; who of these finds no place even so. Who is `going` has been told already."""
        if self._placement.by_counts and self._takes_all(crowded, leaving, going):
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
        for job in crowded:
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
        self, crowded: Iterable[JobRecord], leaving: Iterable[Unit], going: Iterable[tuple[JobRecord, Gang]]
    ) -> bool:
        """By counts: whether there is room for the crowded, but for none beside them of those who are leaving."""
        held = [sum([claim.device_mask.bit_count() for claim in self._terms.held(unit[0][1])]) for unit in leaving]
        gone = [claim.device_mask.bit_count() for _, gang in going for claim in held_of(gang)]
        taken = sum([self._terms.shape(job).gpus for job in crowded])
        free = self._room.free_devices if self._counted is None else self._counted.count
        return 0 <= free + sum(held) + sum(gone) - taken < min(held, default=math.inf)

    def undo(self, mark: int = 0) -> None:
        """All is as it was at a mark, or in the beginning."""
        if self._counted is not None:
            for claims in self._unseen:
                self._counted.give(claims)
        self._unseen.clear()
        room = self._what_if
        while len(self._done) > mark:
            claims, affinities = self._done.pop()
            if affinities is None:
                room.give(claims)
                continue
            for claim, affinity in zip(claims, affinities, strict=True):
                room.take((claim,), affinity)

    def _make_hole(self, job: JobRecord, staying: Staying, wanted: set[str]) -> Claims | None:
        """Stops those who are in the way of one who ranks higher, or can be elsewhere; its place, taken in the room as
        theirs are. Their nodes become `wanted`."""
        shape = self._terms.shape(job)
        locality = replace(shape.locality, widest=widest_now(shape, self._waited(job)), wish=None)
        closed = self._closed.get(job.number, _NOWHERE)
        self._see()
        hole = staying.hole(self._placement, job, replace(shape, locality=locality), closed)
        if hole is None:
            return None
        for move in hole.moves:
            self._give(move.gang.held)
            unit = staying.units[move.number]
            if move.claims:
                self.stop(unit)
            else:
                self._displace(unit)
            self._busy.update(claim.node for claim in move.gang.claims)
        for move in hole.moves:
            self._take(move.claims)
            wanted.update(claim.node for claim in move.claims)
        self._take(hole.claims)
        return hole.claims

    def _comes_to(
        self, job: JobRecord, going: Iterable[tuple[JobRecord, Gang]], avoid: frozenset[str]
    ) -> frozenset[str]:
        """The nodes where a job will be once those have gone who were told to; none if that is not enough."""
        return self._would_be(job, [held_of(gang) for _, gang in going], avoid)

    def _would_be(self, job: JobRecord, given: Iterable[Claims], avoid: frozenset[str]) -> frozenset[str]:
        """The nodes where a job would be if these were given back; none if that is not enough."""
        mark = self._mark()
        for back in given:
            self._give(back)
        claims = self._hold(job, avoid, set())
        self.undo(mark)
        return frozenset(claim.node for claim in claims or ())

    def _wait_for(self, job: JobRecord) -> None:
        """Keeps what gets free where a job could be, if it would be somewhere once all who run are gone."""
        self._see()
        done = self._done.copy()
        # Some of what they hold may have been given back, and taken by others, in this room already.
        self.undo()
        there = self._would_be(job, held_by_all(self._table, self._terms.held), _NOWHERE)
        for claims, affinities in done:
            (self._take if affinities is None else self._give)(claims)
        if there:
            self.waited_for.add(job.number)
            self._kept |= nodes_for(self._room.view, self._terms.shape(job))

    def _waited(self, job: JobRecord) -> float:
        return max(0.0, self._now - job.pending_since)

    def _hold(self, job: JobRecord, avoid: frozenset[str], vain: set[GangShape]) -> Claims | None:
        """A place for a job, taken in the room; None where it finds none. `vain`: shapes that found none before."""
        shape = self._terms.shape(job)
        closed = self._closed.get(job.number, _NOWHERE)
        if not (job.epoch or closed or shape.locality.wish):
            if shape in vain:
                return None
            if self._counted is not None and not avoid and is_counted(shape):
                claims = self._counted.take(shape)
            else:
                claims = self._placement.place(self._room, shape, Want(avoid=avoid) if avoid else _ANYTHING)
            if claims is None:
                vain.add(shape)
                return None
        else:
            gang = self._table.gangs[self._table.row(job.number)] if job.epoch else None
            parked = () if gang is None else gang.parked_claims
            want = Want(self._waited(job), parked, avoid=avoid | closed)
            claims = self._placement.place(self._room, shape, want)
            if claims is None:
                return None
            if gang is not None and same_place(claims, parked):
                # What it keeps there is its own.
                self._give(held_of(gang))
        self._take(claims)
        return claims

    def _are_free(self, claims: Claims) -> bool:
        """Whether there is room for all of these, which were there together before."""
        view = self._room.view
        masks: dict[int, int] = {}
        memory: Counter[int] = Counter()
        cores: dict[int, tuple[int, ...]] = {}
        for claim in claims:
            slot = view.slots.get(claim.node)
            if slot is None:
                continue
            masks[slot] = masks.get(slot, 0) | claim.device_mask
            memory[slot] += claim.memory_bytes + claim.arena_bytes
            before = cores.get(slot, ())
            cores[slot] = tuple(map(add, before, claim.millicores)) if before else claim.millicores
        return all(
            view.free[slot] & mask == mask
            and view.memory[slot] >= memory[slot]
            and all(map(ge, view.millicores[slot], cores[slot]))
            for slot, mask in masks.items()
        )

    def _take(self, claims: Claims) -> None:
        if self._counted is None:
            self._see()
        self._unseen.append(claims)

    def _give(self, claims: Claims) -> None:
        view = self._room.view
        there = tuple([claim for claim in claims if claim.node in view])
        affinities = [view.affinity[view.slots[claim.node]] for claim in there]
        self._room.give(there)
        self._done.append((there, affinities))


def nodes_for(view: View, shape: GangShape) -> frozenset[str]:
    """Where pieces of such a gang could be, whoever is there now."""
    kind = shape.device_type if all(role.shape.gpus for role in shape.roles) else ""
    there = zip(view.nodes, view.topologies, strict=True)
    return frozenset(name for name, topology in there if name and kind in ("", topology.configuration_set.device_type))
