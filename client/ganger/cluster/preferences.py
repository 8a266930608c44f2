"""Placement preferences: which of the nodes with room a gang takes.

* `first-fit`: the first node, in order of arrival, that has room. A spread gang takes the first nodes among those that
  make it the fewest, in the first rack or fabric with room if its tolerance requires one.
* `best-fit`: the node where the least is left over: devices on the node, then in the switches and sockets that are cut,
  then cores and memory. A gang without devices goes where the fewest free devices could lack its cores.
* `adaptive`: in pack mode the best fit, which keeps room for large gangs. In spread mode, under light load, the node
  with the most free devices, and there the socket with the fewest jobs, so that jobs do not slow each other down (Xiao,
  SOSP 2017, as below).
* `locality`: the closest level at which the gang fits, and there the best fit (Xiao, "All You Need to Know about
  Scheduling Deep Learning Jobs", SOSP 2017, student research). All racks and fabrics are tried, so a worse level is
  never taken while a better one has room. What a job tolerates, and its patience, are in its shape.
* `anywhere`: any free devices, the first node first: the placement of ideal runs.
* `gandiva`: Algorithm 1 (Xiao et al., OSDI 2018): nodes whose jobs have as many devices as this one, then nodes without
  jobs, then any free devices, also scattered. With two corrections: its test `height < 1` cannot hold for a node that
  has an affinity, so it reads "has room for the gang"; and a gang larger than a node has a set of nodes as its unit.
  Within a class of nodes the closest devices win, then the load: least in spread mode, best fit in pack mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import FreeDevices, evenly, greedily, make_claim
from ganger.cluster.feasibility import Alike, Family, FeasibilityQuery
from ganger.cluster.resources import Claim, LocalityLevel
from ganger.cluster.search import (
    Claims,
    PlacementPreference,
    Search,
    Single,
    SpreadSearch,
    any_node,
    at_once,
    by_free_devices,
    either,
    fitting_spans,
    in_span,
    on_first_node,
    on_one_node,
    over_nodes,
    walk,
)
from ganger.cluster.view import LoadMode


def _one_or_several(single: Single, spread: SpreadSearch) -> Search:
    def search(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
        return either(on_one_node(room, query, widest, single), over_nodes(room, query, widest, spread))

    return search


def alike_good(alike: Alike, query: FeasibilityQuery) -> int:
    return 0


def _first_fit(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
    return either(on_first_node(room, query, widest), over_nodes(room, query, widest, _FIRST_FIT_SPREAD))


_FIRST_FIT_SPREAD = SpreadSearch(alike_good, closest_first=False, most_spans=None)
FIRST_FIT = PlacementPreference("first-fit", "the first node with room, in the order in which nodes came", _first_fit)


def cut(family: Family, query: FeasibilityQuery) -> tuple[int, int]:
    """Sort key: devices left over, then those of them in the groups (switches, sockets) that the gang cuts."""
    topology = family.topology
    if not query.gpus:
        return (family.free, topology.devices)
    free = query.takable(family)
    mask = topology.best(free, query.gpus)
    assert mask is not None
    beside = sum((free & ~mask & circle).bit_count() for circle in topology.circles if circle & mask)
    return (free.bit_count() - query.gpus, beside)


def left_over(alike: Alike, query: FeasibilityQuery, bound: tuple[int, ...]) -> tuple[int, ...]:
    """Sort key of a node: the bound of its family, then free cores and memory."""
    return (*bound, alike.millicores, alike.memory)


def least(alike: Alike, query: FeasibilityQuery) -> tuple[int, int, int]:
    """Sort key among nodes with room for equally many tasks: free devices, cores, memory."""
    return (query.takable(alike.family).bit_count(), alike.millicores, alike.memory)


_BEST_FIT_SPREAD = SpreadSearch(least)
BEST_FIT = PlacementPreference(
    "best-fit",
    "where the least is left over: whole nodes, sockets and switches stay whole",
    _one_or_several(Single(cut, left_over, parts=by_free_devices), _BEST_FIT_SPREAD),
)


def level_then_most(family: Family, query: FeasibilityQuery) -> tuple[int, ...]:
    """Sort key: level, then most devices left."""
    if not query.gpus:
        return (family.topology.devices,)
    return (query.level[family], -query.takable(family).bit_count())


def _anywhere(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
    if query.gpus > room.free_devices:
        return
    if widest <= LocalityLevel.NODE or query.tasks == 1 or query.shape.nodes == 1:
        yield from on_first_node(room, query, widest)
        return
    for number in fitting_spans(room, query, widest, tightest_first=False):
        found = _from_the_first(room, query, widest, number)
        if found is not None:
            yield found


def has_room(alike: Alike, query: FeasibilityQuery) -> int | None:
    return 0 if query.spread_room(alike) else None


def _from_the_first(room: CapacityIndex, query: FeasibilityQuery, level: LocalityLevel, number: int) -> Claims | None:
    view, shape = room.view, query.shape
    if shape.nodes or len(shape.roles) > 1:
        key_of: dict[Alike, Any] = query.memo(has_room, lambda alike: has_room(alike, query))
        nodes = list(in_span(room, query, level, number, key_of))
        even = evenly(view, shape, walk(nodes), LoadMode.PACK) if shape.nodes else None
        return even if even is not None else greedily(view, shape, walk(nodes), LoadMode.PACK)
    remaining = query.tasks
    claims: list[Claim] = []
    rooms = query.rooms[0].by_number(room.entries)[room.entries_in(level, number)]
    slots = room.slots_in(level, number)
    for position in np.flatnonzero(rooms).tolist():
        count = min(remaining, int(rooms[position]))
        claim = make_claim(view, slots.item(position), shape, (count,), LoadMode.PACK)
        assert claim is not None, f"the index has room on {view.nodes[slots[position]]} where there is none"
        claims.append(claim)
        remaining -= count
        if not remaining:
            return tuple(claims)
    return None


ANYWHERE = PlacementPreference("anywhere", "any free devices, the first node first, for ideal runs", _anywhere)
# Of servers that have nothing but devices.
BY_COUNTS = replace(ANYWHERE, by_counts=True, counts=FreeDevices)


_MOST_JOBS = 255
_MOST_CORES = 4095


def line_then_most(family: Family, query: FeasibilityQuery) -> tuple[int, ...]:
    """Sort key: line of the algorithm, level, then most devices left. Without devices: fewest on the node."""
    if not query.gpus:
        return (family.topology.devices,)
    return (line(family, query), query.level[family], -query.takable(family).bit_count())


def apart(alike: Alike, query: FeasibilityQuery, bound: tuple[int, ...]) -> tuple[int, ...]:
    """Sort key of a node: the bound of its family, then fewest jobs."""
    jobs = min(alike.jobs, _MOST_JOBS)
    return (*bound, jobs) if query.gpus else (*bound, jobs, -_cores(alike))


def line_then_least(family: Family, query: FeasibilityQuery) -> tuple[int, ...]:
    """Sort key: line of the algorithm, level, then fewest devices left."""
    if not query.gpus:
        return (family.topology.devices,)
    return (line(family, query), query.level[family], query.takable(family).bit_count())


def packed(alike: Alike, query: FeasibilityQuery, bound: tuple[int, ...]) -> tuple[int, ...]:
    """Sort key of a node: the bound of its family, then fewest jobs, or fewest cores for a gang without devices."""
    return (*bound, min(alike.jobs, _MOST_JOBS) if query.gpus else _cores(alike))


def line(family: Family, query: FeasibilityQuery) -> int:
    """Return the line of Algorithm 1 that a node is for: 0 the same affinity, 1 no jobs yet, 2 any."""
    return 0 if family.affinity == query.gpus else 2 if family.affinity else 1


def by_line(room: CapacityIndex, query: FeasibilityQuery) -> Iterable[Iterable[Family]]:
    if not query.gpus:
        return at_once(room, query)
    others = [affinity for affinity in room.affinities if affinity not in (0, query.gpus)]
    return (
        room.families_of(query.gpus),
        room.families_of(0),
        chain.from_iterable(room.families_of(affinity) for affinity in others),
    )


def few_jobs(alike: Alike, query: FeasibilityQuery) -> int:
    return alike.jobs


def keeps_holes(alike: Alike, query: FeasibilityQuery) -> bool:
    """Return whether a node is idle or has gangs of the same size: its free devices suit no other size better."""
    return line(alike.family, query) < 2


def _cores(alike: Alike) -> int:
    return min(alike.millicores // 1000, _MOST_CORES)


def _by_mode(spread: Search, pack: Search) -> Search:
    return lambda room, query, widest: (pack if room.view.mode is LoadMode.PACK else spread)(room, query, widest)


ADAPTIVE = PlacementPreference(
    "adaptive",
    "apart from other jobs under light load, where the least is left over under heavy load",
    _by_mode(_one_or_several(Single(level_then_most, apart, LoadMode.SPREAD), _BEST_FIT_SPREAD), BEST_FIT.search),
)
_BY_MODE = [
    _one_or_several(Single(bound, key, mode, by_line), SpreadSearch(few_jobs, mode, tries=(keeps_holes, any_node)))
    for bound, key, mode in ((line_then_most, apart, LoadMode.SPREAD), (line_then_least, packed, LoadMode.PACK))
]
GANDIVA = PlacementPreference(
    "gandiva", "nodes with jobs of the gang's size, then idle ones, then any (Algorithm 1)", _by_mode(*_BY_MODE)
)


def level_and_cut(family: Family, query: FeasibilityQuery) -> tuple[int, int, int]:
    return (query.level[family], *cut(family, query))


LOCALITY = PlacementPreference(
    "locality",
    "the closest devices that are free, within what the job tolerates",
    _one_or_several(Single(level_and_cut, left_over), SpreadSearch(least, most_spans=None)),
)
