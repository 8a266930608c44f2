"""Best fit: where the least is left over, so that what is whole stays whole.

Counted first in devices left on the node, then in those left in the switches and sockets that are cut, then in cores
and memory. A gang without devices goes where the fewest free ones could miss the cores.
"""

from __future__ import annotations

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.feasibility import Ask
from ganger.cluster.fragmentation import GangMix
from ganger.cluster.node_classes import Alike, Family
from ganger.cluster.resources import LocalityLevel
from ganger.cluster.search import (
    Claims,
    PlacementPreference,
    Single,
    SpreadSearch,
    by_free_devices,
    on_one_node,
    over_nodes,
)


def cut(family: Family, ask: Ask) -> tuple[int, int]:
    """Devices left over, and those of them beside the gang's in groups that it cuts."""
    topology = family.topology
    if not ask.gpus:
        return (family.free, topology.devices)
    free = ask.takable(family)
    mask = topology.best(free, ask.gpus)
    assert mask is not None
    beside = sum((free & ~mask & circle).bit_count() for circle in topology.circles if circle & mask)
    return (free.bit_count() - ask.gpus, beside)


def left_over(alike: Alike, ask: Ask, bound: tuple[int, ...]) -> tuple[int, ...]:
    """Then cores and memory."""
    return (*bound, alike.millicores, alike.memory)


def least(alike: Alike, ask: Ask) -> tuple[int, int, int]:
    """Of nodes with room for equally many tasks."""
    return (ask.takable(alike.family).bit_count(), alike.millicores, alike.memory)


def _best_fit(room: CapacityIndex, ask: Ask, widest: LocalityLevel, demand: GangMix | None) -> Claims | None:
    return on_one_node(room, ask, widest, _SINGLE) or over_nodes(room, ask, widest, _SPREAD)


_SINGLE = Single(cut, left_over, parts=by_free_devices)
_SPREAD = SpreadSearch(least)
BEST_FIT = PlacementPreference(
    "best-fit", "where the least is left over: whole nodes, sockets and switches stay whole", _best_fit
)
