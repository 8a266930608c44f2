"""The free pieces of a node, from what its gangs hold: always computed from scratch, so all that was held is freed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from ganger.cluster.resources import Claim, NodeRow
from ganger.cluster.topology import Topology, bits

from ganger_master.core.model import Node

# Devices of a claim, and its cores by socket.
_Pieces: TypeAlias = tuple[int, tuple[int, ...]]
_Counts: TypeAlias = tuple[int, ...]


def row_of(node: Node, topology: Topology, held: Sequence[Claim], affinity: int = 0) -> NodeRow:
    """Return what is free on a node whose gangs hold these claims, without faulty devices and those of strays."""
    configuration_set = topology.configuration_set
    used_mask = used_memory = 0
    kept_of_devices: tuple[int, ...] = ()
    free_cores = [socket.millicores for socket in configuration_set.sockets]
    pieces = []
    for claim in held:
        used_mask |= claim.device_mask
        used_memory += claim.memory_bytes + claim.arena_bytes
        pieces.append((claim.device_mask, claim.millicores))
        if claim.parked_bytes:
            before = kept_of_devices or (0,) * topology.devices
            kept_of_devices = tuple([kept + more for kept, more in zip(before, claim.parked_bytes, strict=True)])
        for index, millicores in enumerate(claim.millicores):
            free_cores[index] -= millicores
    for stray in node.strays:
        used_mask |= stray.device_mask
        if stray.told is not None and stray.device_mask:
            claim = stray.told.claim
            used_memory += claim.memory_bytes + claim.arena_bytes
            for index, millicores in enumerate(claim.millicores[: len(free_cores)]):
                free_cores[index] -= millicores
    for device in node.device_faults:
        used_mask |= 1 << device
    at_sockets, in_groups, on_devices = _neighbours(topology.sockets, topology.groups, topology.devices, tuple(pieces))
    return NodeRow(
        node=node.name,
        configuration_set=node.configuration_set,
        free_mask=topology.all_mask & ~used_mask,
        free_millicores=tuple([cores if cores > 0 else 0 for cores in free_cores]),
        free_memory_bytes=max(0, configuration_set.memory_bytes - used_memory),
        available=node.takes_gangs,
        rack=node.rack,
        fabric=node.fabric,
        socket_jobs=at_sockets,
        group_jobs=in_groups,
        device_rows=on_devices,
        affinity=affinity,
        parked_bytes=kept_of_devices,
    )


@lru_cache(16_384)
def _neighbours(
    sockets: tuple[int, ...], groups: tuple[int, ...], devices: int, held: tuple[_Pieces, ...]
) -> tuple[_Counts, _Counts, _Counts]:
    """Count the claims at each socket, in each group and on each device. Cached: many nodes are filled alike."""
    at_sockets, in_groups, on_devices = [0] * len(sockets), [0] * len(groups), [0] * devices
    for mask, cores in held:
        for i, at in enumerate(sockets):
            if mask & at or (i < len(cores) and cores[i]):
                at_sockets[i] += 1
        for i, group in enumerate(groups):
            if mask & group:
                in_groups[i] += 1
        for device in bits(mask & (1 << devices) - 1):
            on_devices[device] += 1
    return tuple(at_sockets), tuple(in_groups), tuple(on_devices)
