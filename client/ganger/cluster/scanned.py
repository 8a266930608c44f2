"""The room there is for a gang, by a scan of all nodes: what `blockers` asks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.fit import demand
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import ConfigurationSet, GangShape, LocalityLevel
from ganger.cluster.scan import Scan
from ganger.cluster.topology import bits
from ganger.cluster.view import View


class Scanned:
    """See `blockers.Room`."""

    def __init__(self, scan: Scan, widest: LocalityLevel) -> None:
        self._scan = scan
        self._widest = widest

    @property
    def view(self) -> View:
        return self._scan.view

    @property
    def shape(self) -> GangShape:
        return self._scan.shape

    def feasible(self, relaxed: tuple[Reason, ...]) -> bool:
        scan, shape, widest = self._scan, self.shape, self._widest
        if shape.nodes <= 1 and bool(scan.hosts(widest, relaxed).any()):
            return True
        if Reason.LOCALITY in relaxed:
            widest = LocalityLevel.CLUSTER
        if shape.nodes == 1 or widest < LocalityLevel.RACK:
            return False
        rooms = [(role.tasks, scan.capacity(index, relaxed)) for index, role in enumerate(shape.roles)]
        return any(
            _enough(shape, rooms, scan.spans(level))
            for level in (LocalityLevel.RACK, LocalityLevel.FABRIC, LocalityLevel.CLUSTER)
            if level <= widest
        )

    def usable_sets(self) -> list[ConfigurationSet]:
        topologies = self.view.topologies
        return [topologies[slot].configuration_set for slot in np.flatnonzero(self._scan.usable)]

    def usable_nodes(self) -> int:
        return int(np.count_nonzero(self._scan.usable))

    def unusable_nodes(self) -> list[str]:
        return [name for name, slot in self.view.slots.items() if not self._scan.usable[slot]]

    def figures(self, reason: Reason) -> Refusal:
        scan, shape, widest, usable = self._scan, self.shape, self._widest, self._scan.usable
        typed = usable & (scan.closest(min(1, shape.gpus), (Reason.GPUS, Reason.DEVICE_MEMORY)) <= LocalityLevel.NODE)
        if reason is Reason.DEVICE_MEMORY:
            return _device_memory(scan, typed)
        if reason is Reason.GPUS:
            free = np.where(typed, np.bitwise_count(scan.columns.free[: scan.size]), 0)
            return devices_short(shape, int(free.sum()), int(free.max(initial=0)))
        if reason is Reason.LOCALITY:
            largest = max(
                (
                    scan.view.topologies[slot].largest(int(scan.free[slot]), min(widest, LocalityLevel.NODE))
                    for slot in np.flatnonzero(typed)
                ),
                default=0,
            )
            return devices_apart(shape, widest, largest)
        # Cores and memory only count beside enough devices.
        beside = typed & (scan.free_devices >= fewest_devices(shape))
        column = (scan.columns.millicores if reason is Reason.CORES else scan.columns.memory)[: scan.size]
        free = np.where(beside, column, 0)
        sets = [item for code, item in scan.sets if bool((scan.columns.sets[: scan.size][typed] == code).any())]
        return share_short(shape, reason, sets, int(free.sum()), int(free.max(initial=0)))


def fewest_devices(shape: GangShape) -> int:
    """Devices of a task of the role that needs the fewest."""
    return min([role.shape.gpus for role in shape.roles], default=0)


def devices_short(shape: GangShape, free: int, largest: int) -> Refusal:
    return Refusal(Reason.GPUS, {"needed": shape.gpus, "free": free, "largest_free": largest})


def devices_apart(shape: GangShape, widest: LocalityLevel, largest: int) -> Refusal:
    """`largest`: the most free devices that lie within `widest` of each other on any node."""
    return Refusal(Reason.LOCALITY, {"needed": shape.gpus, "widest": int(widest), "largest_free": largest})


def share_short(shape: GangShape, reason: Reason, sets: Iterable[ConfigurationSet], free: int, largest: int) -> Refusal:
    """Of cores or memory. `sets`: those of the nodes that it may use; `free`: of all together, `largest` of one."""
    tasks = tuple([role.tasks for role in shape.roles])
    needs = [demand(item, shape, tasks) for item in sets]
    if reason is Reason.CORES:
        needed = min([need.millicores for need in needs], default=0)
        unit = "millicores"
    else:
        needed = min([need.memory_bytes for need in needs], default=0)
        unit = "bytes"
    return Refusal(reason, {f"needed_{unit}": needed, f"free_{unit}": free, f"largest_free_{unit}": largest})


def _enough(shape: GangShape, rooms: Iterable[tuple[int, np.ndarray]], spans: np.ndarray) -> bool:
    count = int(spans.max(initial=0)) + 1
    enough = np.ones(count, np.bool_)
    enough[0] = False
    for tasks, room in rooms:
        if shape.nodes:
            for span in np.flatnonzero(enough):
                best = np.sort(room[spans == span])[::-1][: shape.nodes]
                fits = best.size == shape.nodes and (tasks < shape.nodes or bool((best > 0).all()))
                enough[span] &= fits and int(best.sum()) >= tasks
        else:
            enough &= np.bincount(spans, weights=np.minimum(room, tasks), minlength=count) >= tasks
    return bool(enough.any())


def _device_memory(scan: Scan, typed: NDArray[np.bool_]) -> Refusal:
    """The most that is left on a free device, and the node where most free devices lack it."""
    view, free = scan.view, np.where(typed, scan.columns.free[: scan.size], np.uint64(0))
    whole = free > 0
    whole[list(view.parked)] = False
    codes = set(scan.columns.sets[: scan.size][whole].tolist())
    left = [item.device_memory_bytes for code, item in scan.sets if code in codes]
    for slot in view.parked:
        sizes = view.device_memory_left(slot)
        left += [sizes[device] for device in bits(int(free[slot]))]
    short = (
        {slot: int(free[slot] & scan.short[slot]).bit_count() for slot in view.parked} if scan.short is not None else {}
    )
    node = max(short, key=lambda slot: short[slot], default=None)
    figures = {
        "devices": scan.shape.gpus,
        "devices_with_room": int(scan.free_devices[typed].sum()),
        "needed_bytes": scan.shape.device_memory_bytes,
        "largest_free_bytes": max(left, default=0),
    }
    return Refusal(Reason.DEVICE_MEMORY, figures, node=view.nodes[node] if node is not None and short[node] else "")
