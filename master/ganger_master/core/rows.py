"""From what gangs hold to one row of the view. A row is always computed afresh: what is freed is what was held."""

from __future__ import annotations

from collections.abc import Sequence

from ganger.resources.topology import innermost_groups
from ganger.resources.values import Claim, ConfigurationSet, NodeRow

from ganger_master.core.model import Node


def row_of(node: Node, configuration_set: ConfigurationSet, held: Sequence[Claim], affinity: int = 0) -> NodeRow:
    """What is free on a node whose gangs hold these claims. Strays hold their devices, faulty devices are not free."""
    used_mask = 0
    for claim in held:
        used_mask |= claim.device_mask
    for stray in node.strays:
        used_mask |= stray.device_mask
    for device in node.device_faults:
        used_mask |= 1 << device
    sockets = configuration_set.sockets
    free_cores = [socket.millicores for socket in sockets]
    for claim in held:
        for index, millicores in enumerate(claim.millicores):
            free_cores[index] -= millicores
    used_memory = sum(claim.memory_bytes + claim.arena_bytes for claim in held)
    all_mask = (1 << configuration_set.devices) - 1
    return NodeRow(
        node=node.name,
        configuration_set=node.configuration_set,
        free_mask=all_mask & ~used_mask,
        free_millicores=tuple(max(0, cores) for cores in free_cores),
        free_memory_bytes=max(0, configuration_set.memory_bytes - used_memory),
        available=node.takes_gangs,
        rack=node.rack,
        fabric=node.fabric,
        socket_jobs=tuple(_jobs_at_socket(configuration_set, index, held) for index in range(len(sockets))),
        group_jobs=tuple(
            sum(1 for claim in held if claim.device_mask & mask) for mask in innermost_groups(configuration_set)
        ),
        device_rows=tuple(
            sum(1 for claim in held if claim.device_mask >> device & 1) for device in range(configuration_set.devices)
        ),
        affinity=affinity,
    )


def _jobs_at_socket(configuration_set: ConfigurationSet, index: int, held: Sequence[Claim]) -> int:
    devices = configuration_set.sockets[index].device_mask
    return sum(
        1
        for claim in held
        if claim.device_mask & devices or (index < len(claim.millicores) and claim.millicores[index])
    )
