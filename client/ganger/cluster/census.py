"""The room there is for a gang, from sums over all nodes that are kept while nodes change: what `blockers` asks.

What `Scanned` finds by a scan of all nodes for each question, one node at a time. Not for gangs over an exact number of
nodes, for which sums say nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.blockers import ALL_BUT, ALONE, CONSTRAINTS, OUT_OF_SERVICE
from ganger.cluster.fit import demand
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import ConfigurationSet, GangShape, LocalityLevel
from ganger.cluster.scan import Scan
from ganger.cluster.scanned import Scanned, devices_apart, devices_short, fewest_devices, share_short
from ganger.cluster.topology import FAR
from ganger.cluster.view import View

# What is left out at once in any question.
_QUESTIONS: Final[dict[tuple[Reason, ...], int]] = {
    relaxed: at for at, relaxed in enumerate([(), *ALONE, *ALL_BUT, CONSTRAINTS])
}
_AT: Final = {**_QUESTIONS, OUT_OF_SERVICE: _QUESTIONS[()]}
_UNLIMITED: Final = 1 << 62
_MOST_REMEMBERED: Final = 512
# Where nodes are together: level, fabric and rack.
_Span: TypeAlias = tuple[LocalityLevel, str, str]
_EVERYWHERE: Final[_Span] = (LocalityLevel.CLUSTER, "", "")
_Sums: TypeAlias = dict[_Span, NDArray[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Nodes of one make of which the same is free. `sums`: whether one could hold the whole gang, by question, then by
    role how many of its tasks it could take, by question."""

    sums: NDArray[np.int64]
    configuration_set: ConfigurationSet
    # Whether it has devices of the wanted type, and beside them cores and memory count.
    is_typed: bool
    is_beside: bool
    # Devices, those of them that lie within the widest level, thousandths of cores, bytes.
    free: int
    largest: int
    millicores: int
    memory: int


class Census:
    """See `blockers.Room`."""

    def __init__(self, view: View, shape: GangShape, widest: LocalityLevel) -> None:
        assert shape.nodes <= 1, f"{shape.nodes} nodes: sums do not tell whether each has a part"
        self._view = view
        self._shape = shape
        self._widest = widest
        self._gpus = shape.gpus
        self._tasks = tuple([role.tasks for role in shape.roles])
        # One task of each role.
        self._ones = [
            tuple([int(role == other) for other in range(len(self._tasks))]) for role in range(len(self._tasks))
        ]
        self._remembered: dict[tuple[object, ...], _Kind] = {}
        # By slot; None without a node.
        self._kinds = [self._kind(slot) if name else None for slot, name in enumerate(view.nodes)]
        self._is_usable = view.available.copy()
        self._spans = [_spans(fabric, rack) for fabric, rack in zip(view.fabrics, view.racks, strict=True)]
        self._usable: _Sums = {}
        self._unusable: _Sums = {}
        # How many nodes of each kind are to be used.
        self._counts: Counter[_Kind] = Counter()
        alike = Counter(zip(self._kinds, self._is_usable, self._spans, strict=True))
        for (kind, usable, spans), number in alike.items():
            if kind is not None:
                self._count(kind, usable, spans, number)

    @property
    def view(self) -> View:
        return self._view

    @property
    def shape(self) -> GangShape:
        return self._shape

    def follow(self, slots: Collection[int]) -> None:
        """See `kept`."""
        view, more = self._view, len(self._view.nodes) - len(self._kinds)
        self._kinds.extend([None] * more)
        self._is_usable.extend([False] * more)
        self._spans.extend([()] * more)
        for slot in slots:
            before, was_usable, spans = self._kinds[slot], self._is_usable[slot], self._spans[slot]
            kind = self._kind(slot) if view.nodes[slot] else None
            usable = view.available[slot]
            now = _spans(view.fabrics[slot], view.racks[slot])
            if kind is before and usable == was_usable and now == spans:
                continue
            if before is not None:
                self._count(before, was_usable, spans, -1)
            if kind is not None:
                self._count(kind, usable, now, 1)
            self._kinds[slot], self._is_usable[slot], self._spans[slot] = kind, usable, now

    def has_room(self, level: LocalityLevel) -> bool:
        """Whether the nodes of any one rack, fabric or cluster have room for every role by sums."""
        return self._enough(level, self._usable, _QUESTIONS[()])

    def feasible(self, relaxed: tuple[Reason, ...]) -> bool:
        at = _AT[relaxed]
        sums = _together(self._usable, self._unusable) if relaxed == OUT_OF_SERVICE else self._usable
        if _EVERYWHERE in sums and sums[_EVERYWHERE][at]:
            return True
        widest = LocalityLevel.CLUSTER if Reason.LOCALITY in relaxed else self._widest
        if self._shape.nodes == 1 or widest < LocalityLevel.RACK:
            return False
        levels = [
            level for level in (LocalityLevel.RACK, LocalityLevel.FABRIC, LocalityLevel.CLUSTER) if level <= widest
        ]
        return any(self._enough(level, sums, at) for level in levels)

    def usable_sets(self) -> Collection[ConfigurationSet]:
        return [kind.configuration_set for kind in self._counts]

    def usable_nodes(self) -> int:
        return self._counts.total()

    def unusable_nodes(self) -> list[str]:
        return [name for name, slot in self._view.slots.items() if not self._is_usable[slot]]

    def figures(self, reason: Reason) -> Refusal:
        counts = [(kind, count) for kind, count in self._counts.items() if kind.is_typed]
        match reason:
            case Reason.DEVICE_MEMORY:
                # It depends on what is kept of each single device.
                return Scanned(Scan.of(self._view, self._shape), self._widest).figures(reason)
            case Reason.GPUS:
                free = sum([kind.free * count for kind, count in counts])
                return devices_short(self._shape, free, max([kind.free for kind, _ in counts], default=0))
            case Reason.LOCALITY:
                largest = max([kind.largest for kind, _ in counts], default=0)
                return devices_apart(self._shape, self._widest, largest)
        sets = {kind.configuration_set.name: kind.configuration_set for kind, _ in counts}.values()
        beside = [
            (kind.millicores if reason is Reason.CORES else kind.memory, count)
            for kind, count in counts
            if kind.is_beside
        ]
        free = sum([size * count for size, count in beside])
        return share_short(self._shape, reason, sets, free, max([size for size, _ in beside], default=0))

    def _enough(self, level: LocalityLevel, sums: _Sums, at: int) -> bool:
        width, tasks = len(_QUESTIONS), self._tasks
        return any(
            span[0] is level and all(room[width * (role + 1) + at] >= needed for role, needed in enumerate(tasks))
            for span, room in sums.items()
        )

    def _count(self, kind: _Kind, usable: bool, spans: tuple[_Span, ...], number: int) -> None:
        """So many nodes of a kind more."""
        sums, more = self._usable if usable else self._unusable, number * kind.sums
        for span in spans:
            if span in sums:
                sums[span] += more
            else:
                sums[span] = more.copy()
        if usable:
            self._counts[kind] += number
            if not self._counts[kind]:
                del self._counts[kind]

    def _kind(self, slot: int) -> _Kind:
        view = self._view
        state = (
            view.topologies[slot],
            view.free[slot],
            view.millicores[slot],
            view.memory[slot],
            view.parked.get(slot),
        )
        kind = self._remembered.get(state)
        if kind is None:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            kind = self._remembered[state] = self._judge(slot)
        return kind

    def _judge(self, slot: int) -> _Kind:
        view, shape, gpus = self._view, self._shape, self._gpus
        topology = view.topologies[slot]
        made = topology.configuration_set
        is_wanted = not shape.device_type or made.device_type == shape.device_type
        free, millicores, memory = view.free[slot], sum(view.millicores[slot]), view.memory[slot]
        roomy = view.roomy(slot, shape.device_memory_bytes)
        whole = demand(made, shape, self._tasks)
        ones = [demand(made, shape, one) for one in self._ones]
        hosts: list[int] = []
        rooms: list[list[int]] = [[] for _ in ones]
        for relaxed in _QUESTIONS:
            mask = topology.all_mask if Reason.GPUS in relaxed else free
            if Reason.DEVICE_MEMORY not in relaxed:
                mask &= roomy
            within = LocalityLevel.NODE if Reason.LOCALITY in relaxed else min(self._widest, LocalityLevel.NODE)
            cores = _UNLIMITED if Reason.CORES in relaxed else millicores
            left = _UNLIMITED if Reason.MEMORY in relaxed else memory
            level = topology.closest(mask, gpus) if is_wanted or not gpus else FAR
            hosts.append(level <= within and cores >= whole.millicores and left >= whole.memory_bytes)
            for role, (one, room) in enumerate(zip(ones, rooms, strict=True)):
                most = self._tasks[role]
                if one.gpus:
                    most = min(most, mask.bit_count() // one.gpus if is_wanted else 0)
                if one.millicores:
                    most = min(most, cores // one.millicores)
                if one.memory_bytes:
                    most = min(most, left // one.memory_bytes)
                room.append(most)
        is_typed = (is_wanted or not gpus) and made.devices >= min(1, gpus)
        return _Kind(
            np.array([*hosts, *chain.from_iterable(rooms)], np.int64),
            made,
            is_typed,
            is_typed and (free & roomy).bit_count() >= fewest_devices(shape),
            free.bit_count(),
            topology.largest(free & roomy, min(self._widest, LocalityLevel.NODE)),
            millicores,
            memory,
        )


def _together(some: _Sums, others: _Sums) -> _Sums:
    return (
        {**some, **{span: some[span] + sums if span in some else sums for span, sums in others.items()}}
        if others
        else some
    )


def _spans(fabric: str, rack: str) -> tuple[_Span, ...]:
    """Nowhere is not together."""
    spans = [_EVERYWHERE]
    if fabric:
        spans.append((LocalityLevel.FABRIC, fabric, ""))
    if rack:
        spans.append((LocalityLevel.RACK, fabric, rack))
    return tuple(spans)
