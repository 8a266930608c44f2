"""The nodes with what follows from them, and the free pieces of a node, computed from what its gangs hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from ganger.cluster.resources import Claim, ConfigurationSet, NodeRow
from ganger.cluster.topology import Topology, bits
from msgspec.structs import replace

from ganger_master.core.node_model import Node

# Devices of a claim, and its cores by socket.
_Pieces: TypeAlias = tuple[int, tuple[int, ...]]
_Counts: TypeAlias = tuple[int, ...]


class NodeIndex(dict[str, Node]):
    """The nodes by name, and indexes of them.

    devices, free_devices: of the nodes that take gangs. nodes_with: how many of these have so many devices free, of
    those that have any. choosy: may be closed to some jobs. unheard: not lost, and have not reported their gangs yet.
    strays_of: by job uid the nodes with a gang that is quarantined or being ended by an operator. last_answer: when a
    daemon was last answered, Unix seconds. next_silence_check: no node can turn silent or be lost before; None while
    none can. drained_in_vain: by epoch, gangs without a place off a draining node: `freed` of the view that was
    searched, and when.
    """

    def __init__(self) -> None:
        super().__init__()
        self.configuration_sets: dict[str, ConfigurationSet] = {}
        self.devices = 0
        self.free_devices = 0
        self.nodes_with: dict[int, int] = {}
        self.draining: dict[str, None] = {}
        self.choosy: dict[str, None] = {}
        self.unheard: dict[str, None] = {}
        self.strays_of: dict[str, dict[str, None]] = {}
        self.last_answer: dict[str, float] = {}
        self.next_silence_check: float | None = None
        self.drained_in_vain: dict[int, tuple[int, float]] = {}

    @property
    def largest_free(self) -> int:
        """Devices that are free on one node that takes gangs, at most."""
        return max(self.nodes_with, default=0)

    def put(self, old: Node | None, node: Node) -> None:
        """Replace a node; `old`: as it was, None for a new one."""
        name = node.name
        self[name] = node
        _list(self.draining, name, node.draining)
        _list(self.unheard, name, not node.heard and not node.lost)
        _list(self.choosy, name, node.is_choosy)
        if old is None or old.strays is not node.strays:
            self.index_strays(old, node)

    def forget(self, name: str) -> None:
        node = self.pop(name)
        self.index_strays(node, replace(node, strays=()))
        for known in (self.draining, self.choosy, self.last_answer):
            known.pop(name, None)

    def index_strays(self, old: Node | None, node: Node) -> None:
        uids = {stray.uid for stray in node.strays if stray.holds_back}
        for stray in old.strays if old is not None else ():
            nodes = self.strays_of.get(stray.uid)
            if nodes is not None and stray.uid not in uids:
                nodes.pop(node.name, None)
                if not nodes:
                    del self.strays_of[stray.uid]
        for uid in uids:
            self.strays_of.setdefault(uid, {})[node.name] = None

    def count_free(self, before: int, now: int) -> None:
        """Count a node that takes gangs: so many devices free; zero before it does, and once it does not."""
        if before == now:
            return
        self.free_devices += now - before
        counts = self.nodes_with
        if now:
            counts[now] = counts.get(now, 0) + 1
        if before:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]

    def note_answer(self, name: str, now: float, limits_s: tuple[float | None, ...]) -> None:
        """Record that a node's daemon was answered. limits_s: silences after which something happens."""
        self.last_answer[name] = now
        for after in limits_s:
            if after is not None and (self.next_silence_check is None or now + after < self.next_silence_check):
                self.next_silence_check = now + after

    def check_silence_at(self, time: float | None) -> None:
        """Set when the silence of nodes is reviewed next, Unix seconds; None: when a node was answered again."""
        self.next_silence_check = time

    def note_drained_in_vain(self, epoch: int, freed: int, now: float) -> None:
        self.drained_in_vain[epoch] = (freed, now)


def _list(listed: dict[str, None], name: str, belongs: bool) -> None:
    if belongs:
        listed[name] = None
    else:
        listed.pop(name, None)


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
