"""The claims of a gang: the devices and cores that a number of tasks would take on one node, and the claims of a gang
over several nodes: evenly over a fixed number, over the fewest, or node by node.

The caller gives the order of the nodes, as slots of the view. A gang that requests only devices is placed by counts of
free devices, without a capacity index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from ganger.cluster.fit import demand, fit
from ganger.cluster.resources import Claim, GangShape, LocalityLevel, exceeds
from ganger.cluster.topology import Topology
from ganger.cluster.view import LoadMode, View

_CORE = 1000


def make_claim(
    view: View,
    slot: int,
    shape: GangShape,
    tasks: Sequence[int],
    mode: LoadMode,
    widest: LocalityLevel = LocalityLevel.NODE,
) -> Claim | None:
    """A claim for `tasks[r]` tasks of role r within `widest`, or None if the node cannot take them.

    The arena is claimed when it fits beside the rest, else left out: the job can then be paused or checkpointed only.
    """
    topology = view.topologies[slot]
    needed = demand(topology.configuration_set, shape, tasks)
    if not (topology.accepts(shape.device_type, shape.partition) if needed.gpus else topology.is_in(shape.partition)):
        return None
    free = view.free[slot]
    if shape.device_memory_bytes:
        free &= view.roomy(slot, shape.device_memory_bytes)
    mask = topology.best(
        free,
        needed.gpus,
        min(widest, LocalityLevel.NODE),
        mode is LoadMode.SPREAD,
        view.socket_jobs[slot],
        view.group_jobs[slot],
    )
    if mask is None or view.memory[slot] < needed.memory_bytes:
        return None
    if needed.bandwidth and exceeds(needed.bandwidth, view.bandwidth.get(slot, ())):
        return None
    jobs = view.socket_jobs[slot] if mode is LoadMode.SPREAD else ()
    millicores = split_cores(topology, view.millicores[slot], mask, needed.millicores, jobs)
    if millicores is None:
        return None
    arena_fits = view.memory[slot] >= needed.memory_bytes + needed.arena_bytes
    return Claim(
        node=view.nodes[slot],
        device_mask=mask,
        millicores=millicores,
        memory_bytes=needed.memory_bytes,
        arena_bytes=needed.arena_bytes if arena_fits else 0,
        tasks=tuple(tasks),
        bandwidth=needed.bandwidth,
    )


@lru_cache(16_384)
def split_cores(
    topology: Topology, free: tuple[int, ...], mask: int, millicores: int, socket_jobs: tuple[int, ...] = ()
) -> tuple[int, ...] | None:
    """Cores by socket for these devices: from their own sockets first, in proportion, then from the others.

    Without devices, from the socket with the fewest jobs and then the most free cores. None if there are too few.
    Cached: many nodes are filled alike.
    """
    if sum(free) < millicores:
        return None
    sockets = range(len(topology.sockets))
    taken = [0] * len(topology.sockets)
    devices = [(topology.sockets[socket] & mask).bit_count() for socket in sockets]
    placed = sum(devices)
    if placed:
        for socket in sockets:
            # Whole cores, so that a proportional split does not cut a core in two.
            share = millicores * devices[socket] // placed
            taken[socket] = min(free[socket], share // _CORE * _CORE if share >= _CORE else share)
    jobs = socket_jobs or (0,) * len(topology.sockets)
    order = sorted(sockets, key=lambda socket: (devices[socket] == 0, jobs[socket], -free[socket], socket))
    missing = millicores - sum(taken)
    for socket in order:
        more = min(missing, free[socket] - taken[socket])
        taken[socket] += more
        missing -= more
    return tuple(taken)


def resplit_cores(held: Sequence[int], free: Sequence[int], millicores: int) -> tuple[int, ...]:
    """Split `millicores` over the sockets: first as the gang holds them, then free ones, lowest socket first.

    A remainder that no socket has is requested of the first socket, so that the refusal reports the true figures.
    """
    room = [have + own for have, own in zip(free, held, strict=True)]
    given = [min(own, room_here) for own, room_here in zip(held, room, strict=True)]
    excess = sum(given) - millicores
    for index in reversed(range(len(given))):
        taken = min(given[index], max(0, excess))
        given[index] -= taken
        excess -= taken
    missing = millicores - sum(given)
    for index, room_here in sorted(enumerate(room), key=lambda item: (given[item[0]] == 0, item[0])):
        more = min(room_here - given[index], max(0, missing))
        given[index] += more
        missing -= more
    if missing > 0:
        given[0] += missing
    return tuple(given)


def resumed_in_place(view: View, shape: GangShape, parked: Sequence[Claim]) -> tuple[Claim, ...] | None:
    """Return the claims with which a parked gang could resume where it is; None if something there is taken.

    Its arenas and the memory that it keeps are its own. A gang that was given other cores or memory while it ran
    requests the shape's again, on the same devices: what is requested must be the shape's, and its state is there.
    """
    claims: list[Claim] = []
    kept: list[Claim] = []
    for claim in parked:
        if (slot := view.slots.get(claim.node)) is None:
            return None
        topology = view.topologies[slot]
        needed = demand(topology.configuration_set, shape, claim.tasks)
        cores: Sequence[int] | None = claim.millicores
        if sum(claim.millicores) != needed.millicores:
            cores = split_cores(topology, view.millicores[slot], claim.device_mask, needed.millicores)
        if cores is None:
            return None
        requested = replace(claim, parked_bytes=(), parked_memory_bytes=0, memory_bytes=needed.memory_bytes)
        claims.append(replace(requested, millicores=tuple(cores)))
        memory = claim.parked_memory_bytes or claim.memory_bytes
        kept.append(replace(claim, device_mask=0, millicores=(0,) * len(cores), tasks=(), memory_bytes=memory))
    return None if fit(view, shape, claims, holding=kept) else tuple(claims)


# -- gangs over several nodes ---------------------------------------------------------------------------------------

# Room of a node for tasks that need nothing of it: more tasks than any gang has.
PLENTY = 1 << 20


def evenly(view: View, shape: GangShape, order: Iterable[int], mode: LoadMode) -> tuple[Claim, ...] | None:
    """Return claims with equally many tasks, up to one, on each of the first `shape.nodes` nodes with room for them.

    `order`: slots. None if too few nodes have room."""
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
    """Return claims of a gang with one role on the nodes with the most room, its last tasks on the node that they fill
    best; None if it does not fit.

    `runs`: room in tasks, and the slots of the nodes with it, most room first. They are read once, as far as needed.
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
        # All that a claim on a node depends on.
        now = (
            count,
            *[column[slot] for column in (view.topologies, view.free, view.millicores, view.memory)],
            *(view.socket_jobs[slot], view.group_jobs[slot], view.parked.get(slot), view.bandwidth.get(slot)),
        )
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
    """Return claims of a gang with several roles, node by node with as many tasks of each as fit, the roles with the
    most devices first; None if it does not fit. `order`: slots."""
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


def _most_tasks(
    view: View, slot: int, shape: GangShape, tasks: Sequence[int], role: int, most: int, mode: LoadMode
) -> tuple[int, Claim | None]:
    """Return how many tasks of a role, at most `most`, fit beside `tasks` on one node, and the claim of all these."""
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
    """The free devices of a view, taken by one gang after another. Each gets the place that a search `anywhere` would
    find after the earlier gangs. The view is not changed."""

    def __init__(self, view: View) -> None:
        self._view = view
        # By slot.
        self._free = [free if takes else 0 for free, takes in zip(view.free, view.available, strict=True)]
        self.count = sum([free.bit_count() for free in self._free])

    def take(self, shape: GangShape) -> tuple[Claim, ...] | None:
        """Take and return a place for a gang that requests only devices (`is_counted`); None if there is none."""
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
            # Each of the remaining nodes has too few free devices for one task.
            return None
        self._exchange(claims)
        self.count -= shape.gpus
        return tuple(claims)

    def give(self, claims: tuple[Claim, ...]) -> None:
        """Return the devices of a place that `take` returned."""
        self._exchange(claims)
        self.count += sum([claim.device_mask.bit_count() for claim in claims])

    def _exchange(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            self._free[self._view.slots[claim.node]] ^= claim.device_mask


def is_counted(shape: GangShape) -> bool:
    """Return whether a place for such a gang depends only on the number of free devices."""
    if len(shape.roles) > 1 or shape.device_type or shape.nodes or shape.device_memory_bytes:
        return False
    if shape.partition or shape.closed_nodes:
        return False
    task, locality = shape.roles[0].shape, shape.locality
    named = task.millicores or task.memory_bytes or task.bandwidth
    return task.gpus > 0 and not named and locality.widest is _ANYWHERE


# Python 3.11 takes as long for the lookup of an enumeration member as for a call.
_ANYWHERE: Final = LocalityLevel.CLUSTER
