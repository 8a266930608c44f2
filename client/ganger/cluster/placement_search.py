"""A gang over several nodes in a given order: evenly over exactly so many, over as few as will do, or node by node.

The caller gives the order of the nodes; nodes are slots of the view. Gangs that name nothing but devices are placed by
counts of free devices alone, without a capacity index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from ganger.cluster.claims import make_claim
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.cluster.view import LoadMode, View

# More tasks than any gang has; what a node could take that the tasks need nothing of.
PLENTY = 1 << 20


def evenly(view: View, shape: GangShape, order: Iterable[int], mode: LoadMode) -> tuple[Claim, ...] | None:
    """The same number of tasks, give or take one, on each of the first `shape.nodes` nodes that take theirs."""
    nodes = shape.nodes
    claims: list[Claim] = []
    for slot in order:
        at = len(claims)
        tasks = tuple(role.tasks // nodes + (at < role.tasks % nodes) for role in shape.roles)
        claim = make_claim(view, slot, shape, tasks, mode) if any(tasks) else None
        if claim is not None:
            claims.append(claim)
            if len(claims) == nodes:
                return tuple(claims)
    return None


def fewest(
    view: View, shape: GangShape, runs: Iterable[tuple[int, Iterator[int]]], mode: LoadMode
) -> tuple[Claim, ...] | None:
    """One role over the roomiest nodes, its last tasks on a node that they fill best.

    `runs`: nodes with room for so many tasks each, the roomiest first; walked through once, and no further than needed.
    """
    remaining = shape.roles[0].tasks
    claims: list[Claim] = []
    following = iter(runs)
    run, ahead = next(following, None), None
    last: tuple[object, ...] = ()
    while remaining and run is not None:
        room, slots = run
        if room >= remaining:
            ahead = ahead or next(following, None)
            if ahead is not None and ahead[0] >= remaining:
                run, ahead = ahead, None
                continue
        slot = next(slots, None)
        if slot is None:
            run, ahead = ahead or next(following, None), None
            continue
        count = min(remaining, room)
        # Most nodes of a large gang are alike, and whole.
        now = (count, *_state(view, slot))
        if claims and now == last:
            claim = replace(claims[-1], node=view.nodes[slot])
        else:
            found = make_claim(view, slot, shape, (count,), mode)
            if found is None:
                continue
            claim, last = found, now
        claims.append(claim)
        remaining -= count
    return tuple(claims) if not remaining else None


def greedily(view: View, shape: GangShape, order: Iterable[int], mode: LoadMode) -> tuple[Claim, ...] | None:
    """Several roles: node by node as many tasks of each as fit, the roles with the most devices first."""
    nodes = shape.nodes
    remaining = [role.tasks for role in shape.roles]
    by_weight = sorted(range(len(remaining)), key=lambda index: -shape.roles[index].shape.gpus)
    claims: list[Claim] = []
    for slot in order:
        if not any(remaining) or (nodes and len(claims) == nodes):
            break
        tasks = [0] * len(remaining)
        # Each node still to come must get a task when their number is fixed.
        allowed = sum(remaining) - (nodes - len(claims) - 1) if nodes else sum(remaining)
        best: Claim | None = None
        for index in by_weight:
            most = min(remaining[index], allowed - sum(tasks))
            tasks[index], claim = _most_tasks(view, slot, shape, tasks, index, most, mode)
            best = claim or best
        if best is not None:
            claims.append(best)
            remaining = [left - here for left, here in zip(remaining, best.tasks, strict=True)]
    return tuple(claims) if not any(remaining) and (not nodes or len(claims) == nodes) else None


def _state(view: View, slot: int) -> tuple[object, ...]:
    """All that a claim on a node depends on, but for its name."""
    return (
        view.topologies[slot],
        view.free[slot],
        view.millicores[slot],
        view.memory[slot],
        view.socket_jobs[slot],
        view.group_jobs[slot],
        view.parked.get(slot),
    )


def _most_tasks(
    view: View, slot: int, shape: GangShape, tasks: Sequence[int], role: int, most: int, mode: LoadMode
) -> tuple[int, Claim | None]:
    """Most tasks of a role that fit beside `tasks` on one node, and the claim for all of them."""
    low, high = 0, most
    best: Claim | None = None
    while low < high:
        middle = high if best is None and high == most else (low + high + 1) // 2
        wanted = (*tasks[:role], middle, *tasks[role + 1 :])
        claim = make_claim(view, slot, shape, wanted, mode)
        if claim is None:
            high = middle - 1
        else:
            best, low = claim, middle
    return low, best


class FreeDevices:
    """Gang after gang finds here what it would find `anywhere` in a room that all those before it had taken their
    places in. The view is not changed."""

    def __init__(self, view: View) -> None:
        self._view = view
        # By slot.
        self._free = [free if takes else 0 for free, takes in zip(view.free, view.available, strict=True)]
        self.count = sum([free.bit_count() for free in self._free])

    def take(self, shape: GangShape) -> tuple[Claim, ...] | None:
        """A place, now taken, for a gang that names nothing but devices (`is_counted`); None: there is none."""
        if shape.gpus > self.count:
            return None
        (role,) = shape.roles
        each, remaining = role.shape.gpus, role.tasks
        view, claims = self._view, []
        for slot, free in enumerate(self._free):
            tasks = min(remaining, free.bit_count() // each)
            if tasks:
                topology = view.topologies[slot]
                mask = topology.best(free, tasks * each)
                assert mask is not None, f"{view.nodes[slot]} has fewer devices free than are counted"
                claims.append(Claim(view.nodes[slot], mask, (0,) * len(topology.sockets), 0, tasks=(tasks,)))
                remaining -= tasks
                if not remaining:
                    break
        if remaining:
            # What is free is scattered over nodes that have too little each.
            return None
        self._exchange(claims)
        self.count -= shape.gpus
        return tuple(claims)

    def give(self, claims: tuple[Claim, ...]) -> None:
        """The inverse of `take`."""
        self._exchange(claims)
        self.count += sum([claim.device_mask.bit_count() for claim in claims])

    def _exchange(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            self._free[self._view.slots[claim.node]] ^= claim.device_mask


def is_counted(shape: GangShape) -> bool:
    """Return whether all that matters for a place of such a gang is how many devices are free."""
    if len(shape.roles) > 1 or shape.device_type or shape.nodes or shape.device_memory_bytes:
        return False
    task, locality = shape.roles[0].shape, shape.locality
    return task.gpus > 0 and not (task.millicores or task.memory_bytes) and locality.widest is _ANYWHERE


# To look up a member of an enumeration takes Python 3.11 as long as a call.
_ANYWHERE: Final = LocalityLevel.CLUSTER
