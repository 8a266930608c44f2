"""One pass of the planner: who should run where, and the changes of one plan that lead there.

Jobs are ranked by the policy's order and chosen by counts; who runs and stays chosen keeps its place. The others are
placed in order: into what is free, else into what would be free without those who were not chosen, who are stopped only
where they are in the way. Who finds no place even so has a hole made by stopping those that rank lower, as few GPUs of
them as will do: else a large gang would wait for ever behind fragments. Under an order that regroups others make room
first, whoever they are, if they find places elsewhere, where they start in a later pass. What somebody has to leave
first waits for a later pass, too, and nobody who ranks lower starts there meanwhile. Where somebody who has waited too
long could be, nobody takes what gets free who could not be stopped for it again. The pass remembers nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from operator import add, ge

import numpy as np
from ganger.placement.candidates import widest_now
from ganger.resources.values import Claim, GangShape
from ganger.resources.view import View
from msgspec import Struct
from msgspec.structs import replace as replace_of

from ganger_master.core.commands import Change
from ganger_master.core.model import Gang, Job, SuspendLevel
from ganger_master.core.orders import same_place
from ganger_master.planner.choice import Choice, asked, choose
from ganger_master.planner.in_place import Resizing
from ganger_master.planner.mates import ALONE, Mates, Unit, units
from ganger_master.planner.refused import NOBODY, KeptOut
from ganger_master.planner.table import LiveTable
from ganger_master.policies.facts import Capacity, Floats, Integers
from ganger_master.policies.introspect.hole import Hole, Movable, Movables, hole_for
from ganger_master.policies.order import Order
from ganger_master.policies.place import Placement, Want
from ganger_master.policies.place.counted import is_counted
from ganger_master.policies.room import Room

Claims = tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """`waits`: somebody chosen has no place yet, so a later pass may find it one though nothing happens.
    `next_change_s`: when the order may change by itself; infinite if it does not in jumps. `line`: numbers of all who
    waited, first job first, the started ones among them. `unplaced`: numbers of chosen ones for whom no place was
    found, whoever were stopped for them; without leave to stop anybody, of those known to be such. `follow`: numbers of
    those who have a place once all that it stops is gone, first job first. `displaced`: under an order of which they
    rest for that, numbers of those it stops who have no other place. `resizing`: what to remember of changes of
    size if it is proposed; None: what was before."""

    changes: tuple[Change, ...] = ()
    waits: bool = False
    next_change_s: float = math.inf
    line: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    unplaced: frozenset[int] = frozenset()
    follow: tuple[int, ...] = ()
    displaced: frozenset[int] = frozenset()
    resizing: Resizing | None = None

    @property
    def leaves_waiting(self) -> bool:
        """Whether anybody waits whom it does not start, chosen or not."""
        return len(self.line) > sum(change.kind == "START" for change in self.changes)


NOTHING_TO_DO = Pass()


class Terms(Struct, frozen=True):
    """What a pass goes by: the shape that a waiting job is placed with, what a gang counts as holding, and who shares
    devices."""

    shape: Callable[[Job], GangShape] = lambda job: job.shape
    held: Callable[[Gang], Claims] = lambda gang: _held(gang)
    mates_now: Callable[[], Mates] = lambda: ALONE

    @property
    def mates(self) -> Mates:
        return self.mates_now()

    def held_by(self, unit: Unit) -> Claims:
        """What all of them hold."""
        return tuple([claim for _, gang in unit for claim in self.held(gang)])


AS_ASKED = Terms()


def plan(
    order: Order,
    placement: Placement,
    table: LiveTable,
    now: float,
    capacity: Capacity,
    room: Room,
    may_stop: bool = True,
    remaining_s: Callable[[Integers], Floats] | None = None,
    kept_out: KeptOut = NOBODY,
    terms: Terms = AS_ASKED,
) -> Pass:
    """The changes to propose now. `room` is as it is now and is left so. Without `may_stop` only those start who find
    room as it is. `remaining_s` gives an oracle's seconds by number, for orders that ask for one. `kept_out`: what was
    found not to be possible for some, whatever else is free. `terms`: others than what was asked and is held."""
    if not table.has_waiting:
        return NOTHING_TO_DO
    few = table.waiting_jobs(_FEW) if kept_out is NOBODY else []
    if few and sum([job.gpus for job in few]) <= _free_devices(placement, room):
        # Where there is room for all who wait, it makes no difference who goes first.
        found = started(few, placement, table, now, room, kept_out, terms)
        if found is not None:
            return found
    of = asked(order, table, now, capacity, remaining_s, kept_out, bool(terms.mates))
    if of.nobody_comes:
        # Nobody leaves but for somebody who comes.
        return Pass(next_change_s=of.changes_at, line=of.line)
    return carried_out(choose(of), order, placement, table, now, room, may_stop, kept_out, terms)


def started(
    jobs: Sequence[Job],
    placement: Placement,
    table: LiveTable,
    now: float,
    room: Room,
    kept_out: KeptOut = NOBODY,
    terms: Terms = AS_ASKED,
) -> Pass | None:
    """The pass that starts these jobs, which wait, in this order, and no others; None if one of them finds no room."""
    fitting = _Fitting(placement, room, table, now, kept_out, terms)
    if fitting.starts_all(jobs):
        return Pass(fitting.changes, line=np.array([job.number for job in jobs], np.int64))
    fitting.undo()
    return None


def _free_devices(placement: Placement, room: Room) -> int:
    if placement.counts is not None:
        return placement.counts(room.view).count
    room.refresh()
    return room.free_devices


def may_start(
    placement: Placement, table: LiveTable, room: Room, terms: Terms = AS_ASKED, resting: Collection[int] = ()
) -> bool:
    """Whether anybody may find room as it is but those who are `resting`, by number. If not, `plan` starts nobody
    without leave to stop others, whoever goes first."""
    room.refresh()
    vain: set[GangShape] = set()
    for job in table.waiting_at_most(room.free_devices):
        if job.number in resting:
            continue
        shape = terms.shape(job)
        if job.epoch or shape.locality.wish:
            # Where it rests, and for how long it has wished, make a difference.
            return True
        if shape not in vain:
            if placement.place(room, shape, _ANYTHING) is not None:
                return True
            vain.add(shape)
    return False


def carried_out(
    choice: Choice,
    order: Order,
    placement: Placement,
    table: LiveTable,
    now: float,
    room: Room,
    may_stop: bool,
    kept_out: KeptOut = NOBODY,
    terms: Terms = AS_ASKED,
    resized: Sequence[tuple[Job, Gang]] = (),
    placing: Integers | None = None,
    going: Sequence[tuple[Job, Gang]] | None = None,
) -> Pass:
    """The changes that lead to a choice, made by `order`, or as if by it. `resized`: who runs and is stopped to start
    with another size; they count as neither running nor chosen. `placing`: the chosen ones who wait, first one first,
    if not in the order of the line. `going`: who gives back what, if not whoever the table says does all it holds."""
    rows, line, waiting, is_chosen = choice.rows, choice.line, choice.waiting, choice.is_chosen
    first = line[(is_chosen & waiting)[line]] if placing is None else placing
    if not (len(first) or resized):
        return Pass(next_change_s=choice.changes_at, line=choice.told)
    fitting = _Fitting(placement, room, table, now, kept_out, terms)
    fitting.stop(resized)
    if np.count_nonzero(choice.overdue):
        numbers = choice.facts.number
        fitting.keep_for(set(numbers[choice.overdue & waiting].tolist()), set(numbers[choice.passing].tolist()))
    if going is None:
        going = table.going
    going = [*going, *resized]
    crowded = fitting.start(_jobs(table, rows, first), going=going)
    if not crowded:
        return Pass(fitting.changes, next_change_s=choice.changes_at, line=choice.told)
    unplaced = frozenset(job.number for job in crowded if job.number in kept_out.unplaced)
    follow: tuple[int, ...] = ()
    if may_stop:
        leaving = units(_gangs(table, rows, line[(choice.facts.is_running & ~is_chosen)[line]]), terms.mates)
        staying = _Staying(order, table, choice, terms, room) if order.preempts else None
        left = fitting.make_way(crowded, leaving, going, staying)
        if left and not order.is_strict:
            # What they cannot use serves those behind them.
            fitting.start(_jobs(table, rows, line[(waiting & ~is_chosen)[line]]), beside_others=True)
        unplaced = frozenset(job.number for job in left)
        follow = tuple([job.number for job in crowded if job.number not in unplaced])
    fitting.undo()
    unplaced -= fitting.waited_for
    displaced = frozenset(fitting.displaced) if order.rests else frozenset[int]()
    return Pass(fitting.changes, True, choice.changes_at, choice.told, unplaced, follow, displaced)


# To place so many in vain takes less than to rank all who are live.
_FEW = 8
# So many who wait for others to leave have their places kept, and so many have holes made for them; first job first.
_MOST_KEPT = 8
_MOST_HOLES = 8


class _Staying:
    """Who runs, was chosen and could be stopped for somebody who ranks higher."""

    def __init__(self, order: Order, table: LiveTable, choice: Choice, terms: Terms, room: Room) -> None:
        self._table, self._choice, self._terms, self._room = table, choice, terms, room
        self._regroups = order.regroups
        self._holes = 0
        # Of which none was found: whoever ranks lower finds none either.
        self._vain: set[GangShape] = set()
        self._stopped: set[int] = set()

    @cached_property
    def units(self) -> dict[int, Unit]:
        """By number of the first of them in line."""
        choice = self._choice
        may_stop = choice.facts.is_running & choice.is_chosen & choice.facts.is_preemptible
        positions = choice.line[may_stop[choice.line]]
        found = units(_gangs(self._table, choice.rows, positions), self._terms.mates)
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
        """By the GPU: either way a checkpoint and a start of each process. Who shares devices goes nowhere else."""
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

    def hole(self, placement: Placement, job: Job, shape: GangShape, avoid: Set[str]) -> Hole | None:
        """Whom to stop for this job, and where those will be who find room elsewhere. Under an order that regroups
        those are looked for first, who rank higher among them, but of no higher priority: nobody waits for it."""
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


def _jobs(table: LiveTable, rows: Integers, positions: Integers) -> list[Job]:
    return [job for row in rows[positions].tolist() if (job := table.jobs[row]) is not None]


def _gangs(table: LiveTable, rows: Integers, positions: Integers) -> list[tuple[Job, Gang]]:
    found = [(table.jobs[row], table.gangs[row]) for row in rows[positions].tolist()]
    return [(job, gang) for job, gang in found if job is not None and gang is not None]


class _Fitting:
    """Fits gangs into a room, which first follows what has happened, and undoes it. Where the placement counts, neither
    is done before more than counts matters."""

    def __init__(
        self, placement: Placement, room: Room, table: LiveTable, now: float, kept_out: KeptOut, terms: Terms
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
    def _room(self) -> Room:
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

    def stop(self, gangs: Iterable[tuple[Job, Gang]]) -> None:
        self._stops += [Change(job.number, job.revision, "SUSPEND", level=SuspendLevel.CHECKPOINT) for job, _ in gangs]

    def _displace(self, unit: Unit) -> None:
        self.stop(unit)
        self.displaced.update(job.number for job, _ in unit)

    def keep_for(self, overdue: Set[int], passing: Set[int]) -> None:
        """Once one of the `overdue` finds no room only the `passing` start where it could be."""
        self._overdue, self._passing = overdue, passing

    def starts_all(self, jobs: Iterable[Job]) -> bool:
        """Whether all of them find room; if so, they start."""
        for job in jobs:
            claims = self._hold(job, _NOWHERE, set())
            if claims is None:
                return False
            self._starts.append(Change(job.number, job.revision, "START", claims))
        return True

    def start(
        self, jobs: Iterable[Job], beside_others: bool = False, going: Sequence[tuple[Job, Gang]] = ()
    ) -> list[Job]:
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
        crowded: Sequence[Job],
        leaving: Sequence[Unit],
        going: Sequence[tuple[Job, Gang]],
        staying: _Staying | None,
    ) -> list[Job]:
        """Stops who is `leaving` and in the way of the crowded, in order, and who is `staying` where that is not
        enough; who of these finds no place even so. Who is `going` has been told already."""
        if self._placement.by_counts and self._takes_all(crowded, leaving, going):
            for unit in leaving:
                self._displace(unit)
            return []
        held = [(unit, self._terms.held_by(unit)) for unit in leaving]
        gone = [_held(gang) for _, gang in going]
        for back in (*(claims for _, claims in held), *gone):
            self._give(back)
        unplaced: list[Job] = []
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

    def _takes_all(self, crowded: Iterable[Job], leaving: Iterable[Unit], going: Iterable[tuple[Job, Gang]]) -> bool:
        """By counts: whether there is room for the crowded, but for none beside them of those who are leaving."""
        held = [sum([claim.device_mask.bit_count() for claim in self._terms.held(unit[0][1])]) for unit in leaving]
        gone = [claim.device_mask.bit_count() for _, gang in going for claim in _held(gang)]
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

    def _make_hole(self, job: Job, staying: _Staying, wanted: set[str]) -> Claims | None:
        """Stops those who are in the way of one who ranks higher, or can be elsewhere; its place, taken in the room as
        theirs are. Their nodes become `wanted`."""
        shape = self._terms.shape(job)
        locality = replace_of(shape.locality, widest=widest_now(shape, self._waited(job)), wish=None)
        closed = self._closed.get(job.number, _NOWHERE)
        self._see()
        hole = staying.hole(self._placement, job, replace_of(shape, locality=locality), closed)
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

    def _comes_to(self, job: Job, going: Iterable[tuple[Job, Gang]], avoid: frozenset[str]) -> frozenset[str]:
        """The nodes where a job will be once those have gone who were told to; none if that is not enough."""
        return self._would_be(job, [_held(gang) for _, gang in going], avoid)

    def _would_be(self, job: Job, given: Iterable[Claims], avoid: frozenset[str]) -> frozenset[str]:
        """The nodes where a job would be if these were given back; none if that is not enough."""
        mark = self._mark()
        for back in given:
            self._give(back)
        claims = self._hold(job, avoid, set())
        self.undo(mark)
        return frozenset(claim.node for claim in claims or ())

    def _wait_for(self, job: Job) -> None:
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

    def _waited(self, job: Job) -> float:
        return max(0.0, self._now - job.pending_since)

    def _hold(self, job: Job, avoid: frozenset[str], vain: set[GangShape]) -> Claims | None:
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
                self._give(_held(gang))
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


_ANYTHING = Want()
_NOWHERE: frozenset[str] = frozenset()


def _held(gang: Gang) -> Claims:
    return tuple([piece.held for piece in gang.pieces if piece.held is not None])


def held_by_all(table: LiveTable, held: Callable[[Gang], Claims] = _held) -> list[Claims]:
    """What everybody holds who runs, which counts as `held`, or is giving it back."""
    return [*[held(gang) for _, gang in table.running], *[_held(gang) for _, gang in table.going]]


def nodes_for(view: View, shape: GangShape) -> frozenset[str]:
    """Where pieces of such a gang could be, whoever is there now."""
    kind = shape.device_type if all(role.shape.gpus for role in shape.roles) else ""
    there = zip(view.nodes, view.topologies, strict=True)
    return frozenset(name for name, topology in there if name and kind in ("", topology.configuration_set.device_type))
