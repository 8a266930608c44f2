"""What keeps a gang from being placed: the constraints without which it would fit, with figures.

Each constraint is left out in turn. One whose absence alone makes room is a true blocker: removing it starts the job.
When no single one does, all those that are short on their own are named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from ganger.placement.scan import NOTHING, Scan
from ganger.resources.fit import demand
from ganger.resources.reasons import Reason, Refusal
from ganger.resources.topology import bits
from ganger.resources.values import ConfigurationSet, GangShape, Level

_CONSTRAINTS = (Reason.GPUS, Reason.DEVICE_MEMORY, Reason.CORES, Reason.MEMORY, Reason.LOCALITY)


def blockers(scan: Scan, widest: Level) -> tuple[Refusal, ...]:
    """Never empty: called when the gang found no place at `widest`, though each piece alone may be there."""
    shape = scan.shape
    typed = [item for _, item in scan.sets if not shape.gpus or shape.device_type in ("", item.device_type)]
    typed = [item for item in typed if item.devices or not shape.gpus]
    wanted = shape.device_type or "devices"
    if not any(scan.view.topologies[slot].configuration_set in typed for slot in scan.view.slots.values()):
        detail = f"no node has {wanted}" if scan.view.slots else "no node has joined yet"
        return (Refusal(Reason.DEVICE_TYPE if scan.view.slots else Reason.NODE_UNAVAILABLE, detail=detail),)
    if _feasible(scan, widest, (Reason.NODE_UNAVAILABLE,)):
        return (*_type_out_of_service(scan, typed), _unavailable(scan))
    reasons = [reason for reason in _CONSTRAINTS if _feasible(scan, widest, (reason,))]
    if not reasons:
        reasons = [
            reason
            for reason in _CONSTRAINTS
            if not _feasible(scan, widest, tuple(other for other in _CONSTRAINTS if other != reason))
        ]
    refusals = tuple(
        _figures(scan, reason, widest) for reason in reasons or [Reason.GPUS if shape.gpus else Reason.CORES]
    )
    held_back = np.count_nonzero(~scan.usable) > len(scan.view.nodes) - len(scan.view.slots)
    if held_back and not _feasible(scan, widest, _CONSTRAINTS):
        return (_unavailable(scan), *refusals)
    return refusals


def _feasible(scan: Scan, widest: Level, relaxed: Collection[Reason] = NOTHING) -> bool:
    """Whether enough room is there by sums; exact for gangs of one role, an upper bound for several."""
    shape = scan.shape
    if shape.nodes <= 1 and bool(scan.hosts(widest, relaxed).any()):
        return True
    if Reason.LOCALITY in relaxed:
        widest = Level.CLUSTER
    if shape.nodes == 1 or widest < Level.RACK:
        return False
    rooms = [(role.tasks, scan.capacity(index, relaxed)) for index, role in enumerate(shape.roles)]
    return any(
        _enough(shape, rooms, scan.spans(level))
        for level in (Level.RACK, Level.FABRIC, Level.CLUSTER)
        if level <= widest
    )


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


def _type_out_of_service(scan: Scan, typed: Collection[ConfigurationSet]) -> tuple[Refusal, ...]:
    """A job that names a device type waits for just its nodes, though others are in service."""
    usable = [scan.view.topologies[slot].configuration_set for slot in np.flatnonzero(scan.usable)]
    if not scan.shape.device_type or not usable or any(one in typed for one in usable):
        return ()
    return (Refusal(Reason.DEVICE_TYPE, detail=f"no node with {scan.shape.device_type} is in service"),)


def _unavailable(scan: Scan) -> Refusal:
    figures = {"nodes": len(scan.view), "available": int(np.count_nonzero(scan.usable))}
    slots = [slot for slot in scan.view.slots.values() if not scan.usable[slot]]
    return Refusal(Reason.NODE_UNAVAILABLE, figures, node=scan.view.nodes[slots[0]] if len(slots) == 1 else "")


def _figures(scan: Scan, reason: Reason, widest: Level) -> Refusal:
    shape, usable = scan.shape, scan.usable
    tasks = tuple(role.tasks for role in shape.roles)
    typed = usable & (scan.closest(min(1, shape.gpus), (Reason.GPUS, Reason.DEVICE_MEMORY)) <= Level.NODE)
    if reason is Reason.DEVICE_MEMORY:
        return _device_memory(scan, typed)
    if reason is Reason.GPUS:
        free = np.where(typed, np.bitwise_count(scan.columns.free[: scan.size]), 0)
        figures = {"needed": shape.gpus, "free": int(free.sum()), "largest_free": int(free.max(initial=0))}
        return Refusal(reason, figures)
    if reason is Reason.LOCALITY:
        largest = max(
            (
                scan.view.topologies[slot].largest(int(scan.free[slot]), min(widest, Level.NODE))
                for slot in np.flatnonzero(typed)
            ),
            default=0,
        )
        return Refusal(reason, {"needed": shape.gpus, "widest": int(widest), "largest_free": largest})
    # Cores and memory only count beside enough devices.
    beside = typed & (scan.free_devices >= min((role.shape.gpus for role in shape.roles), default=0))
    column = (scan.columns.millicores if reason is Reason.CORES else scan.columns.memory)[: scan.size]
    free = np.where(beside, column, 0)
    sets = [item for code, item in scan.sets if bool((scan.columns.sets[: scan.size][typed] == code).any())]
    needs = [demand(item, shape, tasks) for item in sets]
    if reason is Reason.CORES:
        needed = min((need.millicores for need in needs), default=0)
        unit = "millicores"
    else:
        needed = min((need.memory_bytes for need in needs), default=0)
        unit = "bytes"
    figures = {
        f"needed_{unit}": needed,
        f"free_{unit}": int(free.sum()),
        f"largest_free_{unit}": int(free.max(initial=0)),
    }
    return Refusal(reason, figures)


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
