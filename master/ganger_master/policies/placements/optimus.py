"""Optimus's placement (Peng et al., EuroSys 2018, section 4.2): the fewest servers, with equally many parameter servers
and equally many workers on each.

The k emptiest servers get task i of each role at server i mod k, for the smallest k at which all fit. The paper places
the smallest jobs first, which is left to the order.

Its theorem, that the smallest k is best, holds where bandwidth belongs to a container: a parameter server sends to the
workers that are elsewhere, ever more of them as k grows (`traffic_per_server_task`). Where all tasks of a server share
one network card the cross traffic of a card is 0 at k = 1, w/4 model sizes at 2, 2w/9 at 3, 3w/16 at 4, so that beyond
two servers more are better (`traffic_per_card`). `optimus` believes the theorem; `optimus-cards` takes the k with the
least traffic per card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import make_claim
from ganger.cluster.feasibility import FeasibilityQuery
from ganger.cluster.fit import demand as needs
from ganger.cluster.fragmentation import GangMix
from ganger.cluster.node_classes import Alike, Family, Slots, each
from ganger.cluster.resources import LocalityLevel
from ganger.cluster.search import (
    Claims,
    PlacementPreference,
    Single,
    by_key,
    either,
    fitting_spans,
    in_span,
    on_one_node,
    walk,
)
from ganger.cluster.view import LoadMode


def traffic_per_server_task(workers: int, servers: int) -> float:
    """Model sizes a step that all parameter servers together send to workers on other servers, over one parameter
    server's part of the model: w - w/k, each way."""
    return workers - workers / servers


def traffic_per_card(workers: int, servers: int) -> float:
    """Model sizes a step that cross one server's network card, each way: its parameter servers' part of the model to
    all workers elsewhere, w (k - 1) / k^2; however many parameter servers there are."""
    return workers * (servers - 1) / servers**2


def emptiest(alike: Alike, query: FeasibilityQuery) -> tuple[int, int, int, str]:
    """By free devices, then cores, then memory; nodes of one key are alike in what they can hold."""
    hardware = alike.family.topology.configuration_set.name
    return (-query.takable(alike.family).bit_count(), -alike.millicores, -alike.memory, hardware)


def _emptiest_with_room(alike: Alike, query: FeasibilityQuery) -> tuple[int, int, int, str] | None:
    return emptiest(alike, query) if query.spread_room(alike) else None


def most_devices(family: Family, query: FeasibilityQuery) -> tuple[int]:
    return (-query.takable(family).bit_count(),)


def by_theorem(workers: int, servers: int) -> tuple[float, int]:
    return (traffic_per_server_task(workers, servers), servers)


def by_card(workers: int, servers: int) -> tuple[float, int]:
    return (traffic_per_card(workers, servers), servers)


def _placement(name: str, summary: str, cost: Callable[[int, int], tuple[float, int]]) -> PlacementPreference:
    def search(
        room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel, demand: GangMix | None
    ) -> Iterator[Claims]:
        shape = query.shape
        single = on_one_node(room, query, widest, _SINGLE)
        if shape.nodes == 1 or query.tasks == 1 or widest < LocalityLevel.RACK:
            return single
        return either(single, equal_shares(room, query, widest))

    def equal_shares(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
        """One candidate for each span that has room, closest or not."""
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
    """Tasks of each role on one of so many servers."""
    return tuple([tasks // number + (server < tasks % number) for tasks in query.everything])


class _Known(Iterable[tuple[Any, Slots]]):
    """What was looked at once is not made again."""

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
    """Whether each of the first servers, of runs of servers alike, can hold its share."""
    # From these servers on the share is smaller by a task.
    edges = sorted({number, *(tasks % number for tasks in query.everything)} - {0})
    at = 0
    for (devices, millicores, memory, _), nodes in servers:
        of = room.view.topologies[next(each(nodes))].configuration_set
        end = at + nodes.bit_count()
        while at < min(end, number):
            needed = needs(of, query.shape, _share(query, number, at))
            if needed.gpus > -devices or needed.millicores > -millicores or needed.memory_bytes > -memory:
                return False
            if needed.gpus and query.shape.device_type not in ("", of.device_type):
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
