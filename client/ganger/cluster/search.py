"""The search that placement preferences share: a gang on the best single node, else spread over the fewest nodes.

A `PlacementPreference` ranks classes of equal nodes by keys; ties go to the node that came first. Searches are
iterators: the first candidate costs no more than the search for one, and each further one continues the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from operator import itemgetter, or_
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import PLENTY, FreeDevices, evenly, fewest, greedily, make_claim, resumed_in_place
from ganger.cluster.feasibility import (
    Alike,
    CapacityTotals,
    Family,
    FeasibilityQuery,
    Slots,
    each,
    each_from_last,
)
from ganger.cluster.resources import Claim, GangShape, LocalityLevel, shapes_by_type
from ganger.cluster.view import LoadMode, View

Claims: TypeAlias = tuple[Claim, ...]
# Candidates for a gang, the best first, within the widest level that it accepts now.
Search: TypeAlias = Callable[[CapacityIndex, FeasibilityQuery, LocalityLevel], Iterator[Claims]]
_NOWHERE: Final = frozenset[str]()


class PlacementRequest(Struct, frozen=True, gc=False):
    """What a job asks of a placement. `waited_s`: while its patience lasts only what meets its wish is found.

    `parked`: where its state is parked, which is the first candidate if it is free still, the memory kept there being
    the job's own. `kept_nodes` are tried next, then all others. `avoid`: nodes not to use, beside those that are
    closed to the shape; `only`: the nodes to use (None: all). `limit`: the most candidates.
    """

    shape: GangShape
    waited_s: float = 0.0
    parked: Claims = ()
    kept_nodes: frozenset[str] = _NOWHERE
    avoid: frozenset[str] = _NOWHERE
    only: frozenset[str] | None = None
    limit: int = 1


@dataclass(frozen=True, slots=True)
class PlacementPreference:
    """`summary`: one line for people. `by_counts`: a gang finds a place wherever so many devices are free. `counts`:
    finds the places that `search` would, but without an index, for gangs that are `counted.is_counted`."""

    name: str
    summary: str
    search: Search
    by_counts: bool = False
    counts: Callable[[View], FreeDevices] | None = None

    def place(self, index: CapacityIndex, request: PlacementRequest) -> Claims | None:
        """The first candidate, or None. Nothing is taken."""
        is_bounded = request.avoid or request.shape.closed_nodes or request.only is not None
        if request.parked or request.kept_nodes or is_bounded:
            return next(iter(self.places(index, request)), None)
        # The planner asks thousands of times a pass, nearly always for any place.
        return next(self._candidates(index, request), None)

    def places(self, index: CapacityIndex, request: PlacementRequest) -> Sequence[Claims]:
        """Return at most `request.limit` candidates, the best first; all of them fit. Nothing is taken.

        All devices of a gang that accepts several types are of one, the first one with room.
        """
        parked, avoid, limit = request.parked, request.avoid | request.shape.closed_nodes, request.limit
        found: list[Claims] = []
        is_avoided = any(claim.node in avoid for claim in parked)
        if parked and not is_avoided and (claims := resumed_in_place(index.view, request.shape, parked)):
            found.append(claims)
        if request.kept_nodes and request.only is None and len(found) < limit:
            kept = CapacityIndex(index.view, request.kept_nodes - avoid)
            found += islice(self._candidates(kept, request), limit - len(found))
        if len(found) >= limit:
            return found
        where = index if request.only is None else CapacityIndex(index.view, request.only)
        if avoid:
            with where.excluding(avoid):
                everywhere = list(islice(self._candidates(where, request), limit))
        else:
            everywhere = list(islice(self._candidates(where, request), limit))
        if not found:
            return everywhere
        return [*found, *[claims for claims in everywhere if claims not in found]][:limit]

    def _candidates(self, index: CapacityIndex, request: PlacementRequest) -> Iterator[Claims]:
        """Return the candidates on an index, of one device type after the other."""
        shape = request.shape
        widest = widest_now(shape, request.waited_s)
        if "," not in shape.device_type:
            return self.search(index, index.query(shape), widest)
        return chain.from_iterable(self.search(index, index.query(one), widest) for one in shapes_by_type(shape))


def widest_now(shape: GangShape, waited_s: float) -> LocalityLevel:
    """Return the widest level that a gang accepts after `waited_s` seconds: its wish while its patience lasts."""
    locality = shape.locality
    if locality.wish is not None and waited_s < locality.patience_s:
        return min(locality.wish, locality.widest)
    return locality.widest


def either(preferred: Iterator[Claims], otherwise: Iterator[Claims]) -> Iterator[Claims]:
    """Yield the candidates of the first search, or, if it finds none, those of the second."""
    first = next(preferred, None)
    if first is None:
        yield from otherwise
    else:
        yield first
        yield from preferred


# Smaller is better. Answers are remembered by function: use the same function object for the same question.
Key: TypeAlias = Callable[[Alike, FeasibilityQuery], Any]
# Most nodes whose classes are looked up one by one.
_FEW: Final = 128
_LEVELS: Final = (LocalityLevel.RACK, LocalityLevel.FABRIC, LocalityLevel.CLUSTER)
_NO_ROOM: Final = np.iinfo(np.int64).max


def at_once(room: CapacityIndex, query: FeasibilityQuery) -> Iterable[Iterable[Family]]:
    return (room.families(query.gpus),)


def by_free_devices(room: CapacityIndex, query: FeasibilityQuery) -> Iterable[Iterable[Family]]:
    """Return families in parts by number of free devices, the fewest first, for bounds that begin with this number."""
    if query.shape.device_memory_bytes:
        # A gang may be able to take only some of the free devices.
        return at_once(room, query)
    return (room.families_with(free) for free in range(query.gpus, room.most_free + 1))


@dataclass(frozen=True, slots=True)
class Single:
    """A search for the single node with the smallest `key`. The third argument of `key` is the bound of the family.

    `bound`: lower bound of the keys in a family, such as the start of the key. Families are searched in its order, as
    far as needed. Its values are remembered: use the same function object. `parts`: returns all families with enough
    free devices, in parts; bounds of a part are smaller than those of later parts.
    """

    bound: Callable[[Family, FeasibilityQuery], Any]
    key: Callable[[Alike, FeasibilityQuery, Any], Any]
    mode: LoadMode = LoadMode.PACK
    parts: Callable[[CapacityIndex, FeasibilityQuery], Iterable[Iterable[Family]]] = at_once


def any_node(alike: Alike, query: FeasibilityQuery) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class SpreadSearch:
    """How a gang is spread over nodes. `key`: which go first among those with room for equally many tasks.

    `tries`: only nodes of which the first holds, then the second. Of racks and fabrics the tightest that has room for
    the gang is tried first, and no more than `most_spans` of a level. Without `closest_first` the first rack (fabric,
    cluster) of the widest level that the gang accepts is taken.
    """

    key: Key
    mode: LoadMode = LoadMode.PACK
    tries: tuple[Callable[[Alike, FeasibilityQuery], bool], ...] = (any_node,)
    closest_first: bool = True
    most_spans: int | None = 4


def on_one_node(
    room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel, single: Single
) -> Iterator[Claims]:
    """The whole gang on a node, nodes with the smallest key first."""
    if query.shape.nodes > 1:
        return
    for bounded in _bounded(room, query, widest, single):
        first = _first_of(bounded, query, single)
        if first is None:
            continue
        yield _claim(room, query, first, widest, single.mode)
        # Few callers ask for more than one candidate.
        for slot in _ordered(bounded, query, single):
            if slot != first:
                yield _claim(room, query, slot, widest, single.mode)


def _first_of(bounded: Sequence[tuple[Any, Family]], query: FeasibilityQuery, single: Single) -> int | None:
    """The node with the smallest key, the lowest slot of those with equal keys; None if none has room."""
    key_of, best = single.key, None
    first: int | None = None
    for bound, family in bounded:
        if first is not None and bound > best:
            break
        for alike in able(family, query):
            key = key_of(alike, query, bound)
            if first is None or key < best or (key == best and alike.lowest < first):
                best, first = key, alike.lowest
    return first


def _ordered(bounded: Sequence[tuple[Any, Family]], query: FeasibilityQuery, single: Single) -> Iterator[int]:
    """The nodes by key and then by slot. Families are looked at no further than needed."""
    key_of, least = single.key, None
    met: dict[Any, list[Alike]] = {}
    for bound, family in bounded:
        if met and bound > least:
            # All families that follow have greater keys.
            yield from _in_order(met, bound)
            least = min(met, default=None)
        for alike in able(family, query):
            key = key_of(alike, query, bound)
            if not met or key < least:
                least = key
            met.setdefault(key, []).append(alike)
    yield from _in_order(met)


def _in_order(met: dict[Any, list[Alike]], bound: Any = None) -> Iterator[int]:
    """The nodes with smaller keys than `bound` (None: all), by key and then by slot; they leave `met`."""
    for key in sorted(met if bound is None else [key for key in met if key < bound]):
        yield from each(reduce(or_, [alike.slots for alike in met.pop(key)]))


def on_first_node(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Iterator[Claims]:
    """The whole gang on a node that has room for it, in the order in which nodes came."""
    if query.shape.nodes > 1:
        return
    if widest >= LocalityLevel.NODE and len(query.rooms) == 1:
        # Of a gang of one role a node has room for the whole if it has room for so many of its tasks.
        tasks = query.rooms[0]
        has_room = tasks.by_number(room.entries) >= query.tasks
        slot = room.first(has_room, (tasks.kind, query.tasks))
        if slot is not None:
            yield _claim(room, query, slot, widest, LoadMode.PACK)
            after = room.entries_in(LocalityLevel.CLUSTER, 0)[slot + 1 :]
            for further in np.flatnonzero(has_room[after]).tolist():
                yield _claim(room, query, slot + 1 + further, widest, LoadMode.PACK)
        return
    slots = 0
    for family in hosts(room, query, widest):
        for alike in able(family, query):
            slots |= alike.slots
    for slot in each(slots):
        yield _claim(room, query, slot, widest, LoadMode.PACK)


def able(family: Family, query: FeasibilityQuery) -> Sequence[Alike]:
    """Nodes of the family with cores, memory and bandwidth for the whole gang."""
    needed = query.whole(family.topology)
    return family.able(needed.millicores, needed.memory_bytes, needed.bandwidth)


def hosts(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> list[Family]:
    """Families with devices for the whole gang within that level, those with the fewest free first."""
    if query.shape.nodes > 1:
        return []
    within = min(widest, LocalityLevel.NODE)
    level = query.level
    return [family for family in room.families(query.gpus) if level[family] <= within]


def hosting(room: CapacityIndex, shape: GangShape, widest: LocalityLevel) -> NDArray[np.intp]:
    """Slots of the nodes that could host the whole gang within that level, ascending."""
    query = room.query(shape)
    numbers = [alike.number for family in hosts(room, query, widest) for alike in able(family, query)]
    is_host = np.zeros(len(room.entries.alikes) + 1, np.bool_)
    is_host[numbers] = True
    return np.flatnonzero(is_host[room.entries_in(LocalityLevel.CLUSTER, 0)])


def over_nodes(
    room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel, spread: SpreadSearch
) -> Iterator[Claims]:
    """The gang over several nodes, of one rack if one has room and the gang's closeness matters: one candidate for each
    span of the closest level that has any."""
    if query.shape.nodes == 1 or query.tasks <= 1 or query.gpus > room.free_devices:
        return
    tallies = [room.tally(query, role) for role in query.by_weight]
    for level in _LEVELS:
        if level > widest or (level < widest and not spread.closest_first):
            continue
        most = None if level is LocalityLevel.CLUSTER else spread.most_spans
        is_found = False
        for number in islice(_fitting(tallies, query, level, spread.closest_first), most):
            attempts = (_fill(room, query, level, number, spread, accepts) for accepts in spread.tries)
            claims = next((claims for claims in attempts if claims is not None), None)
            if claims is not None:
                is_found = True
                yield claims
        if is_found:
            return


def fitting_spans(
    room: CapacityIndex, query: FeasibilityQuery, level: LocalityLevel, tightest_first: bool
) -> Sequence[int]:
    """Return the numbers of the racks (fabrics, the cluster) with room for every role."""
    return list(_fitting([room.tally(query, role) for role in query.by_weight], query, level, tightest_first))


def _fitting(
    tallies: Sequence[CapacityTotals], query: FeasibilityQuery, level: LocalityLevel, tightest_first: bool
) -> Iterator[int]:
    """Yield the numbers of the spans with room for every role. `tallies`: of each role, as in `by_weight`."""
    totals = [tally.totals(level) for tally in tallies]
    enough = totals[0] >= query.everything[query.by_weight[0]]
    tightness = totals[0]
    for role, total in zip(query.by_weight[1:], totals[1:], strict=True):
        enough &= total >= query.everything[role]
        tightness = tightness + total
    if not tightest_first:
        yield from enough.nonzero()[0].tolist()
        return
    # Callers usually take one or two of hundreds.
    left = np.where(enough, tightness, _NO_ROOM)
    while len(left) and left[number := int(left.argmin())] < _NO_ROOM:
        yield number
        left[number] = _NO_ROOM


def in_span(
    room: CapacityIndex, query: FeasibilityQuery, level: LocalityLevel, number: int, key_of: dict[Alike, Any]
) -> Iterator[tuple[Any, Slots]]:
    """Yield each key with its nodes of a rack (fabric, ...), smallest key first, without nodes that have no key."""
    return by_key(_present(room, query, level, number), key_of, room.span(level, number))


def by_key(some: Iterable[Alike], key_of: dict[Alike, Any], span: Slots) -> Iterator[tuple[Any, Slots]]:
    """Yield each key with its nodes of `span` that belong to `some` classes, in the order of `in_span`."""
    alikes: dict[Any, list[Slots]] = {}
    for alike in some:
        key = key_of[alike]
        if key is not None:
            alikes.setdefault(key, []).append(alike.slots)
    for key, slots in sorted(alikes.items(), key=itemgetter(0)):
        yield key, reduce(or_, slots) & span


def walk(runs: Iterable[tuple[Any, Slots]], from_last: bool = False) -> Iterator[int]:
    """Yield the slots of runs of nodes, run by run, ascending; descending if `from_last`."""
    return chain.from_iterable(each_from_last(slots) if from_last else each(slots) for _, slots in runs)


def _bounded(
    room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel, single: Single
) -> Iterator[list[tuple[Any, Family]]]:
    """Yield the families with room for the gang, with their bounds, in parts. Each is better than all later."""
    within = min(widest, LocalityLevel.NODE)
    level = query.level
    bounds: dict[Family, Any] = query.memo(
        (single.bound, within), lambda family: single.bound(family, query) if level[family] <= within else None
    )
    for families in single.parts(room, query):
        found = [(bound, family) for family in families if (bound := bounds[family]) is not None]
        found.sort(key=itemgetter(0))
        yield found


def _claim(room: CapacityIndex, query: FeasibilityQuery, slot: int, widest: LocalityLevel, mode: LoadMode) -> Claims:
    claim = make_claim(room.view, slot, query.shape, query.everything, mode, widest)
    assert claim is not None, f"the index has room on {room.view.nodes[slot]} where there is none"
    return (claim,)


def _fill(
    room: CapacityIndex,
    query: FeasibilityQuery,
    level: LocalityLevel,
    number: int,
    spread: SpreadSearch,
    accepts: Callable[[Alike, FeasibilityQuery], bool],
) -> Claims | None:
    view, shape, mode = room.view, query.shape, spread.mode

    def key(alike: Alike) -> Any:
        most = query.spread_room(alike)
        return (-most, spread.key(alike, query)) if most and accepts(alike, query) else None

    key_of: dict[Alike, Any] = query.memo((spread.key, accepts), key)
    if shape.nodes:
        return _over_exactly(room, query, list(in_span(room, query, level, number, key_of)), mode)
    if len(shape.roles) > 1:
        return greedily(view, shape, walk(in_span(room, query, level, number, key_of)), mode)
    return fewest(view, shape, _roomiest_first(room, query, level, number, key_of), mode)


def _over_exactly(
    room: CapacityIndex, query: FeasibilityQuery, runs: Sequence[tuple[Any, Slots]], mode: LoadMode
) -> Claims | None:
    shape = query.shape
    share = -(-query.everything[query.by_weight[0]] // shape.nodes)
    if len(shape.roles) > 1:
        share *= PLENTY
    roomy = [run for run in runs if -run[0][0] >= share]
    # Packing uses the tightest nodes that will do, so that the roomy ones stay whole.
    order = walk(roomy) if mode is LoadMode.SPREAD else walk(reversed(roomy), from_last=True)
    even = evenly(room.view, shape, order, mode)
    return even if even is not None else greedily(room.view, shape, walk(runs), mode)


def _roomiest_first(
    room: CapacityIndex, query: FeasibilityQuery, level: LocalityLevel, number: int, key_of: dict[Alike, Any]
) -> Iterator[tuple[int, Iterator[int]]]:
    """Yield the tasks of the single role that fit, with the nodes of a span where so many fit, the most first. Nodes
    with equal room are ordered by their keys, which are computed only when needed."""
    span = room.span(level, number)
    # Of the whole cluster the index is shorter than the nodes are many, but only of those that have devices free.
    by_entry = level is LocalityLevel.CLUSTER and query.least_free
    for most, some in _by_room(room, query) if by_entry else _by_room_of_nodes(room, query, level, number):
        if any(key_of[alike] is not None for alike in some):
            yield most, walk(by_key(some, key_of, span))


def _by_room_of_nodes(
    room: CapacityIndex, query: FeasibilityQuery, level: LocalityLevel, number: int
) -> Iterator[tuple[int, list[Alike]]]:
    entries = room.entries_in(level, number)
    rooms = query.rooms[0].by_number(room.entries)[entries]
    if len(entries) <= _FEW:
        every = room.entries.alikes
        by_room: dict[int, set[int]] = {}
        for tasks, entry in zip(rooms.tolist(), entries.tolist(), strict=True):
            by_room.setdefault(tasks, set()).add(entry)
        by_room.pop(0, None)
        for most in sorted(by_room, reverse=True):
            yield most, [every[entry - 1] for entry in by_room[most]]
        return
    while most := int(rooms.max(initial=0)):
        yield most, _named(room, entries[rooms == most])
        less = rooms < most
        entries, rooms = entries[less], rooms[less]


def _by_room(room: CapacityIndex, query: FeasibilityQuery) -> Iterator[tuple[int, list[Alike]]]:
    every = room.entries.alikes
    rooms = np.where(room.entries.is_present, query.rooms[0].by_number(room.entries), 0)
    while most := int(rooms.max(initial=0)):
        is_most = rooms == most
        yield most, [every[number - 1] for number in np.flatnonzero(is_most).tolist()]
        rooms[is_most] = 0


def _present(room: CapacityIndex, query: FeasibilityQuery, level: LocalityLevel, number: int) -> Iterable[Alike]:
    if level is LocalityLevel.CLUSTER:
        return chain.from_iterable(family.members for family in room.families(query.least_free))
    entries = room.entries_in(level, number)
    return _named(room, entries[entries > 0])


def _named(room: CapacityIndex, entries: NDArray[np.int32]) -> list[Alike]:
    different = set(entries.tolist()) if len(entries) <= _FEW else np.flatnonzero(np.bincount(entries)).tolist()
    every = room.entries.alikes
    return [every[number - 1] for number in different]
