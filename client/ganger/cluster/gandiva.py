"""Gandiva's Algorithm 1 (Xiao et al., OSDI 2018): servers whose jobs are of this size, then idle ones, then any.

The same answers as `ganger.cluster.placement`, which job schedulers use, through the room's index: see there for the
two corrections of the paper. The room's view says whether gangs are spread apart or packed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

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
    any_node,
    at_once,
    on_one_node,
    over_nodes,
)
from ganger.cluster.view import LoadMode

_MOST_JOBS = 255
_MOST_CORES = 4095


def line_then_most(family: Family, ask: Ask) -> tuple[int, ...]:
    """Line of the algorithm and level, then the most left; cores beside devices are left to gangs that use those."""
    if not ask.gpus:
        return (family.topology.devices,)
    return (line(family, ask), ask.level[family], -ask.takable(family).bit_count())


def apart(alike: Alike, ask: Ask, bound: tuple[int, ...]) -> tuple[int, ...]:
    """Then the fewest jobs."""
    jobs = min(alike.jobs, _MOST_JOBS)
    return (*bound, jobs) if ask.gpus else (*bound, jobs, -_cores(alike))


def line_then_least(family: Family, ask: Ask) -> tuple[int, ...]:
    """Line of the algorithm and level, then the least left."""
    if not ask.gpus:
        return (family.topology.devices,)
    return (line(family, ask), ask.level[family], ask.takable(family).bit_count())


def packed(alike: Alike, ask: Ask, bound: tuple[int, ...]) -> tuple[int, ...]:
    """Then the fewest jobs, or cores."""
    return (*bound, min(alike.jobs, _MOST_JOBS) if ask.gpus else _cores(alike))


def line(family: Family, ask: Ask) -> int:
    """Of the algorithm: 0 the same affinity, 1 no jobs yet, 2 any."""
    return 0 if family.affinity == ask.gpus else 2 if family.affinity else 1


def by_line(room: CapacityIndex, ask: Ask) -> Iterable[Iterable[Family]]:
    if not ask.gpus:
        return at_once(room, ask)
    others = [affinity for affinity in room.affinities if affinity not in (0, ask.gpus)]
    return (
        room.families_of(ask.gpus),
        room.families_of(0),
        chain.from_iterable(room.families_of(affinity) for affinity in others),
    )


def few_jobs(alike: Alike, ask: Ask) -> int:
    return alike.jobs


def keeps_holes(alike: Alike, ask: Ask) -> bool:
    """Of this affinity, or idle: servers whose holes no other size of gang waits for."""
    return line(alike.family, ask) < 2


def _gandiva(room: CapacityIndex, ask: Ask, widest: LocalityLevel, demand: GangMix | None) -> Claims | None:
    mode = room.view.mode
    return on_one_node(room, ask, widest, _SINGLE[mode]) or over_nodes(room, ask, widest, _SPREAD[mode])


def _cores(alike: Alike) -> int:
    return min(alike.millicores // 1000, _MOST_CORES)


_SINGLE = {
    LoadMode.SPREAD: Single(line_then_most, apart, LoadMode.SPREAD, by_line),
    LoadMode.PACK: Single(line_then_least, packed, LoadMode.PACK, by_line),
}
_SPREAD = {mode: SpreadSearch(few_jobs, mode, tries=(keeps_holes, any_node)) for mode in LoadMode}
GANDIVA = PlacementPreference(
    "gandiva", "nodes with jobs of the gang's size, then idle ones, then any (Algorithm 1)", _gandiva
)
