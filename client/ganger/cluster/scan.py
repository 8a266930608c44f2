"""Which nodes could host so much of a gang: one vectorised pass over the view's columns.

What a scan promises it keeps: cores may come from any socket of a node, so sums decide, and device masks are looked up
by level. Constraints can be left out one by one, which is how the true blocker of a gang is found.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.columns import Columns
from ganger.cluster.fit import demand
from ganger.cluster.placement_search import PLENTY
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import ConfigurationSet, GangShape, LocalityLevel
from ganger.cluster.topology import FAR, Topology
from ganger.cluster.view import View

NOTHING: frozenset[Reason] = frozenset()


@dataclass(slots=True)
class Scan:
    """One view, one gang. `usable` marks nodes that are there, take gangs and are not to be avoided."""

    view: View
    shape: GangShape
    columns: Columns
    size: int
    usable: NDArray[np.bool_]
    # Per node: devices with less memory left than the gang needs of each; None where there are none.
    short: NDArray[np.uint64] | None
    # Per node: devices that it could take, and how many.
    free: NDArray[np.uint64]
    free_devices: NDArray[np.int64]
    # Codes in `Columns.sets` of the configuration sets.
    sets: tuple[tuple[int, ConfigurationSet], ...]

    @classmethod
    def of(cls, view: View, shape: GangShape, avoid: Collection[str] = (), only: Collection[str] | None = None) -> Scan:
        columns = view.columns()
        size = len(view.nodes)
        usable = columns.available[:size].copy()
        if only is not None:
            usable[:] = False
            slots = [view.slots[name] for name in only if name in view.slots]
            usable[slots] = columns.available[slots]
        for name in avoid:
            if name in view.slots:
                usable[view.slots[name]] = False
        short = _short_of_memory(view, columns, shape.device_memory_bytes)
        free = columns.free[:size] if short is None else columns.free[:size] & ~short
        free_devices = np.bitwise_count(free).astype(np.int64)
        sets = tuple((view.set_code(name), configuration_set) for name, configuration_set in view.sets.items())
        return cls(view, shape, columns, size, usable, short, free, free_devices, sets)

    @property
    def device_counts(self) -> NDArray[np.int64]:
        """Per node: devices it has, free or not."""
        counts = np.zeros(self.size, np.int64)
        for code, configuration_set in self.sets:
            counts[self._of_set(code)] = configuration_set.devices
        return counts

    def closest(self, gpus: int, relaxed: Collection[Reason] = NOTHING) -> NDArray[np.int8]:
        """Per node: the level of the best `gpus` free devices of the wanted type, or FAR."""
        levels = np.full(self.size, FAR, np.int8)
        free, counts = self._takable(relaxed)
        for code, configuration_set in self.sets:
            if gpus and self.shape.device_type and configuration_set.device_type != self.shape.device_type:
                continue
            here = self._of_set(code)
            if not here.size:
                continue
            topology = self.view.topologies[here[0]]
            if gpus <= 1:
                enough = here if counts is None else here[counts[here] >= gpus]
                levels[enough] = FAR if gpus > configuration_set.devices else LocalityLevel.NVLINK
            elif free is None:
                levels[here] = topology.closest(topology.all_mask, gpus)
            else:
                levels[here] = _levels(topology, free[here], gpus)
        return levels

    def hosts(self, level: LocalityLevel, relaxed: Collection[Reason] = NOTHING) -> NDArray[np.bool_]:
        """Nodes that could host the whole gang within `level`."""
        closest = self.closest(self.shape.gpus, relaxed)
        within = LocalityLevel.NODE if Reason.LOCALITY in relaxed else min(level, LocalityLevel.NODE)
        hosts = self._counted(relaxed) & (closest <= within)
        everything = tuple(role.tasks for role in self.shape.roles)
        for code, configuration_set in self.sets:
            needed = demand(configuration_set, self.shape, everything)
            here = self.columns.sets[: self.size] == code
            if Reason.CORES not in relaxed:
                hosts &= ~here | (self.columns.millicores[: self.size] >= needed.millicores)
            if Reason.MEMORY not in relaxed:
                hosts &= ~here | (self.columns.memory[: self.size] >= needed.memory_bytes)
        return hosts

    def capacity(self, role: int, relaxed: Collection[Reason] = NOTHING) -> NDArray[np.int64]:
        """Per node: how many tasks of one role it could take, were it asked for nothing else."""
        capacity = np.zeros(self.size, np.int64)
        one = tuple(int(index == role) for index in range(len(self.shape.roles)))
        gpus = self.shape.roles[role].shape.gpus
        _, counts = self._takable(relaxed)
        for code, configuration_set in self.sets:
            if gpus and self.shape.device_type and configuration_set.device_type != self.shape.device_type:
                continue
            needed = demand(configuration_set, self.shape, one)
            here = self._of_set(code)
            room = np.full(here.size, PLENTY, np.int64)
            if gpus:
                free = configuration_set.devices if counts is None else counts[here]
                room = np.minimum(room, free // gpus)
            if needed.millicores and Reason.CORES not in relaxed:
                room = np.minimum(room, self.columns.millicores[here] // needed.millicores)
            if needed.memory_bytes and Reason.MEMORY not in relaxed:
                room = np.minimum(room, self.columns.memory[here] // needed.memory_bytes)
            capacity[here] = room
        capacity[~self._counted(relaxed)] = 0
        return capacity

    def spans(self, level: LocalityLevel) -> NDArray[np.int32]:
        """Per node: the number of its rack, fabric or cluster; nodes of one number are within `level`; 0 is nowhere."""
        if level == LocalityLevel.RACK:
            return self.columns.racks[: self.size]
        if level == LocalityLevel.FABRIC:
            return self.columns.fabrics[: self.size]
        return np.ones(self.size, np.int32)

    def _takable(
        self, relaxed: Collection[Reason]
    ) -> tuple[NDArray[np.uint64] | None, NDArray[np.integer[Any]] | None]:
        """Per node: the devices that it could take, and how many; None for all it has."""
        short = None if Reason.DEVICE_MEMORY in relaxed else self.short
        if Reason.GPUS in relaxed:
            if short is None:
                return None, None
            free = ~short
            for code, _ in self.sets:
                here = self._of_set(code)
                if here.size:
                    free[here] &= np.uint64(self.view.topologies[here[0]].all_mask)
        elif short is self.short:
            return self.free, self.free_devices
        else:
            free = self.columns.free[: self.size]
        return free, np.bitwise_count(free)

    def _counted(self, relaxed: Collection[Reason]) -> NDArray[np.bool_]:
        if Reason.NODE_UNAVAILABLE in relaxed:
            return np.array([bool(name) for name in self.view.nodes], np.bool_)
        return self.usable

    def _of_set(self, code: int) -> NDArray[np.intp]:
        return np.flatnonzero(self.columns.sets[: self.size] == code)


def _short_of_memory(view: View, columns: Columns, needed: int) -> NDArray[np.uint64] | None:
    small = [item for item in view.sets.values() if needed > item.device_memory_bytes > 0]
    if not needed or not (small or view.parked):
        return None
    size = len(view.nodes)
    short = np.zeros(size, np.uint64)
    for item in small:
        short[columns.sets[:size] == view.set_code(item.name)] = (1 << item.devices) - 1
    for slot in view.parked:
        short[slot] = view.topologies[slot].all_mask & ~view.roomy(slot, needed)
    return short


def _levels(topology: Topology, free: NDArray[np.uint64], gpus: int) -> NDArray[np.int8]:
    if topology.has_tables:
        return topology.closest_table(gpus)[free.astype(np.intp)]
    masks, where = np.unique(free, return_inverse=True)
    return np.array([topology.closest(int(mask), gpus) for mask in masks], np.int8)[where]
