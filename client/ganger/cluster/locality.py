"""Locality first: the closest level at which the gang finds room, and there where the least is left over.

Xiao, "All You Need to Know about Scheduling Deep Learning Jobs" (SOSP 2017, student research): how much a job loses by
distance is its own, so what it tolerates, and for how long it waits for better, is in its shape. A worse level is never
taken while a better one has room, so all racks and fabrics are tried.
"""

from __future__ import annotations

from ganger.cluster.best_fit import cut, least, left_over
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.feasibility import Ask
from ganger.cluster.fragmentation import GangMix
from ganger.cluster.node_classes import Family
from ganger.cluster.resources import LocalityLevel
from ganger.cluster.search import Claims, PlacementPreference, Single, SpreadSearch, on_one_node, over_nodes


def level_and_cut(family: Family, ask: Ask) -> tuple[int, int, int]:
    return (ask.level[family], *cut(family, ask))


def _locality(room: CapacityIndex, ask: Ask, widest: LocalityLevel, demand: GangMix | None) -> Claims | None:
    return on_one_node(room, ask, widest, _SINGLE) or over_nodes(room, ask, widest, _SPREAD)


_SINGLE = Single(level_and_cut, left_over)
_SPREAD = SpreadSearch(least, most_spans=None)
LOCALITY = PlacementPreference(
    "locality", "the closest devices that are free, within what the job tolerates", _locality
)
