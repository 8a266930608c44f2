"""One claim: which devices and whose cores so many tasks would take on one node; claims of parked gangs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from msgspec.structs import replace

from ganger.cluster.fit import demand, fit
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
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
    type_matters = needed.gpus and shape.device_type
    if type_matters and topology.configuration_set.device_type != shape.device_type:
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
    )


def split_cores(
    topology: Topology, free: Sequence[int], mask: int, millicores: int, socket_jobs: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Cores by socket for these devices: from their own sockets first, in proportion, then from the others.

    Without devices, from the socket with the fewest jobs and then the most free cores. None if there are too few.
    """
    return _split(topology, tuple(free), mask, millicores, tuple(socket_jobs))


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


def is_still_free(view: View, shape: GangShape, parked: Sequence[Claim]) -> bool:
    """Return whether a parked gang could resume where it is: its arenas and the memory that it keeps are its own."""
    kept = [
        replace(
            claim,
            device_mask=0,
            millicores=(0,) * len(claim.millicores),
            tasks=(),
            memory_bytes=claim.parked_memory_bytes or claim.memory_bytes,
        )
        for claim in parked
        if claim.node in view
    ]
    return not fit(view, shape, as_requested(parked), holding=kept)


def as_requested(parked: Sequence[Claim]) -> tuple[Claim, ...]:
    """Claims of a parked gang, as a request has them."""
    return tuple(
        [
            replace(claim, parked_bytes=(), parked_memory_bytes=0)
            if claim.parked_bytes or claim.parked_memory_bytes
            else claim
            for claim in parked
        ]
    )


# Many nodes are filled alike.
@lru_cache(16_384)
def _split(
    topology: Topology, free: tuple[int, ...], mask: int, millicores: int, socket_jobs: tuple[int, ...]
) -> tuple[int, ...] | None:
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
