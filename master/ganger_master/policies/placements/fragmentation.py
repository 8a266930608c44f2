"""Least growth of fragmentation (FGD: Weng et al., "Beware of Fragmentation", USENIX ATC 2023, section 4).

A gang goes where the expected number of GPUs that the next gang could not use grows least, over the kinds of gangs that
are asked for. Told of none it takes its own kind for all. Ties go where the least is left over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.feasibility import FeasibilityQuery
from ganger.cluster.fit import demand as needs
from ganger.cluster.fragmentation import GangMix, fragmented_gpus
from ganger.cluster.node_classes import Alike, Family
from ganger.cluster.preferences import BEST_FIT, cut, least
from ganger.cluster.resources import LocalityLevel
from ganger.cluster.search import (
    Claims,
    PlacementPreference,
    Single,
    SpreadSearch,
    able,
    either,
    hosts,
    on_one_node,
    over_nodes,
)
from ganger.cluster.topology import Topology

# Hardware, free devices, free cores and memory of a node.
_State: TypeAlias = tuple[Topology, int, int, int]
# Demands remembered at once: a cluster's own, or each gang's where none was told.
_MOST_DEMANDS: Final = 1 << 10


class FragmentationGrowth:
    """Of the fragments of one node when the whole gang, or as many of its tasks as fit, come to it."""

    def __init__(self, demand: GangMix) -> None:
        self._demand = demand
        self._fragments: dict[_State, float] = {}
        # One object each, as answers are remembered by it.
        self.single = Single(_anything, self._whole)
        self.spread = SpreadSearch(self._part)

    def foresee(self, some: Sequence[Alike], query: FeasibilityQuery) -> None:
        """Counts for all of them at once what their keys will query for."""
        known: dict[Alike, tuple[float, ...]] = query.memo(self, lambda alike: self._grown(alike, query))
        states = [
            state for alike in some if alike not in known for state in self._states(alike, query, query.everything)
        ]
        missing = [state for state in dict.fromkeys(states) if state not in self._fragments]
        if missing:
            self._fragments.update(zip(missing, self._count(missing), strict=True))

    def _whole(self, alike: Alike, query: FeasibilityQuery, bound: tuple[()]) -> tuple[float, ...]:
        known: dict[Alike, tuple[float, ...]] = query.memo(self, lambda alike: self._grown(alike, query))
        return known[alike]

    def _grown(self, alike: Alike, query: FeasibilityQuery) -> tuple[float, ...]:
        return (self._of(alike, query, query.everything), *cut(alike.family, query), alike.millicores, alike.memory)

    def _part(self, alike: Alike, query: FeasibilityQuery) -> tuple[float, tuple[int, ...]]:
        role = query.by_weight[0]
        most = min(query.rooms[role].of[alike], query.everything[role])
        tasks = tuple(most if index == role else 0 for index in range(len(query.everything)))
        return (self._of(alike, query, tasks), least(alike, query))

    def _of(self, alike: Alike, query: FeasibilityQuery, tasks: tuple[int, ...]) -> float:
        before, after = self._states(alike, query, tasks)
        for state in (before, after):
            if state not in self._fragments:
                self._fragments[state] = self._count([state])[0]
        # Less than a millionth of a GPU is a rounding error.
        return round(self._fragments[after] - self._fragments[before], 6)

    def _states(self, alike: Alike, query: FeasibilityQuery, tasks: tuple[int, ...]) -> tuple[_State, _State]:
        family = alike.family
        topology = family.topology
        taken = (
            query.whole(topology)
            if tasks is query.everything
            else needs(topology.configuration_set, query.shape, tasks)
        )
        millicores, memory = alike.millicores - taken.millicores, alike.memory - taken.memory_bytes
        before = (topology, family.free, alike.millicores, alike.memory)
        return before, (topology, family.free - taken.gpus, millicores, memory)

    def _count(self, states: Sequence[_State]) -> list[float]:
        """Expected free GPUs of nodes in these states that the next gang could not use."""
        types = self._demand.device_types
        # Without gangs of a device type all its devices are of no use.
        known = [state for state in states if state[0].configuration_set.device_type in types]
        of = [state[0].configuration_set for state in known]
        columns = (
            [state[1] for state in known],
            [state[2] for state in known],
            [state[3] for state in known],
            [item.devices for item in of],
            [types.index(item.device_type) for item in of],
        )
        counted = iter(fragmented_gpus(self._demand, *(np.array(column, np.int64) for column in columns)).tolist())
        return [
            next(counted) if state[0].configuration_set.device_type in types else float(state[1]) for state in states
        ]


def search(
    room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel, demand: GangMix | None
) -> Iterator[Claims]:
    if not query.gpus:
        # Without devices it leaves no fragments.
        return BEST_FIT.search(room, query, widest, None)
    growth = _growth(demand if demand is not None else query.own_kind)
    growth.foresee([alike for family in hosts(room, query, widest) for alike in able(family, query)], query)
    return either(on_one_node(room, query, widest, growth.single), over_nodes(room, query, widest, growth.spread))


def _anything(family: Family, query: FeasibilityQuery) -> tuple[()]:
    """Where a family's growth begins is not known before its members are counted."""
    return ()


_growth = lru_cache(_MOST_DEMANDS)(FragmentationGrowth)
FGD = PlacementPreference("fgd", "where the fewest GPUs become useless to the gangs that are asked for", search)
