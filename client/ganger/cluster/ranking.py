"""Nodes that could hold one whole gang, best first: by class of Algorithm 1, then closeness, then load.

A smaller key is better, and ties go in the order in which nodes came. `single_keys` and `best_first` scan all nodes;
the ranking keeps the same order, one node at a time, while nodes change.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ganger.cluster.claims import make_claim
from ganger.cluster.fit import Demand, demand
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.cluster.scan import Scan
from ganger.cluster.topology import Topology
from ganger.cluster.view import LoadMode, View

SLOT_BITS: Final = 20
# Loads are compared up to these.
_MOST_JOBS: Final = 255
_MOST_CORES: Final = 4095


def single_keys(scan: Scan, slots: NDArray[np.intp], mode: LoadMode, affinity: bool) -> NDArray[np.int64]:
    """Of nodes that are to hold the whole gang."""
    columns, gpus = scan.columns, scan.shape.gpus
    jobs = np.minimum(columns.jobs[slots], _MOST_JOBS)
    if not gpus:
        # Cores beside devices are left to gangs that use the devices.
        devices = scan.device_counts[slots]
        cores = np.minimum(columns.millicores[slots] // 1000, _MOST_CORES)
        load = (jobs << 12) + _MOST_CORES - cores if mode is LoadMode.SPREAD else cores
        return (devices << 24) + load
    left = scan.free_devices[slots] - gpus
    load = (63 - left << 8) + jobs if mode is LoadMode.SPREAD else (left << 8) + jobs
    levels = scan.closest(gpus)[slots].astype(np.int64)
    return ((classes(scan, slots, affinity) * 16 + levels) << 16) + load


def single_key(
    gpus: int, devices: int, free_devices: int, millicores: int, jobs: int, has: int, level: int, mode: LoadMode
) -> int:
    """The same of one node: its devices, those that it could give, its free cores, its jobs, its affinity (that of the
    gang where all servers are alike), and the level of the best `gpus` of its free devices."""
    jobs = min(jobs, _MOST_JOBS)
    if not gpus:
        cores = min(millicores // 1000, _MOST_CORES)
        return (devices << 24) + ((jobs << 12) + _MOST_CORES - cores if mode is LoadMode.SPREAD else cores)
    left = free_devices - gpus
    load = (63 - left << 8) + jobs if mode is LoadMode.SPREAD else (left << 8) + jobs
    return (((0 if has == gpus else 1 if has == 0 else 2) * 16 + level) << 16) + load


def classes(scan: Scan, slots: NDArray[np.intp], affinity: bool) -> NDArray[np.int64]:
    """Lines of Algorithm 1: 0 the same affinity, 1 no jobs yet, 2 any."""
    if not affinity:
        return np.zeros(slots.size, np.int64)
    has = scan.columns.affinity[slots]
    return np.where(has == scan.shape.gpus, 0, np.where(has == 0, 1, 2)).astype(np.int64)


def best_first(slots: NDArray[np.intp], keys: NDArray[np.int64], limit: int) -> list[int]:
    """The slots with the smallest keys."""
    whole = (keys << SLOT_BITS) | slots
    if whole.size > limit:
        whole = np.partition(whole, limit - 1)[:limit]
    return [int(key) & ((1 << SLOT_BITS) - 1) for key in np.sort(whole)]


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
