"""Where a gang goes, by name: pure searches in a `CapacityIndex`, which they leave as it was. All follow one rule: on
one node if one has room, else over as few nodes as the placement's own rule allows. What is found fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import make_claim
from ganger.cluster.feasibility import Alike, Family, FeasibilityQuery, GangMix, Slots, each, fragmented_gpus
from ganger.cluster.fit import demand as needs
from ganger.cluster.preferences import ADAPTIVE, ANYWHERE, BEST_FIT, FIRST_FIT, GANDIVA, LOCALITY, cut, least
from ganger.cluster.resources import Bandwidth, LocalityLevel, accepts_type, exceeds
from ganger.cluster.search import (
    Claims,
    PlacementPreference,
    Single,
    SpreadSearch,
    able,
    by_key,
    either,
    fitting_spans,
    hosts,
    in_span,
    on_one_node,
    over_nodes,
    walk,
)
from ganger.cluster.topology import Topology
from ganger.cluster.view import LoadMode

from ganger_master.policies.tetris import TETRIS, TETRIS_COS

# Hardware, free devices, free cores and memory of a node.
_State: TypeAlias = tuple[Topology, int, int, int]
# Demands remembered at once, each of one kind of gang.
_MOST_DEMANDS: Final = 1 << 10


class FragmentationGrowth:
    """Growth of fragmentation on one node if the whole gang, or as many of its tasks as fit, come to it: the expected
    number of GPUs that the next gang could not use (FGD: Weng et al., USENIX ATC 2023, section 4)."""

    def __init__(self, demand: GangMix) -> None:
        self._demand = demand
        self._fragments: dict[_State, float] = {}
        # One object each, as answers are remembered by it.
        self.single = Single(_anything, self._whole)
        self.spread = SpreadSearch(self._part)

    def foresee(self, some: Sequence[Alike], query: FeasibilityQuery) -> None:
        """Count for all of them at once what their keys will query."""
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
        """Return the expected free GPUs of nodes in these states that the next gang could not use."""
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


def search(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
    if not query.gpus:
        # Without devices it leaves no fragments.
        return BEST_FIT.search(room, query, widest)
    growth = _growth(query.own_kind)
    growth.foresee([alike for family in hosts(room, query, widest) for alike in able(family, query)], query)
    return either(on_one_node(room, query, widest, growth.single), over_nodes(room, query, widest, growth.spread))


def _anything(family: Family, query: FeasibilityQuery) -> tuple[()]:
    """Return no bound: the least growth of a family is unknown before its members are counted."""
    return ()


_growth = lru_cache(_MOST_DEMANDS)(FragmentationGrowth)
FGD = PlacementPreference("fgd", "where the fewest GPUs become useless to the gangs that are requested", search)


def traffic_per_server_task(workers: int, servers: int) -> float:
    """Return the model sizes a step that all parameter servers together send to workers on other servers, over one
    parameter server's part of the model: w - w/k, each way."""
    return workers - workers / servers


def traffic_per_card(workers: int, servers: int) -> float:
    """Return the model sizes a step that cross one server's network card, each way: its parameter servers' part of the
    model to all workers elsewhere, w (k - 1) / k^2; however many parameter servers there are."""
    return workers * (servers - 1) / servers**2


def emptiest(alike: Alike, query: FeasibilityQuery) -> tuple[int, int, int, str, Bandwidth]:
    """Return a sort key, emptiest first: free devices, then cores, then memory. Nodes of one key can hold the same."""
    hardware = alike.family.topology.configuration_set.name
    bandwidth = tuple([-amount for amount in alike.bandwidth])
    return (-query.takable(alike.family).bit_count(), -alike.millicores, -alike.memory, hardware, bandwidth)


def _emptiest_with_room(alike: Alike, query: FeasibilityQuery) -> tuple[int, int, int, str, Bandwidth] | None:
    return emptiest(alike, query) if query.spread_room(alike) else None


def most_devices(family: Family, query: FeasibilityQuery) -> tuple[int]:
    return (-query.takable(family).bit_count(),)


def by_theorem(workers: int, servers: int) -> tuple[float, int]:
    return (traffic_per_server_task(workers, servers), servers)


def by_card(workers: int, servers: int) -> tuple[float, int]:
    return (traffic_per_card(workers, servers), servers)


# Optimus's placement (Peng et al., EuroSys 2018, section 4.2): the k emptiest servers get task i of each role at server
# i mod k, for the smallest k at which all fit. Where all tasks of a server share one network card, more than two
# servers are better: `optimus-cards` takes the k with the least traffic per card.
def _placement(name: str, summary: str, cost: Callable[[int, int], tuple[float, int]]) -> PlacementPreference:
    def search(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
        shape = query.shape
        single = on_one_node(room, query, widest, _SINGLE)
        if shape.nodes == 1 or query.tasks == 1 or widest < LocalityLevel.RACK:
            return single
        return either(single, equal_shares(room, query, widest))

    def equal_shares(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
        """Yield one candidate for each span that has room, closest or not."""
        shape = query.shape
        most = max(query.everything)
        numbers: Iterable[int] = (shape.nodes,) if shape.nodes else range(2, most + 1)
        # Jobs of one role have no parameter servers: what a ring sends over a card does not depend on k.
        if len(shape.roles) > 1:
            workers = query.everything[query.by_weight[0]]
            numbers = sorted(numbers, key=lambda servers: cost(workers, servers))
        for span in fitting_spans(room, query, widest, tightest_first=False):
            servers = _Known(_emptiest_first(room, query, widest, span))
            for number in numbers:
                if _all_fit(room, query, servers, number):
                    yield _claims(room, query, servers, number)
                    break

    return PlacementPreference(name, summary, search)


def _share(query: FeasibilityQuery, number: int, server: int) -> tuple[int, ...]:
    return tuple([tasks // number + (server < tasks % number) for tasks in query.everything])


class _Known(Iterable[tuple[Any, Slots]]):
    def __init__(self, runs: Iterator[tuple[Any, Slots]]) -> None:
        self._more = runs
        self._known: list[tuple[Any, Slots]] = []

    def __iter__(self) -> Iterator[tuple[Any, Slots]]:
        at = 0
        while True:
            if at == len(self._known):
                run = next(self._more, None)
                if run is None:
                    return
                self._known.append(run)
            yield self._known[at]
            at += 1


def _emptiest_first(
    room: CapacityIndex, query: FeasibilityQuery, level: LocalityLevel, number: int
) -> Iterator[tuple[Any, Slots]]:
    keys: dict[Alike, Any] = query.memo(_emptiest_with_room, lambda alike: _emptiest_with_room(alike, query))
    if level is not LocalityLevel.CLUSTER or query.shape.device_memory_bytes:
        yield from in_span(room, query, level, number, keys)
        return
    # By free devices first, so the fuller ones need not be looked at before it comes to them.
    for free in range(room.most_free, query.least_free - 1, -1):
        some = [alike for family in room.families_with(free) for alike in family.members]
        yield from by_key(some, keys, room.span(level, number))


def _all_fit(room: CapacityIndex, query: FeasibilityQuery, servers: Iterable[tuple[Any, Slots]], number: int) -> bool:
    """Return whether each of the first servers, of runs of servers alike, can hold its share."""
    # From these servers on the share is smaller by a task.
    edges = sorted({number, *(tasks % number for tasks in query.everything)} - {0})
    at = 0
    for (devices, millicores, memory, _, bandwidth), nodes in servers:
        of = room.view.topologies[next(each(nodes))].configuration_set
        end = at + nodes.bit_count()
        while at < min(end, number):
            needed = needs(of, query.shape, _share(query, number, at))
            if needed.gpus > -devices or needed.millicores > -millicores or needed.memory_bytes > -memory:
                return False
            if exceeds(needed.bandwidth, tuple([-amount for amount in bandwidth])):
                return False
            if needed.gpus and not accepts_type(query.shape.device_type, of.device_type):
                return False
            at = min(end, next(edge for edge in edges if edge > at))
        if at == number:
            return True
    return False


def _claims(room: CapacityIndex, query: FeasibilityQuery, servers: Iterable[tuple[Any, Slots]], number: int) -> Claims:
    claims = []
    for server, slot in zip(range(number), walk(servers), strict=False):
        claim = make_claim(room.view, slot, query.shape, _share(query, number, server), LoadMode.SPREAD)
        assert claim is not None, f"the index has room on {room.view.nodes[slot]} where there is none"
        claims.append(claim)
    return tuple(claims)


_SINGLE = Single(most_devices, lambda alike, query, bound: emptiest(alike, query), LoadMode.SPREAD)
OPTIMUS = _placement("optimus", "the fewest servers, equal parts of the gang on each, the emptiest first", by_theorem)
OPTIMUS_CARDS = _placement("optimus-cards", "the same with the least traffic over any server's network card", by_card)


__all__ = ["PLACEMENTS", "PlacementPreference", "placement_named"]

PLACEMENTS: Final = {
    placement.name: placement
    for placement in (
        FIRST_FIT,
        BEST_FIT,
        ADAPTIVE,
        GANDIVA,
        LOCALITY,
        TETRIS,
        TETRIS_COS,
        OPTIMUS,
        OPTIMUS_CARDS,
        FGD,
        ANYWHERE,
    )
}


def placement_named(name: str) -> PlacementPreference:
    """Return a placement by name. Raises KeyError, with the known names, for an unknown one."""
    try:
        return PLACEMENTS[name]
    except KeyError:
        raise KeyError(f"there is no placement {name!r}; there are {', '.join(PLACEMENTS)}") from None
