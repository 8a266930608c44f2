"""Tetris's packing (Grandl et al., SIGCOMM 2014, section 3.2): the node whose free pieces lie best along the demand.

Devices, cores and memory count in shares of the node. Here the gang is given, as an order chose it, and looks for its
node; the paper's own pass, in which a node looks for its job, is `tetris_pass`. `tetris` takes the dot product,
`tetris-cos` the cosine (Yu's report, Virginia, 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ganger.cluster.feasibility import Ask
from ganger.cluster.fragmentation import GangMix
from ganger.cluster.node_classes import Alike, Family
from ganger.cluster.place_placement import Claims, PlacementPreference
from ganger.cluster.resources import LocalityLevel
from ganger.cluster.room import CapacityIndex
from ganger.cluster.search import Single, SpreadSearch, on_one_node, over_nodes


def by_dot(alike: Alike, ask: Ask) -> float:
    return -_dot(available(alike), demanded(alike.family, ask))


def at_best_by_dot(family: Family, ask: Ask) -> float:
    """With all cores and all memory of the node free."""
    return -_dot((family.free / (family.topology.devices or 1), 1.0, 1.0), demanded(family, ask))


def by_cosine(alike: Alike, ask: Ask) -> float:
    free, wanted = available(alike), demanded(alike.family, ask)
    lengths = math.hypot(*free) * math.hypot(*wanted)
    return -_dot(free, wanted) / lengths if lengths else 0.0


def at_best_by_cosine(family: Family, ask: Ask) -> float:
    """No angle is smaller than none."""
    return -math.inf


def available(alike: Alike) -> tuple[float, float, float]:
    """Shares of the node's devices, cores and memory that are free."""
    return _shares(alike.family, alike.family.free, alike.millicores, alike.memory)


def demanded(family: Family, ask: Ask) -> tuple[float, float, float]:
    """Shares of such a node for the whole gang if it could be there, else for one task of its heaviest role."""
    needed = ask.whole(family.topology)
    if needed.gpus > family.topology.devices:
        needed = ask.rooms[ask.by_weight[0]].needs(family.topology)
    return _shares(family, needed.gpus, needed.millicores, needed.memory_bytes)


def _shares(family: Family, gpus: int, millicores: int, memory: int) -> tuple[float, float, float]:
    of = family.topology.configuration_set
    cores = sum(socket.millicores for socket in of.sockets)
    # What a node has nothing of, nobody there asks for.
    return (gpus / (of.devices or 1), millicores / (cores or 1), memory / (of.memory_bytes or 1))


def _dot(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def _placement(
    name: str, summary: str, at_best: Callable[[Family, Ask], float], score: Callable[[Alike, Ask], float]
) -> PlacementPreference:
    def key(alike: Alike, ask: Ask, bound: float) -> float:
        scores: dict[Alike, float] = ask.memo(score, lambda alike: score(alike, ask))
        return scores[alike]

    single, spread = Single(at_best, key), SpreadSearch(score)

    def search(room: CapacityIndex, ask: Ask, widest: LocalityLevel, demand: GangMix | None) -> Claims | None:
        return on_one_node(room, ask, widest, single) or over_nodes(room, ask, widest, spread)

    return PlacementPreference(name, summary, search)


TETRIS = _placement(
    "tetris",
    "where free devices, cores and memory lie best along the demand (dot product)",
    at_best_by_dot,
    by_dot,
)
TETRIS_COS = _placement("tetris-cos", "the same by the angle between them alone (cosine)", at_best_by_cosine, by_cosine)
