"""The nodes that could hold one whole gang, the best first, kept in order while nodes change.

What a scan of all nodes finds with `single_keys` and `best_first`, one node at a time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Final

from msgspec.structs import replace

from ganger.cluster.claims import make_claim
from ganger.cluster.fit import Demand, demand
from ganger.cluster.preferences import SLOT_BITS, single_key, single_keys
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.cluster.scan import Scan
from ganger.cluster.topology import Topology
from ganger.cluster.view import LoadMode, View

_NOT_ONE: Final = -1
_MOST_REMEMBERED: Final = 512


class Ranking:
    """For one view, shape, mode and widest level; `affinity` as in `candidates`."""

    def __init__(self, view: View, shape: GangShape, mode: LoadMode, widest: LocalityLevel, affinity: bool) -> None:
        self._view = view
        self._shape = shape
        self._mode = mode
        self._widest = min(widest, LocalityLevel.NODE)
        self._affinity = affinity
        self._gpus = shape.gpus
        self._tasks = tuple([role.tasks for role in shape.roles])
        self._needs: dict[Topology, Demand] = {}
        # By state of a node: its key, and the claim on it. Many nodes are alike.
        self._remembered: dict[tuple[object, ...], int] = {}
        self._claims: dict[tuple[object, ...], Claim | None] = {}
        scan = Scan.of(view, shape)
        slots = scan.hosts(widest).nonzero()[0]
        placed = (single_keys(scan, slots, mode, affinity) << SLOT_BITS) | slots
        # Key and slot of those that could hold it, in order.
        self._order: list[int] = sorted(placed.tolist())
        # By slot: the same.
        self._places = [_NOT_ONE] * len(view.nodes)
        for slot, place in zip(slots.tolist(), placed.tolist(), strict=True):
            self._places[slot] = place

    def follow(self, slots: Collection[int]) -> None:
        """See `kept`."""
        order, places = self._order, self._places
        places.extend([_NOT_ONE] * (len(self._view.nodes) - len(places)))
        for slot in slots:
            key = self._key(slot)
            place = key << SLOT_BITS | slot if key >= 0 else _NOT_ONE
            before = places[slot]
            if place != before:
                if before >= 0:
                    del order[bisect_left(order, before)]
                if place >= 0:
                    insort(order, place)
                places[slot] = place

    def best(self, limit: int, avoid: Collection[int] = ()) -> list[Claim]:
        """The whole gang on each of the best `limit` nodes, the best first, but for those to avoid."""
        mask = (1 << SLOT_BITS) - 1
        places: Iterable[int] = self._order
        if avoid:
            places = (place for place in self._order if place & mask not in avoid)
        claims = [self._claim(place & mask) for place in islice(places, limit)]
        return [claim for claim in claims if claim is not None]

    def _key(self, slot: int) -> int:
        view = self._view
        if not view.available[slot]:
            return _NOT_ONE
        state = self._state(slot)
        key = self._remembered.get(state)
        if key is None:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            key = self._remembered[state] = self._judge(slot)
        return key

    def _claim(self, slot: int) -> Claim | None:
        state = self._state(slot)
        name = self._view.nodes[slot]
        if state in self._claims:
            claim = self._claims[state]
            return claim if claim is None or claim.node == name else replace(claim, node=name)
        if len(self._claims) >= _MOST_REMEMBERED:
            self._claims.clear()
        claim = make_claim(self._view, slot, self._shape, self._tasks, self._mode, self._widest)
        self._claims[state] = claim
        return claim

    def _state(self, slot: int) -> tuple[object, ...]:
        """All that a node's key and its claim depend on, but for its name."""
        view = self._view
        return (
            view.topologies[slot],
            view.free[slot],
            view.millicores[slot],
            view.memory[slot],
            view.socket_jobs[slot],
            view.group_jobs[slot],
            view.affinity[slot],
            view.parked.get(slot),
        )

    def _judge(self, slot: int) -> int:
        view, shape, gpus = self._view, self._shape, self._gpus
        topology = view.topologies[slot]
        kind = topology.configuration_set
        if gpus and shape.device_type and kind.device_type != shape.device_type:
            return _NOT_ONE
        needed = self._needs.get(topology)
        if needed is None:
            needed = self._needs[topology] = demand(kind, shape, self._tasks)
        millicores = sum(view.millicores[slot])
        if millicores < needed.millicores or view.memory[slot] < needed.memory_bytes:
            return _NOT_ONE
        free = view.free[slot] & view.roomy(slot, shape.device_memory_bytes)
        level = topology.closest(free, gpus)
        if level > self._widest:
            return _NOT_ONE
        jobs = sum(view.socket_jobs[slot])
        has = view.affinity[slot] if self._affinity else gpus
        return single_key(gpus, kind.devices, free.bit_count(), millicores, jobs, has, level, self._mode)
