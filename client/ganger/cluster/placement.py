"""Candidate gangs for a shape in order of preference, or what blocks it; also the load mode, and gangs of another size.

Gandiva's Algorithm 1 (Xiao et al., OSDI 2018) on bitmaps: servers whose jobs have as many devices as this one, then
servers without jobs, then any free devices, also scattered. With two corrections: its test `height < 1` cannot hold for
a server that has an affinity, so it reads "has room for the gang"; and a gang larger than a server has a set of servers
as its unit. Within a class of servers the closest devices win, then the load: least in spread mode, best fit in pack
mode. A gang that grows takes the closest free devices; one that shrinks gives up those that lie apart from the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, TypedDict, Unpack

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ganger.cluster.blockers import blockers
from ganger.cluster.capacity_index import kept
from ganger.cluster.census import Census
from ganger.cluster.claims import make_claim, split_cores
from ganger.cluster.fit import demand, fit
from ganger.cluster.placement_search import PLENTY, evenly, fewest, greedily
from ganger.cluster.ranking import Ranking, best_first, classes, single_keys
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.cluster.scan import Scan
from ganger.cluster.scanned import Scanned
from ganger.cluster.view import LoadMode, View

# Racks or fabrics tried at one level before the next wider level; each costs a walk over its nodes.
_MOST_SPANS = 4
_WIDE: Final = (LocalityLevel.RACK, LocalityLevel.FABRIC, LocalityLevel.CLUSTER)


class PlacementAnswer(Struct, frozen=True, gc=False):
    """`candidates` in order of preference; without any, `refusals` with the true blocker first."""

    candidates: tuple[tuple[Claim, ...], ...]
    refusals: tuple[Refusal, ...] = ()


class Search(TypedDict, total=False):
    """How to look for places; what is not said is as in `_EVERYWHERE`."""

    # Seconds it has waited: while its patience lasts only what meets its wish is found.
    waited: float
    # None: the view's own.
    mode: LoadMode | None
    # Where its state is parked: the first candidate if it is free still.
    parked: Sequence[Claim]
    # Kept for it: tried next.
    reserved_nodes: Sequence[str]
    # Names of nodes not to use, and of those to choose from; None: all.
    avoid: Collection[str]
    only: Collection[str] | None
    # At most so many candidates.
    limit: int
    # False: all servers are alike, whatever their jobs' sizes.
    affinity: bool


_EVERYWHERE: Final[Search] = {
    "waited": 0.0,
    "mode": None,
    "parked": (),
    "reserved_nodes": (),
    "avoid": (),
    "only": None,
    "limit": 4,
    "affinity": True,
}


def candidates(view: View, shape: GangShape, **search: Unpack[Search]) -> PlacementAnswer:
    """Candidates for the gang, or why there is none.

    First where its state is parked, then the nodes reserved for it, then by Algorithm 1.
    """
    found = places(view, shape, **search)
    if found:
        return PlacementAnswer(found)
    how: Search = {**_EVERYWHERE, **search}
    avoid, only, widest = how["avoid"], how["only"], widest_now(shape, how["waited"])
    census = None if avoid or only is not None else _census(view, shape, widest)
    refusals = blockers(census or Scanned(Scan.of(view, shape, avoid, only), widest))
    if widest < shape.locality.widest:
        refusals = (_still_patient(shape, how["waited"], widest), *refusals)
    return PlacementAnswer((), refusals)


def places(view: View, shape: GangShape, **search: Unpack[Search]) -> tuple[tuple[Claim, ...], ...]:
    """Return the candidates alone, without refusals: finding what blocks a gang takes ten times as long."""
    how: Search = {**_EVERYWHERE, **search}
    parked, avoid, only = how["parked"], how["avoid"], how["only"]
    limit, affinity = how["limit"], how["affinity"]
    mode = how["mode"] or view.mode
    widest = widest_now(shape, how["waited"])
    found: list[tuple[Claim, ...]] = []
    if parked and not any(claim.node in avoid for claim in parked) and still_free(view, shape, parked):
        found.append(asked_for(parked))
    if how["reserved_nodes"] and only is None:
        reserved = Scan.of(view, shape, avoid, how["reserved_nodes"])
        found += _places(reserved, mode, widest, limit - len(found), affinity=False)
    everywhere = _kept_places(view, shape, mode, widest, limit, affinity, avoid) if only is None else None
    if everywhere is None:
        everywhere = _places(Scan.of(view, shape, avoid, only), mode, widest, limit, affinity)
    for claims in everywhere:
        if len(found) >= limit:
            break
        if claims not in found:
            found.append(claims)
    return tuple(found)


def widest_now(shape: GangShape, waited: float) -> LocalityLevel:
    """The widest level the gang takes after so many seconds: its wish while its patience lasts."""
    locality = shape.locality
    if locality.wish is not None and waited < locality.patience_seconds:
        return min(locality.wish, locality.widest)
    return locality.widest


def _kept_places(
    view: View,
    shape: GangShape,
    mode: LoadMode,
    widest: LocalityLevel,
    limit: int,
    affinity: bool,
    avoid: Collection[str],
) -> list[tuple[Claim, ...]] | None:
    """What `_places` finds, where what was found for others like it is kept; None where it is not."""
    found: list[tuple[Claim, ...]] = []
    if shape.nodes <= 1:
        key = (Ranking, shape, mode, widest, affinity)
        ranking = kept(view, key, lambda: Ranking(view, shape, mode, widest, affinity))
        if ranking is None:
            return None
        best = ranking.best(limit, [view.slots[name] for name in avoid if name in view.slots])
        found += [(claim,) for claim in best]
        if found or shape.nodes == 1 or shape.tasks <= 1 or widest < LocalityLevel.RACK:
            return found
        census = _census(view, shape, widest)
        if census is not None and not any(census.has_room(level) for level in _WIDE if level <= widest):
            return found
    scan = Scan.of(view, shape, avoid)
    return _over_nodes_within(scan, mode, widest, limit, affinity)


def _census(view: View, shape: GangShape, widest: LocalityLevel) -> Census | None:
    """None where none is kept."""
    if shape.nodes > 1:
        return None
    return kept(view, (Census, shape, widest), lambda: Census(view, shape, widest))


def _places(scan: Scan, mode: LoadMode, widest: LocalityLevel, limit: int, affinity: bool) -> list[tuple[Claim, ...]]:
    if limit <= 0:
        return []
    if scan.shape.nodes <= 1:
        slots = np.flatnonzero(scan.hosts(widest))
        best = best_first(slots, single_keys(scan, slots, mode, affinity), limit)
        found = list(_on_one_node(scan.view, scan.shape, best, mode, widest))
        if found or scan.shape.nodes == 1:
            return found
    return _over_nodes_within(scan, mode, widest, limit, affinity)


def _on_one_node(
    view: View, shape: GangShape, slots: Iterable[int], mode: LoadMode, widest: LocalityLevel
) -> Iterator[tuple[Claim, ...]]:
    everything = tuple([role.tasks for role in shape.roles])
    for slot in slots:
        claim = make_claim(view, slot, shape, everything, mode, widest)
        if claim is not None:
            yield (claim,)


def _over_nodes_within(
    scan: Scan, mode: LoadMode, widest: LocalityLevel, limit: int, affinity: bool
) -> list[tuple[Claim, ...]]:
    """Over several nodes, for when no single one does: the closer gang always wins."""
    if scan.shape.tasks <= 1 or widest < _WIDE[0]:
        return []
    roles = sorted(range(len(scan.shape.roles)), key=lambda index: -scan.shape.roles[index].shape.gpus)
    rooms = {index: scan.capacity(index) for index in roles}
    found = (_over_nodes(scan, rooms, mode, level, limit, affinity) for level in _WIDE if level <= widest)
    return next(filter(None, found), [])


def _over_nodes(
    scan: Scan, rooms: dict[int, NDArray[np.int64]], mode: LoadMode, level: LocalityLevel, limit: int, affinity: bool
) -> list[tuple[Claim, ...]]:
    """`rooms`: by role how many of its tasks each node could take, the role of most devices first."""
    roles = list(rooms)
    spans = scan.spans(level)
    if not spans.any():
        # No node is in any rack, or fabric.
        return []
    main = rooms[roles[0]]
    room = main
    if len(roles) > 1:
        # A node for the lesser roles alone comes after all that take the main one.
        room = main * PLENTY + np.minimum(sum(rooms[index] for index in roles[1:]), PLENTY - 1)
    found: list[tuple[Claim, ...]] = []
    for span in _fitting_spans(scan, rooms, spans)[: _MOST_SPANS if level < LocalityLevel.CLUSTER else 1]:
        slots = np.flatnonzero((spans == span) & (room > 0))
        # Servers of this affinity and idle ones first, as they keep the others' holes whole.
        lines = classes(scan, slots, affinity)
        for chosen in (slots[lines < 2], slots) if affinity else (slots,):
            claims = _fill(scan, chosen, main, room, mode)
            if claims is not None:
                found.append(claims)
                break
        if len(found) >= limit:
            break
    return found


def _fitting_spans(scan: Scan, rooms: dict[int, NDArray[np.int64]], spans: NDArray[np.int32]) -> list[int]:
    """Racks (fabrics, ...) with room for every role, the tightest first, so that large holes stay large."""
    count = int(spans.max(initial=0)) + 1
    enough = np.ones(count, np.bool_)
    tightness = np.zeros(count, np.float64)
    for index, room in rooms.items():
        tasks = scan.shape.roles[index].tasks
        total = np.bincount(spans, weights=np.minimum(room, tasks), minlength=count)
        enough &= total >= tasks
        tightness += total
    enough[0] = False
    fitting = np.flatnonzero(enough)
    return [int(span) for span in fitting[np.argsort(tightness[fitting], kind="stable")]]


def _fill(
    scan: Scan, slots: NDArray[np.intp], main: NDArray[np.int64], room: NDArray[np.int64], mode: LoadMode
) -> tuple[Claim, ...] | None:
    """The gang over these nodes: evenly over exactly so many, or over as few as will do."""
    order = slots[np.lexsort((slots, scan.columns.jobs[slots], -room[slots]))]
    shape = scan.shape
    if shape.nodes:
        share = -(-max(shape.roles, key=lambda role: role.shape.gpus).tasks // shape.nodes)
        roomy = order[main[order] >= share]
        # Packing uses the tightest nodes that will do, so that the roomy ones stay whole.
        even = evenly(scan.view, shape, (roomy if mode is LoadMode.SPREAD else roomy[::-1]).tolist(), mode)
        return even if even is not None else greedily(scan.view, shape, order.tolist(), mode)
    if len(shape.roles) == 1:
        rooms = main[order]
        edges = [0, *(np.flatnonzero(np.diff(rooms)) + 1).tolist(), order.size]
        runs = [(int(rooms[start]), iter(order[start:end].tolist())) for start, end in pairwise(edges) if start < end]
        return fewest(scan.view, shape, runs, mode)
    return greedily(scan.view, shape, order.tolist(), mode)


def still_free(view: View, shape: GangShape, parked: Sequence[Claim]) -> bool:
    """Whether a parked gang could go on where it is; its arenas, and the memory that it keeps, are its own still."""
    kept = [
        replace(
            claim,
            device_mask=0,
            millicores=(0,) * len(claim.millicores),
            tasks=(),
            memory_bytes=claim.parked_memory_bytes or claim.memory_bytes,
        )
        for claim in _known(view, parked)
    ]
    return not fit(view, shape, asked_for(parked), holding=kept)


def asked_for(parked: Sequence[Claim]) -> tuple[Claim, ...]:
    """What is parked, as a request has it."""
    return tuple(
        [
            replace(claim, parked_bytes=(), parked_memory_bytes=0)
            if claim.parked_bytes or claim.parked_memory_bytes
            else claim
            for claim in parked
        ]
    )


def _known(view: View, claims: Iterable[Claim]) -> Iterator[Claim]:
    return (claim for claim in claims if claim.node in view)


def _still_patient(shape: GangShape, waited: float, widest: LocalityLevel) -> Refusal:
    left = shape.locality.patience_seconds - waited
    return Refusal(
        Reason.LOCALITY,
        {"wish": int(widest), "widest": int(shape.locality.widest), "patience_left_seconds": int(left)},
        detail=f"waits for {widest.name} before it takes {shape.locality.widest.name}",
    )


# Pack from here on, to keep holes for large gangs; spread again below the lower one. The gap keeps the coming and
# going of gangs from flipping the mode: on 512 devices that gangs of one to eight come to at random, the load scatters
# by 7 %, and over a day that rises to 0.9 and falls again a gap of 0.2 flips back now and then, one of 0.3 does not.
# The values are ours: the paper that proposes the switch gives none.
_PACK_FROM = 0.7
_SPREAD_BELOW = 0.4


def choose_mode(previous: LoadMode, held: int, total: int) -> LoadMode:
    """`held` of `total` devices belong to gangs. In between the previous mode stays."""
    load = held / total if total else 0.0
    if load >= _PACK_FROM:
        return LoadMode.PACK
    if load < _SPREAD_BELOW:
        return LoadMode.SPREAD
    return previous


def resized(
    view: View, shape: GangShape, held: Sequence[Claim], one_node_only: bool = False
) -> tuple[Claim, ...] | None:
    """Claims for a gang of one role that holds `held` and is to have the shape's number of devices; None if there is no
    room. Its own pieces count as free. Nodes it has stay in their order, so that rank 0 stays where it is; others
    follow (unless `one_node_only`), those with the most free devices first."""
    if any(claim.node not in view for claim in held):
        # The node was removed: the gang has lost a part and cannot run anywhere as it is.
        return None
    role = shape.roles[0]
    each = role.shape.gpus
    missing = shape.gpus - sum([claim.device_mask.bit_count() for claim in held])
    if missing < 0:
        masks = _without(view, held, -missing, each)
    else:
        masks = _with(view, shape, held, missing, each, one_node_only)
    if masks is None:
        return None
    own = {claim.node: claim for claim in held}
    claims = [_claim(view, shape, node, mask, own.get(node)) for node, mask in masks.items() if mask]
    found = tuple([claim for claim in claims if claim is not None])
    return found if len(found) == len(claims) else None


def beside(claim: Claim, held: Claim | None) -> Claim:
    """What of a claim is not held already, piece by piece: together they are the larger of the two, not their sum."""
    if held is None:
        return claim
    held_cores = held.millicores or (0,) * len(claim.millicores)
    return Claim(
        claim.node,
        claim.device_mask & ~held.device_mask,
        tuple([max(0, one - other) for one, other in zip(claim.millicores, held_cores, strict=True)]),
        max(0, claim.memory_bytes - held.memory_bytes),
        max(0, claim.arena_bytes - held.arena_bytes),
        claim.tasks,
        claim.parked_bytes,
    )


def _without(view: View, held: Sequence[Claim], given: int, each: int) -> dict[str, int] | None:
    """Whole tasks go: on the node with the fewest devices first, and of equals on the last one."""
    masks = {claim.node: claim.device_mask for claim in held}
    places = range(len(held))
    for place in sorted(places, key=lambda place: (held[place].device_mask.bit_count(), -place)):
        claim = held[place]
        devices = claim.device_mask.bit_count()
        count = min(given, devices)
        stays = view.topology(claim.node).best(claim.device_mask, devices - count) if devices > count else 0
        if count % each or stays is None:
            return None
        masks[claim.node] = stays
        given -= count
    return masks


def _with(
    view: View, shape: GangShape, held: Sequence[Claim], missing: int, each: int, one_node_only: bool
) -> dict[str, int] | None:
    masks = {claim.node: claim.device_mask for claim in held}
    own = sorted(masks, key=lambda node: -masks[node].bit_count())
    others: list[str] = []
    if missing and not one_node_only:
        free = [(-view.free[slot].bit_count(), name) for name, slot in view.slots.items() if name not in masks]
        others = [name for devices, name in sorted(free) if devices]
    for node in (*own, *others):
        slot = view.slots.get(node)
        if slot is None or not view.available[slot] or not missing:
            continue
        configuration_set = view.topologies[slot].configuration_set
        if shape.device_type and configuration_set.device_type != shape.device_type:
            continue
        free_mask = view.free[slot]
        if shape.device_memory_bytes:
            free_mask &= view.roomy(slot, shape.device_memory_bytes)
        count = min(missing, free_mask.bit_count()) // each * each
        mask = view.topologies[slot].best(free_mask, count) if count else None
        if mask:
            masks[node] = masks.get(node, 0) | mask
            missing -= count
    return masks if not missing else None


def _claim(view: View, shape: GangShape, node: str, mask: int, own: Claim | None) -> Claim | None:
    """Of cores as much as it asks for, or as its tasks there have now if that is not free; arenas if they fit."""
    slot = view.slots[node]
    tasks = mask.bit_count() // shape.roles[0].shape.gpus
    needed = demand(view.topologies[slot].configuration_set, shape, (tasks,))
    free: Sequence[int] = view.millicores[slot]
    memory = view.memory[slot]
    if own is not None:
        free = [have + held for have, held in zip(free, own.millicores, strict=True)]
        memory += own.memory_bytes + own.arena_bytes
    cores = split_cores(view.topologies[slot], free, mask, needed.millicores)
    if cores is None and own is not None and own.tasks:
        cores = split_cores(view.topologies[slot], free, mask, sum(own.millicores) // own.tasks[0] * tasks)
    if cores is None or memory < needed.memory_bytes:
        return None
    arena = needed.arena_bytes if memory >= needed.memory_bytes + needed.arena_bytes else 0
    return Claim(node, mask, cores, needed.memory_bytes, arena, (tasks,))
