"""What keeps a gang from being placed: the constraints without which it would fit, with figures.

Each constraint is left out in turn. One whose absence alone makes room is a true blocker: removing it starts the job.
When no single one does, all those that are short on their own are named. Answers come from sums over the entries of a
capacity index: exact for gangs of one role, an upper bound for several.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import PLENTY
from ganger.cluster.feasibility import Alike, Family, each
from ganger.cluster.fit import BANDWIDTH_REASONS, bandwidth_of, demand
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import (
    DIMENSIONS,
    UNLIMITED_MB_PER_S,
    GangShape,
    LocalityLevel,
    accepts_type,
    shapes_by_type,
)
from ganger.cluster.search import PlacementRequest, widest_now
from ganger.cluster.topology import bits

CONSTRAINTS: Final = (
    Reason.GPUS,
    Reason.DEVICE_MEMORY,
    Reason.CORES,
    Reason.MEMORY,
    *BANDWIDTH_REASONS,
    Reason.LOCALITY,
)
_ALL: Final = frozenset(CONSTRAINTS)
_OF_DEVICES: Final = frozenset({Reason.GPUS, Reason.DEVICE_MEMORY})
_NOTHING: Final = frozenset[Reason]()
_Numbers: TypeAlias = NDArray[np.int64]


def blockers(index: CapacityIndex, request: PlacementRequest) -> tuple[Refusal, ...]:
    """Return why a gang finds no place: one refusal or more, also where each resource alone would suffice."""
    shape, widest = request.shape, widest_now(request.shape, request.waited_s)
    where = index if request.only is None else CapacityIndex(index.view, request.only)
    with where.excluding(request.avoid):
        refusals = _of_types(where, shape, widest)
    if widest < shape.locality.widest:
        return (_still_patient(shape, request.waited_s, widest), *refusals)
    return refusals


def _of_types(index: CapacityIndex, shape: GangShape, widest: LocalityLevel) -> tuple[Refusal, ...]:
    """Return the blockers of each device type that the gang accepts and a node has, the preferred type first."""
    there = {configuration_set.device_type for configuration_set in index.view.sets.values()}
    shapes = [one for one in shapes_by_type(shape) if one.device_type in there]
    if len(shapes) < 2:
        return _blockers(_Capacity(index, shapes[0] if shapes else shape, widest))
    found = [(one.device_type, refusal) for one in shapes for refusal in _blockers(_Capacity(index, one, widest))]
    return tuple(
        [replace(refusal, detail=f"{kind}: {refusal.detail or refusal.reason.meaning}") for kind, refusal in found]
    )


def _blockers(capacity: _Capacity) -> tuple[Refusal, ...]:
    shape, there = capacity.shape, (*capacity.usable, *capacity.unusable)
    if not any(_is_typed(shape, entry.family) for entry in there):
        where = f" of partition {shape.partition!r}" if shape.partition else ""
        detail = f"no node{where} has {shape.device_type or 'devices'}" if there else f"no node{where} has joined yet"
        return (Refusal(Reason.DEVICE_TYPE if there else Reason.NODE_UNAVAILABLE, detail=detail),)
    if capacity.is_enough(_NOTHING, with_unusable=True):
        # Where the nodes in service would do, had they room, that is what it waits for first.
        lacks = _lacking(capacity) if capacity.usable and capacity.is_enough(_ALL) else ()
        return (*_type_out_of_service(capacity), *lacks, _unavailable(capacity))
    refusals = _lacking(capacity)
    if capacity.unusable and not capacity.is_enough(_ALL):
        return (_unavailable(capacity), *refusals)
    return refusals


def _lacking(capacity: _Capacity) -> tuple[Refusal, ...]:
    constraints: tuple[Reason, ...] = CONSTRAINTS
    if not capacity.shape.names_bandwidth:
        constraints = tuple([reason for reason in constraints if reason not in BANDWIDTH_REASONS])
    reasons = [reason for reason in constraints if capacity.is_enough(frozenset({reason}))]
    if not reasons:
        reasons = [reason for reason in constraints if not capacity.is_enough(_ALL - {reason})]
    return tuple(
        [capacity.refusal(reason) for reason in reasons or [Reason.GPUS if capacity.shape.gpus else Reason.CORES]]
    )


def _type_out_of_service(capacity: _Capacity) -> tuple[Refusal, ...]:
    """A job that names a device type waits for just its nodes, though others are in service."""
    shape = capacity.shape
    if not shape.device_type or not capacity.usable or any(_is_typed(shape, one.family) for one in capacity.usable):
        return ()
    return (Refusal(Reason.DEVICE_TYPE, detail=f"no node with {shape.device_type} is in service"),)


def _unavailable(capacity: _Capacity) -> Refusal:
    view = capacity.index.view
    unusable = [slot for entry in capacity.unusable for slot in each(entry.slots)]
    available = sum([entry.slots.bit_count() for entry in capacity.usable])
    figures = {"nodes": available + len(unusable), "available": available}
    return Refusal(Reason.NODE_UNAVAILABLE, figures, node=view.nodes[unusable[0]] if len(unusable) == 1 else "")


def _still_patient(shape: GangShape, waited_s: float, widest: LocalityLevel) -> Refusal:
    left = shape.locality.patience_s - waited_s
    return Refusal(
        Reason.LOCALITY,
        {"wish": int(widest), "widest": int(shape.locality.widest), "patience_left_seconds": int(left)},
        detail=f"waits for {widest.name} before it takes {shape.locality.widest.name}",
    )


def _is_typed(shape: GangShape, family: Family) -> bool:
    """Return whether nodes of the family have devices of the wanted type, if the gang needs devices."""
    of = family.topology.configuration_set
    return not shape.gpus or (of.devices > 0 and accepts_type(shape.device_type, of.device_type))


class _Capacity:
    """The nodes of an index for one shape within a level, as columns by entry; constraints can be left out."""

    def __init__(self, index: CapacityIndex, shape: GangShape, widest: LocalityLevel) -> None:
        self.index = index
        self.shape = shape
        self._widest = widest
        there = [[entry for entry in index.entries.alikes if entry.slots], _unusable(index)]
        # Nodes of other partitions are of no account.
        self.usable, self.unusable = [
            [entry for entry in some if entry.family.topology.is_in(shape.partition)] for some in there
        ]
        self._entries = [*self.usable, *self.unusable]
        # By what is left out, and by tasks of each role.
        self._masks_without: dict[frozenset[Reason], list[int]] = {}
        self._needed_for: dict[tuple[int, ...], tuple[_Numbers, _Numbers]] = {}
        self._counts = np.array([entry.slots.bit_count() for entry in self._entries], np.int64)

    def is_enough(self, relaxed: frozenset[Reason], with_unusable: bool = False) -> bool:
        """Return whether there is room by sums without these constraints."""
        shape, widest = self.shape, self._widest
        count = len(self._entries) if with_unusable else len(self.usable)
        if not count:
            return False
        if shape.nodes <= 1 and bool(self._hosts(relaxed)[:count].any()):
            return True
        if Reason.LOCALITY in relaxed:
            widest = LocalityLevel.CLUSTER
        if shape.nodes == 1 or widest < LocalityLevel.RACK:
            return False
        rooms = [self._room(role, relaxed)[:count] for role in range(len(shape.roles))]
        if widest is LocalityLevel.CLUSTER:
            # Where a rack has enough, the cluster has.
            return self._hold(rooms, self._counts[:count])
        levels = (LocalityLevel.RACK, LocalityLevel.FABRIC)
        return any(self._is_enough_in_one(level, rooms) for level in levels if level <= widest)

    def refusal(self, reason: Reason) -> Refusal:
        """The constraint with its figures, of the nodes that may be used and have the type."""
        shape = self.shape
        typed = [entry for entry in self.usable if _is_typed(shape, entry.family)]
        match reason:
            case Reason.DEVICE_MEMORY:
                return self._device_memory(typed)
            case Reason.GPUS:
                free = sum([entry.family.free * entry.slots.bit_count() for entry in typed])
                largest = max([entry.family.free for entry in typed], default=0)
                detail = f"not enough free devices in partition {shape.partition!r}" if shape.partition else ""
                return Refusal(reason, {"needed": shape.gpus, "free": free, "largest_free": largest}, detail=detail)
            case Reason.LOCALITY:
                within = min(self._widest, LocalityLevel.NODE)
                near = [entry.family.topology.largest(self._takable(entry), within) for entry in typed]
                figures = {"needed": shape.gpus, "widest": int(self._widest), "largest_free": max(near, default=0)}
                return Refusal(reason, figures)
        # Cores and memory only count beside enough devices.
        fewest = min([role.shape.gpus for role in shape.roles], default=0)
        beside = [entry for entry in typed if self._takable(entry).bit_count() >= fewest]
        tasks = tuple([role.tasks for role in shape.roles])
        topologies = dict.fromkeys([entry.family.topology for entry in typed])
        needs = [demand(topology.configuration_set, shape, tasks) for topology in topologies]
        if reason in BANDWIDTH_REASONS:
            place = BANDWIDTH_REASONS.index(reason)
            unit, needed = "mb_per_s", [need.bandwidth[place] for need in needs if need.bandwidth]
            free_of = [(max(0, entry.bandwidth[place]), entry.slots.bit_count()) for entry in beside if entry.bandwidth]
        elif reason is Reason.CORES:
            unit, needed = "millicores", [need.millicores for need in needs]
            free_of = [(entry.millicores, entry.slots.bit_count()) for entry in beside]
        else:
            unit, needed = "bytes", [need.memory_bytes for need in needs]
            free_of = [(entry.memory, entry.slots.bit_count()) for entry in beside]
        figures = {
            f"needed_{unit}": min(needed, default=0),
            f"free_{unit}": sum([amount * count for amount, count in free_of]),
            f"largest_free_{unit}": max([amount for amount, _ in free_of], default=0),
        }
        return Refusal(reason, figures)

    def _device_memory(self, typed: Sequence[Alike]) -> Refusal:
        """The most that is left on a free device, and the node where parked gangs leave too little on most of them."""
        needed = self.shape.device_memory_bytes
        left = [entry.family.left[device] for entry in typed for device in bits(entry.family.mask)]
        short = [
            (-(entry.family.mask & ~self._takable(entry)).bit_count(), entry.lowest)
            for entry in typed
            if min(entry.family.left, default=0) < entry.family.topology.configuration_set.device_memory_bytes
        ]
        most_short, slot = min(short, default=(0, 0))
        figures = {
            "devices": self.shape.gpus,
            "devices_with_room": sum([self._takable(one).bit_count() * one.slots.bit_count() for one in typed]),
            "needed_bytes": needed,
            "largest_free_bytes": max(left, default=0),
        }
        return Refusal(Reason.DEVICE_MEMORY, figures, node=self.index.view.nodes[slot] if most_short else "")

    def _takable(self, entry: Alike) -> int:
        return entry.family.takable(self.shape.device_memory_bytes)

    def _masks(self, relaxed: frozenset[Reason]) -> list[int]:
        key = relaxed & _OF_DEVICES
        if key not in self._masks_without:
            needed = 0 if Reason.DEVICE_MEMORY in key else self.shape.device_memory_bytes
            is_any = Reason.GPUS in key
            families = [entry.family if _is_typed(self.shape, entry.family) else None for entry in self._entries]
            self._masks_without[key] = [
                0 if family is None else family.roomy(needed) if is_any else family.takable(needed)
                for family in families
            ]
        return self._masks_without[key]

    def _hosts(self, relaxed: frozenset[Reason]) -> NDArray[np.bool_]:
        within = LocalityLevel.NODE if Reason.LOCALITY in relaxed else min(self._widest, LocalityLevel.NODE)
        hosts: NDArray[np.bool_] = self._levels(relaxed) <= within
        millicores, memory = self._needed(tuple([role.tasks for role in self.shape.roles]))
        if Reason.CORES not in relaxed:
            hosts &= self._millicores >= millicores
        if Reason.MEMORY not in relaxed:
            hosts &= self._memory >= memory
        for free, wanted in self._bandwidths(tuple([role.tasks for role in self.shape.roles]), relaxed):
            hosts &= free >= wanted
        return hosts

    def _levels(self, relaxed: frozenset[Reason]) -> _Numbers:
        """Return the level of the closest devices for the whole gang, by entry; FAR where there are too few."""
        gpus = self.shape.gpus
        masks = zip(self._entries, self._masks(relaxed), strict=True)
        return np.array([entry.family.topology.closest(mask, gpus) for entry, mask in masks], np.int64)

    def _room(self, role: int, relaxed: frozenset[Reason]) -> _Numbers:
        """Return the tasks of one role that fit on a node without the other roles, by entry."""
        shape = self.shape
        millicores, memory = self._needed(tuple([int(other == role) for other in range(len(shape.roles))]))
        gpus = shape.roles[role].shape.gpus
        room = np.full(len(self._entries), PLENTY, np.int64)
        if gpus:
            room = np.minimum(room, np.array([mask.bit_count() for mask in self._masks(relaxed)], np.int64) // gpus)
        if Reason.CORES not in relaxed:
            room = _shared_out(room, self._millicores, millicores)
        if Reason.MEMORY not in relaxed:
            room = _shared_out(room, self._memory, memory)
        one = tuple([int(other == role) for other in range(len(shape.roles))])
        for free, wanted in self._bandwidths(one, relaxed):
            room = np.minimum(room, np.maximum(0, free) // wanted)
        return room

    def _bandwidths(self, tasks: tuple[int, ...], relaxed: frozenset[Reason]) -> list[tuple[_Numbers, int]]:
        """Return what is free, by entry, and what these tasks name, of each dimension that counts."""
        wanted = bandwidth_of(self.shape, tasks)
        return [
            (self._bandwidth[:, at], amount)
            for at, (reason, amount) in enumerate(zip(BANDWIDTH_REASONS, wanted, strict=False))
            if amount and reason not in relaxed
        ]

    def _hold(self, rooms: Sequence[_Numbers], counts: _Numbers) -> bool:
        """Return whether so many nodes of each entry, with room for so many tasks each, hold every role."""
        nodes = self.shape.nodes
        for role, room in zip(self.shape.roles, rooms, strict=True):
            if not nodes:
                if int((np.minimum(room, role.tasks) * counts).sum()) < role.tasks:
                    return False
                continue
            best = np.sort(np.repeat(room, np.minimum(counts, nodes)))[::-1][:nodes]
            if len(best) < nodes or best.sum() < role.tasks or (role.tasks >= nodes and not best.all()):
                return False
        return True

    def _is_enough_in_one(self, level: LocalityLevel, rooms: Sequence[_Numbers]) -> bool:
        spans, entry_at, count = self.index.spans_at[level], self._entry_at, len(rooms[0])
        width, is_named = int(spans.max(initial=-1)) + 1, spans >= 0
        if self.shape.nodes:
            members = (np.bincount(entry_at[spans == span], minlength=count + 1) for span in range(width))
            return any(self._hold(rooms, counts[1 : count + 1]) for counts in members)
        enough = np.ones(width, np.bool_)
        for role, room in zip(self.shape.roles, rooms, strict=True):
            by_entry = np.zeros(len(self._entries) + 1, np.int64)
            by_entry[1 : count + 1] = np.minimum(room, role.tasks)
            enough &= np.bincount(spans[is_named], by_entry[entry_at[is_named]], width) >= role.tasks
        return bool(enough.any())

    def _needed(self, tasks: tuple[int, ...]) -> tuple[_Numbers, _Numbers]:
        """Return the millicores and the bytes that `tasks`, one number for each role, need on a node; by entry."""
        if tasks not in self._needed_for:
            topologies = [entry.family.topology for entry in self._entries]
            needs = {one: demand(one.configuration_set, self.shape, tasks) for one in dict.fromkeys(topologies)}
            self._needed_for[tasks] = (
                np.array([needs[one].millicores for one in topologies], np.int64),
                np.array([needs[one].memory_bytes for one in topologies], np.int64),
            )
        return self._needed_for[tasks]

    @cached_property
    def _entry_at(self) -> _Numbers:
        """Positions, from 1, of the entries of nodes in `usable` and then `unusable`, by slot; 0 without a node."""
        numbers = self.index.entries_in(LocalityLevel.CLUSTER, 0)
        position = np.zeros(len(self.index.entries.alikes) + 1, np.int64)
        position[[entry.number for entry in self.usable]] = np.arange(1, len(self.usable) + 1)
        found: _Numbers = position[numbers]
        for at, entry in enumerate(self.unusable, len(self.usable) + 1):
            found[list(each(entry.slots))] = at
        return found

    @cached_property
    def _millicores(self) -> _Numbers:
        return np.array([entry.millicores for entry in self._entries], np.int64)

    @cached_property
    def _bandwidth(self) -> _Numbers:
        """Return what is free, by entry and dimension."""
        no_limit = (UNLIMITED_MB_PER_S,) * len(DIMENSIONS)
        found = [entry.bandwidth or no_limit for entry in self._entries]
        return np.array(found, np.int64).reshape(len(found), len(DIMENSIONS))

    @cached_property
    def _memory(self) -> _Numbers:
        return np.array([entry.memory for entry in self._entries], np.int64)


def _shared_out(room: _Numbers, amounts: _Numbers, needed: _Numbers) -> _Numbers:
    some: _Numbers = np.where(needed > 0, np.minimum(room, amounts // np.maximum(1, needed)), room)
    return some


def _unusable(index: CapacityIndex) -> list[Alike]:
    view = index.view
    found: dict[tuple[object, ...], Alike] = {}
    for slot in np.flatnonzero(index.entries_in(LocalityLevel.CLUSTER, 0) == 0).tolist():
        if not view.nodes[slot]:
            continue
        kept = view.parked.get(slot, ())
        bandwidth = view.bandwidth.get(slot, ())
        key = (view.topologies[slot], view.free[slot], view.millicores[slot], view.memory[slot], kept, bandwidth)
        entry = found.get(key)
        if entry is None:
            family = Family(view.topologies[slot], view.free[slot], 0, view.device_memory_left(slot))
            entry = found[key] = Alike(0, family, sum(view.millicores[slot]), view.memory[slot], 0, bandwidth)
        entry.slots |= 1 << slot
    return list(found.values())
