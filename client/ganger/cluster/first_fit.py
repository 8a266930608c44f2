"""First fit: the first node, in the order in which nodes came, that has room for the gang.

Spread over nodes, the first of those that make it the fewest, in the first rack or fabric with room if its tolerance
asks for one.
"""

from __future__ import annotations

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.feasibility import Ask
from ganger.cluster.fragmentation import GangMix
from ganger.cluster.node_classes import Alike
from ganger.cluster.resources import LocalityLevel
from ganger.cluster.search import Claims, PlacementPreference, SpreadSearch, on_first_node, over_nodes


def alike_good(alike: Alike, ask: Ask) -> int:
    return 0


def _first_fit(room: CapacityIndex, ask: Ask, widest: LocalityLevel, demand: GangMix | None) -> Claims | None:
    return on_first_node(room, ask, widest) or over_nodes(room, ask, widest, _SPREAD)


_SPREAD = SpreadSearch(alike_good, closest_first=False, most_spans=None)
FIRST_FIT = PlacementPreference("first-fit", "the first node with room, in the order in which nodes came", _first_fit)
