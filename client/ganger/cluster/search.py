"""The search that placement preferences share: a gang on the best single node, else spread over the fewest nodes.

A `PlacementPreference` ranks classes of equal nodes by keys; ties go to the node that came first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from operator import itemgetter, or_
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import make_claim
from ganger.cluster.counted import FreeDevices
from ganger.cluster.feasibility import CapacityTotals, FeasibilityQuery
from ganger.cluster.fragmentation import GangMix
from ganger.cluster.node_classes import Alike, Family, Slots, each, each_from_last
from ganger.cluster.placement import asked_for, still_free, widest_now
from ganger.cluster.placement_search import PLENTY, evenly, fewest, greedily
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.cluster.view import LoadMode, View

Claims: TypeAlias = tuple[Claim, ...]
# From a room, a gang and the widest level it takes now to its place, or None where it finds none.
Search: TypeAlias = Callable[[CapacityIndex, FeasibilityQuery, LocalityLevel, GangMix | None], Claims | None]


@dataclass(frozen=True, slots=True)
class Want:
    """What else matters to where a gang goes."""

    # Seconds it has waited: while its patience lasts only what meets its wish is found.
    waited_s: float = 0.0
    # Where its state is parked: it goes there if that is free still, the memory it keeps there being its own.
    parked: Claims = ()
    # Names of nodes to try before all others, and of those not to use.
    prefer: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    # Kinds of gangs that will be asked for; only some placements heed it.
    demand: GangMix | None = None


_NOTHING_ELSE: Final = Want()


@dataclass(frozen=True, slots=True)
class PlacementPreference:
    """`summary`: one line for people. `by_counts`: a gang finds a place wherever so many devices are free. `counts`:
    finds the places that `search` would, but without a room, for gangs that are `counted.is_counted`."""

    name: str
    summary: str
    search: Search
    by_counts: bool = False
    counts: Callable[[View], FreeDevices] | None = None

    def place(self, room: CapacityIndex, shape: GangShape, want: Want = _NOTHING_ELSE) -> Claims | None:
        """Claims that fit, or None. Nothing is taken."""
        parked = want.parked
        if parked and not any(claim.node in want.avoid for claim in parked) and still_free(room.view, shape, parked):
            return asked_for(parked)
        widest = widest_now(shape, want.waited_s)
        if want.prefer:
            near = CapacityIndex(room.view, only=want.prefer - want.avoid)
            found = self.search(near, near.query(shape), widest, want.demand)
            if found is not None:
                return found
        if not want.avoid:
            return self.search(room, room.query(shape), widest, want.demand)
        with room.excluding(want.avoid):
            return self.search(room, room.query(shape), widest, want.demand)


# Smaller is better. One question must be one function, since answers are remembered by it.
Key: TypeAlias = Callable[[Alike, FeasibilityQuery], Any]
# So many nodes are told apart one by one.
_FEW: Final = 128
_LEVELS: Final = (LocalityLevel.RACK, LocalityLevel.FABRIC, LocalityLevel.CLUSTER)
_NO_ROOM: Final = np.iinfo(np.int64).max


def at_once(room: CapacityIndex, query: FeasibilityQuery) -> Iterable[Iterable[Family]]:
    return (room.families(query.gpus),)


def by_free_devices(room: CapacityIndex, query: FeasibilityQuery) -> Iterable[Iterable[Family]]:
    """For bounds that begin with the devices that a gang could take, the fewest first."""
    if query.shape.device_memory_bytes:
        # Of the free ones it may be able to take some only.
        return at_once(room, query)
    return (room.families_with(free) for free in range(query.gpus, room.most_free + 1))


@dataclass(frozen=True, slots=True)
class Single:
    """Which single node takes a gang: that with the smallest `key`, which gets the bound of its family too.

    `bound`: no key of the family is smaller, so families are looked at in its order, no further than needed; the start
    of a key bounds it. It is asked once, so it must be one and the same function. `parts`: families among which are all
    that have the gang's devices free, in parts of which each has smaller bounds than all that follow.
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


def on_one_node(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel, single: Single) -> Claims | None:
    """The whole gang on the node with the smallest key."""
    if query.shape.nodes > 1:
        return None
    best: Any = None
    slot = -1
    key_of = single.key
    for bounded in _bounded(room, query, widest, single):
        for bound, family in bounded:
            if best is not None and bound > best:
                break
            for alike in able(family, query):
                key = key_of(alike, query, bound)
                if best is None or key < best or (key == best and alike.lowest < slot):
                    best, slot = key, alike.lowest
        if best is not None:
            return _claim(room, query, slot, widest, single.mode)
    return None


def on_first_node(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> Claims | None:
    """The whole gang on the first node, in the order in which nodes came, that has room for it."""
    if query.shape.nodes > 1:
        return None
    if widest >= LocalityLevel.NODE and len(query.rooms) == 1:
        # Of a gang of one role a node has room for the whole if it has room for so many of its tasks.
        tasks = query.rooms[0]
        slot = room.first(tasks.by_number(room.entries) >= query.tasks, (tasks.kind, query.tasks))
        return None if slot is None else _claim(room, query, slot, widest, LoadMode.PACK)
    first = nowhere = len(room.view.nodes)
    for family in hosts(room, query, widest):
        if family.lowest < first:
            first = min([first, *[alike.lowest for alike in able(family, query)]])
    return _claim(room, query, first, widest, LoadMode.PACK) if first < nowhere else None


def able(family: Family, query: FeasibilityQuery) -> Sequence[Alike]:
    """Nodes of the family with cores and memory for the whole gang."""
    needed = query.whole(family.topology)
    return family.able(needed.millicores, needed.memory_bytes)


def hosts(room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel) -> list[Family]:
    """Families with devices for the whole gang within that level, those with the fewest free first."""
    if query.shape.nodes > 1:
        return []
    within = min(widest, LocalityLevel.NODE)
    level = query.level
    return [family for family in room.families(query.gpus) if level[family] <= within]


def over_nodes(
    room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel, spread: SpreadSearch
) -> Claims | None:
    """The gang over several nodes, of one rack if one has room and the gang's closeness matters."""
    if query.shape.nodes == 1 or query.tasks <= 1 or query.gpus > room.free_devices:
        return None
    tallies = [room.tally(query, role) for role in query.by_weight]
    for level in _LEVELS:
        if level > widest or (level < widest and not spread.closest_first):
            continue
        most = None if level is LocalityLevel.CLUSTER else spread.most_spans
        for number in islice(_fitting(tallies, query, level, spread.closest_first), most):
            for accepts in spread.tries:
                claims = _fill(room, query, level, number, spread, accepts)
                if claims is not None:
                    return claims
    return None


def fitting_spans(
    room: CapacityIndex, query: FeasibilityQuery, level: LocalityLevel, tightest_first: bool
) -> Sequence[int]:
    """Racks (fabrics, the cluster) with room for every role."""
    return list(_fitting([room.tally(query, role) for role in query.by_weight], query, level, tightest_first))


def _fitting(
    tallies: Sequence[CapacityTotals], query: FeasibilityQuery, level: LocalityLevel, tightest_first: bool
) -> Iterator[int]:
    """By the tallies of the roles, as `FeasibilityQuery.by_weight` has them."""
    totals = [tally.totals(level) for tally in tallies]
    enough = totals[0] >= query.everything[query.by_weight[0]]
    tightness = totals[0]
    for role, total in zip(query.by_weight[1:], totals[1:], strict=True):
        enough &= total >= query.everything[role]
        tightness = tightness + total
    if not tightest_first:
        yield from enough.nonzero()[0].tolist()
        return
    # Of hundreds one or two are asked for most times.
    left = np.where(enough, tightness, _NO_ROOM)
    while len(left) and left[number := int(left.argmin())] < _NO_ROOM:
        yield number
        left[number] = _NO_ROOM


def in_span(
    room: CapacityIndex, query: FeasibilityQuery, level: LocalityLevel, number: int, key_of: dict[Alike, Any]
) -> Iterator[tuple[Any, Slots]]:
    """The nodes of a rack (fabric, ...) by their keys, the smallest first; those without a key are left out."""
    return by_key(_present(room, query, level, number), key_of, room.span(level, number))


def by_key(some: Iterable[Alike], key_of: dict[Alike, Any], span: Slots) -> Iterator[tuple[Any, Slots]]:
    """Those of a span's nodes that are these, by their keys as in `in_span`."""
    for key, alikes in _by_key(some, key_of):
        yield key, _together(alikes, span)


def walk(runs: Iterable[tuple[Any, Slots]], from_last: bool = False) -> Iterator[int]:
    """Nodes, run by run, in the order in which they came."""
    return chain.from_iterable(each_from_last(slots) if from_last else each(slots) for _, slots in runs)


def _bounded(
    room: CapacityIndex, query: FeasibilityQuery, widest: LocalityLevel, single: Single
) -> Iterator[list[tuple[Any, Family]]]:
    """Families that host the gang, by their bounds; in parts of which each is better than all that follow."""
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
    """Nodes of a span by how many tasks of the one role they have room for, those with equal room by their keys. Keys
    are not asked for before it comes to their nodes."""
    span = room.span(level, number)
    # Of the whole cluster the index is shorter than the nodes are many, but only of those that have devices free.
    by_entry = level is LocalityLevel.CLUSTER and query.least_free
    for most, some in _by_room(room, query) if by_entry else _by_room_of_nodes(room, query, level, number):
        if any(key_of[alike] is not None for alike in some):
            yield most, _walk(some, key_of, span)


def _by_room_of_nodes(
    room: CapacityIndex, query: FeasibilityQuery, level: LocalityLevel, number: int
) -> Iterator[tuple[int, list[Alike]]]:
    """Node by node."""
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
    """Entry by entry."""
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
    """Each entry once."""
    different = set(entries.tolist()) if len(entries) <= _FEW else np.flatnonzero(np.bincount(entries)).tolist()
    every = room.entries.alikes
    return [every[number - 1] for number in different]


def _by_key(some: Iterable[Alike], key_of: dict[Alike, Any]) -> list[tuple[Any, list[Alike]]]:
    by_key: dict[Any, list[Alike]] = {}
    for alike in some:
        key = key_of[alike]
        if key is not None:
            by_key.setdefault(key, []).append(alike)
    return sorted(by_key.items(), key=itemgetter(0))


def _walk(some: Iterable[Alike], key_of: dict[Alike, Any], span: Slots) -> Iterator[int]:
    """Nodes by their keys, which are not compared before it comes to them."""
    for _, alikes in _by_key(some, key_of):
        yield from each(_together(alikes, span))


def _together(some: Sequence[Alike], span: Slots) -> Slots:
    return reduce(or_, [alike.slots for alike in some]) & span
