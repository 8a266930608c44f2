"""An index of the nodes of a view by free capacity, which follows their changes, and trials on it.

Nodes that are equal in everything a placement weighs are one entry: an integer with a bit for each of these nodes. A
gang is placed by reading tens of entries instead of thousands of nodes. The index only finds nodes; `fit` alone decides
whether a claim fits. Claims are taken and given back on a trial, and all of it is undone later."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.feasibility import (
    Alike,
    CapacityTotals,
    Entries,
    Family,
    FeasibilityAnswers,
    FeasibilityQuery,
    Slots,
    TaskKind,
    TaskRoom,
    closest,
    together,
)
from ganger.cluster.resources import Bandwidth, Claim, GangShape, LocalityLevel
from ganger.cluster.topology import Topology
from ganger.cluster.view import View

# Hardware, free devices, free cores by socket, free memory, jobs by socket, affinity, parked bytes, free bandwidth.
_State: TypeAlias = tuple[Topology, int, tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...], Bandwidth]

# Bounds of what is remembered, so that a room may live as long as the cluster.
_MOST_STATES: Final = 1 << 13
_MOST_QUERIES: Final = 1 << 10
_MOST_TALLIES: Final = 256
_MOST_CHANGES: Final = 1 << 18
# Nodes that `first` searches at once.
_STRETCH: Final = 512


class CapacityIndex:
    """An index over `view`. Claims change the view itself: pass a copy if it must not change.

    `free_devices`: those of all nodes in the index; `entries`: all, also those without nodes.

    Searches find only nodes that take gangs, and only those of `only` if it is given; claims can be released on all
    nodes. Once all claims are released, last gang first, index and view are as before.
    """

    def __init__(self, view: View, only: Collection[str] | None = None) -> None:
        self.view = view
        # Of the view's changes, how many there were when it was last followed.
        self._followed: int = view.journal.changes
        self._only = only if only is None else frozenset(only)
        # Trials that have changed the index, in the order in which they began to.
        self._open: list[Trial] = []
        self._build()

    @classmethod
    def of(cls, view: View) -> CapacityIndex:
        """The view's own index, made at first use, up to date."""
        index = view.index
        if isinstance(index, cls):
            index.follow()
            return index
        made = view.index = cls(view)
        return made

    def take(self, claims: Iterable[Claim], affinity: int = 0) -> None:
        """Take the claims of one gang. The caller has them from a placement, or has checked them with `fit`.

        `affinity`: the affinity to give idle nodes, if it differs from the gang's number of devices, as it does when
        claims that were given back are restored. Raises AssertionError, and takes nothing, where a device is held.
        """
        claims = tuple(claims)
        gpus = affinity or sum([claim.device_mask.bit_count() for claim in claims])
        taken = 0
        try:
            for claim in claims:
                self.view.take(claim, gpus)
                taken += 1
        except Exception:
            for claim in reversed(claims[:taken]):
                self.view.give(claim)
            raise
        self._all_changed([self.view.slots[claim.node] for claim in claims])

    def give(self, claims: Iterable[Claim]) -> None:
        """The inverse of `take`; claims of nodes that left are ignored."""
        view = self.view
        self._passed_over.clear()
        changed = []
        for claim in claims:
            view.give(claim)
            if claim.node in view.slots:
                changed.append(view.slots[claim.node])
        self._all_changed(changed)

    @contextmanager
    def tentative(self) -> Iterator[None]:
        """Undo all trials at the end of the block, however it ends: index and view are as before it."""
        try:
            yield
        finally:
            while self._open:
                self._open[-1].undo()

    def follow(self) -> None:
        """Follows what others did to the view meanwhile."""
        view = self.view
        if self._followed == view.journal.changes:
            return
        is_larger = len(view.nodes) != len(self._alike) or len(view.sets) != self._sets
        if is_larger or len(self._by_state) > _MOST_STATES + 4 * len(self._alike):
            self._build()
            return
        self._passed_over.clear()
        changed = view.journal.since(self._followed)
        seen_at, changed_at = self._seen_at, view.journal.changed_at
        for slot in range(len(changed_at)) if changed is None else changed:
            if seen_at[slot] != changed_at[slot]:
                nodes, racks, fabrics = self._places
                if (nodes[slot], racks[slot], fabrics[slot]) != (
                    view.nodes[slot],
                    view.racks[slot],
                    view.fabrics[slot],
                ):
                    self._build()
                    return
                self._changed(slot)
        self._followed = view.journal.changes

    @contextmanager
    def excluding(self, names: Collection[str]) -> Iterator[None]:
        """Meanwhile nothing is found on these nodes."""
        entries: dict[Alike, list[int]] = {}
        for name in names:
            slot = self.view.slots.get(name)
            alike = None if slot is None else self._alike[slot]
            if slot is not None and alike is not None:
                entries.setdefault(alike, []).append(slot)
        for alike, slots in entries.items():
            self._put(slots, together(slots, len(self._alike)), alike, None)
        try:
            yield
        finally:
            if entries:
                self._passed_over.clear()
            available, changed_at = self.view.available, self.view.journal.changed_at
            for alike, slots in entries.items():
                # Others have changed meanwhile. One that was followed and takes no gang any more has no entry, either.
                if all(
                    self._alike[slot] is None and available[slot] and self._seen_at[slot] == changed_at[slot]
                    for slot in slots
                ):
                    self._put(slots, together(slots, len(self._alike)), None, alike)
                else:
                    self._all_changed(slots)

    def query(self, shape: GangShape) -> FeasibilityQuery:
        """Return the query of a shape, which remembers its answers for each class of equal nodes."""
        return self._queries[shape]

    def first(self, which: NDArray[np.bool_], question: Hashable) -> int | None:
        """Return the slot of the first node of the entries that `which` marks, by number; None without one. `question`:
        key of the room that was searched. Later calls with it skip nodes without room until a claim is released."""
        numbers, slot = self._numbers, self._passed_over.get(question, 0)
        if not slot and len(self._passed_over) >= _MOST_TALLIES:
            self._passed_over.clear()
        while slot < len(numbers):
            here = which[numbers[slot : slot + _STRETCH]]
            at = int(here.argmax())
            if here[at]:
                self._passed_over[question] = slot + at
                return slot + at
            slot += len(here)
        self._passed_over[question] = slot
        return None

    def families(self, least_free: int) -> Iterator[Family]:
        """Yield the families with at least `least_free` free devices, those with the fewest first."""
        return chain.from_iterable(self._by_free[least_free:])

    def families_with(self, free: int) -> Iterable[Family]:
        """Return the families with exactly `free` free devices, at most `most_free`."""
        return self._by_free[free]

    def families_of(self, affinity: int) -> Iterable[Family]:
        """Return the families of nodes whose gangs have `affinity` devices; 0: idle nodes."""
        return self._by_affinity.get(affinity, ())

    @property
    def affinities(self) -> list[int]:
        """Sizes of the gangs that are on nodes, ascending."""
        return sorted(self._by_affinity)

    @property
    def most_free(self) -> int:
        """Number of devices of the largest node."""
        return len(self._by_free) - 1

    def entries_in(self, level: LocalityLevel, number: int) -> NDArray[np.int32]:
        """Return the entry numbers of the nodes of a span, 0 for nodes without an entry. Read-only.

        Racks and fabrics count from 0 in the order in which their first nodes came; there is one cluster.
        """
        if level is LocalityLevel.CLUSTER:
            return self._numbers
        return self._numbers[self.slots_in(level, number)]

    def slots_in(self, level: LocalityLevel, number: int) -> NDArray[np.intp]:
        """Return the slots of the nodes of a span, ascending, in the order of `entries_in`."""
        if level is LocalityLevel.CLUSTER:
            return np.arange(len(self._alike))
        return self._members[level, number]

    def span(self, level: LocalityLevel, number: int) -> Slots:
        """Return the nodes of a rack, of a fabric or of the whole cluster, as bits of an integer."""
        if level is LocalityLevel.CLUSTER:
            return self._everywhere
        return self._spans[level, number]

    def tally(self, query: FeasibilityQuery, role: int) -> CapacityTotals:
        """Return the tasks of one role that each rack, each fabric and the cluster could take now."""
        if len(self._journal) > _MOST_CHANGES:
            self._journal.clear()
            self._tallies.clear()
        tasks = query.rooms[role]
        gpus = tasks.kind.task.gpus
        # No node has devices for more tasks, so larger numbers share one tally.
        most = min(query.everything[role], self.most_free // gpus) if gpus else query.everything[role]
        tally = self._tallies[tasks.kind, most]
        tally.follow(self._journal, self._numbers, tasks.by_number(self.entries))
        return tally

    def _build(self) -> None:
        view = self.view
        size = len(view.nodes)
        rooms: FeasibilityAnswers[TaskKind, TaskRoom] = FeasibilityAnswers(TaskRoom, _MOST_TALLIES)
        # By devices, their type, what each must have left, and the partition.
        levels: FeasibilityAnswers[tuple[int, str, int, str], FeasibilityAnswers[Family, int]] = FeasibilityAnswers(
            lambda of: FeasibilityAnswers(lambda family: closest(family, *of)), _MOST_TALLIES
        )
        self._queries: FeasibilityAnswers[GangShape, FeasibilityQuery] = FeasibilityAnswers(
            lambda shape: FeasibilityQuery(view, shape, rooms, levels), _MOST_QUERIES
        )
        # By question: the first slot that may have room. No node before it had room, and none has got any since.
        self._passed_over: dict[Hashable, int] = {}
        self._by_state: dict[_State, Alike] = {}
        self._by_key: dict[tuple[Family, int, int, int, Bandwidth], Alike] = {}
        self._family_of: dict[tuple[Topology, int, int, tuple[int, ...]], Family] = {}
        self.entries = Entries()
        # Slots whose entry changed, for the tallies to follow.
        self._journal: list[int] = []
        # By slot: the last change of the view that the index shows.
        self._seen_at = list(view.journal.changed_at)
        self._followed = view.journal.changes
        self._sets = len(view.sets)
        devices = max((item.devices for item in view.sets.values()), default=0)
        # By number of free devices, each an ordered set.
        self._by_free: list[dict[Family, None]] = [{} for _ in range(devices + 1)]
        self._by_affinity: dict[int, dict[Family, None]] = {}
        self._alike: list[Alike | None] = [None] * size
        self._numbers = np.zeros(size, np.int32)
        self.free_devices = 0
        names = self._only
        self._allowed = None if names is None else {view.slots[name] for name in names if name in view.slots}
        self._find_spans()
        members: dict[Alike, list[int]] = {}
        for slot in range(size):
            alike = self._alike[slot] = self._found(slot)
            if alike is not None:
                members.setdefault(alike, []).append(slot)
        for alike, slots in members.items():
            self._flip(alike, together(slots, size))
            self._numbers[slots] = alike.number
            self.free_devices += alike.family.free * len(slots)

    def _find_spans(self) -> None:
        """Slots without a node may be in one: nothing is found there."""
        view = self.view
        self._places = (view.nodes.copy(), view.racks.copy(), view.fabrics.copy())
        codes: dict[tuple[str, str], int] = {}
        places = np.array([codes.setdefault(place, len(codes)) for place in zip(view.fabrics, view.racks, strict=True)])
        racks = _numbered([(fabric, rack) if rack else None for fabric, rack in codes])
        fabrics = _numbered([fabric or None for fabric, _ in codes])
        levels = ((LocalityLevel.RACK, racks), (LocalityLevel.FABRIC, fabrics))
        # The numbers of racks and fabrics, by slot; -1 for nodes without one.
        self.spans_at = {level: numbers[places] if len(places) else numbers for level, numbers in levels}
        # These know the spans, not the index: an index that is used no more goes at once.
        spans_at, size = self.spans_at, len(view.nodes)
        members: FeasibilityAnswers[tuple[LocalityLevel, int], NDArray[np.intp]] = FeasibilityAnswers(
            lambda span: np.flatnonzero(spans_at[span[0]] == span[1])
        )
        self._members = members
        self._spans: FeasibilityAnswers[tuple[LocalityLevel, int], Slots] = FeasibilityAnswers(
            lambda span: together(members[span].tolist(), size)
        )
        self._tallies: FeasibilityAnswers[tuple[TaskKind, int], CapacityTotals] = FeasibilityAnswers(
            lambda kind_and_most: CapacityTotals(kind_and_most[1], spans_at), _MOST_TALLIES
        )
        self._everywhere: Slots = (1 << len(view.nodes)) - 1

    def _met(self, state: _State, slot: int) -> Alike:
        topology, free, millicores, memory, socket_jobs, affinity, kept, bandwidth = state
        of = (topology, free, affinity, kept)
        family = self._family_of.get(of)
        if family is None:
            left = self.view.device_memory_left(slot)
            family = self._family_of[of] = Family(topology, free, affinity, left)
        key = (family, sum(millicores), memory, sum(socket_jobs), bandwidth)
        alike = self._by_key.get(key)
        if alike is None:
            alike = self._by_key[key] = self.entries.add(*key)
        self._by_state[state] = alike
        return alike

    def _found(self, slot: int) -> Alike | None:
        view = self.view
        if not view.available[slot] or (self._allowed is not None and slot not in self._allowed):
            return None
        kept = view.parked.get(slot, ()) if view.parked else ()
        state = (
            view.topologies[slot],
            view.free[slot],
            view.millicores[slot],
            view.memory[slot],
            view.socket_jobs[slot],
            view.affinity[slot],
            kept,
            view.bandwidth.get(slot, ()) if view.bandwidth else (),
        )
        return self._by_state.get(state) or self._met(state, slot)

    def _changed(self, slot: int) -> None:
        self._seen_at[slot] = self.view.journal.changed_at[slot]
        before, alike = self._alike[slot], self._found(slot)
        if before is not alike:
            self._put((slot,), 1 << slot, before, alike)

    def _all_changed(self, slots: Sequence[int]) -> None:
        """Most nodes of a large gang were alike and are alike again: those go from one entry to another at once."""
        if len(slots) == 1:
            self._changed(slots[0])
            return
        moved: dict[tuple[Alike | None, Alike | None], list[int]] = {}
        for slot in dict.fromkeys(slots):
            self._seen_at[slot] = self.view.journal.changed_at[slot]
            moved.setdefault((self._alike[slot], self._found(slot)), []).append(slot)
        for (before, alike), some in moved.items():
            if before is not alike:
                self._put(some, together(some, len(self._alike)), before, alike)

    def _put(self, slots: Sequence[int], nodes: Slots, before: Alike | None, alike: Alike | None) -> None:
        """Move nodes, given as `slots` and as bits in `nodes`, between two entries; None stands for no entry."""
        if before is not None:
            self._flip(before, nodes)
            self.free_devices -= before.family.free * len(slots)
        if alike is not None:
            self._flip(alike, nodes)
            self.free_devices += alike.family.free * len(slots)
        number = 0 if alike is None else alike.number
        for slot in slots:
            self._alike[slot] = alike
        if len(slots) == 1:
            self._numbers[slots[0]] = number
        else:
            self._numbers[slots] = number
        self._journal.extend(slots)

    def _flip(self, alike: Alike, slots: Slots) -> None:
        family = alike.family
        was_there = bool(family.members)
        self.entries.flip(alike, slots)
        if not was_there:
            self._by_free[family.free][family] = None
            self._by_affinity.setdefault(family.affinity, {})[family] = None
        elif not family.members:
            del self._by_free[family.free][family]
            del self._by_affinity[family.affinity][family]


def _numbered(spans: Sequence[Hashable]) -> NDArray[np.int32]:
    """The number of each, as the first of its kind came; -1 for None."""
    numbers: dict[Hashable, int] = {}
    return np.array([-1 if span is None else numbers.setdefault(span, len(numbers)) for span in spans], np.int32)


Claims: TypeAlias = tuple[Claim, ...]


# Claims that were taken (None), or given back by nodes of these affinities.
Step: TypeAlias = tuple[Claims, tuple[int, ...] | None]


class Trial:
    """The one tentative change of a capacity index. The index shows all of it at once, and undoes what is left of it at
    the end of `CapacityIndex.tentative`."""

    def __init__(self, room: CapacityIndex) -> None:
        self.room = room
        self._done: list[Step] = []

    @property
    def mark(self) -> int:
        """The point that `undo` returns to."""
        return len(self._done)

    def take(self, claims: Claims) -> None:
        self.room.take(claims)
        self._note((claims, None))

    def give(self, claims: Iterable[Claim]) -> None:
        """Give claims back; those of nodes that left are ignored."""
        view = self.room.view
        there = tuple([claim for claim in claims if claim.node in view])
        affinities = tuple([view.affinity[view.slots[claim.node]] for claim in there])
        self.room.give(there)
        self._note((there, affinities))

    def _note(self, step: Step) -> None:
        if not self._done:
            self.room._open.append(self)
        self._done.append(step)

    def undo(self, mark: int = 0) -> list[Step]:
        """Restore the index at a mark, or before the trial. Return what was undone, for `redo`."""
        undone = self._done[mark:]
        if undone and not mark:
            self.room._open.remove(self)
        while len(self._done) > mark:
            claims, affinities = self._done.pop()
            if affinities is None:
                self.room.give(claims)
                continue
            for claim, affinity in zip(claims, affinities, strict=True):
                self.room.take((claim,), affinity)
        return undone

    def redo(self, undone: Iterable[Step]) -> None:
        for claims, affinities in undone:
            (self.take if affinities is None else self.give)(claims)
