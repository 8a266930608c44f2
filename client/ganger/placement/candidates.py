"""Where a gang could go: candidate gangs in order of preference, or what stands in the way.

Gandiva's Algorithm 1 (Xiao et al., OSDI 2018) on bitmaps: servers whose jobs have as many devices as this one, then
servers without jobs, then any free devices, also scattered. With two corrections: its test `height < 1` cannot hold for
a server that has an affinity, so it reads "has room for the gang"; and a gang larger than a server has a set of servers
as its unit. Within a class of servers the closest devices win, then the load: least when spreading, best fit when
packing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, TypedDict, Unpack

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ganger.placement.blockers import blockers
from ganger.placement.claims import make_claim
from ganger.placement.filling import evenly, fewest, greedily
from ganger.placement.scan import PLENTY, Scan
from ganger.resources.fit import fit
from ganger.resources.reasons import Reason, Refusal
from ganger.resources.values import Claim, GangShape, Level
from ganger.resources.view import Mode, View

# Racks or fabrics tried at one level before the next wider level; each costs a walk over its nodes.
_MOST_SPANS = 4
_SLOT_BITS = 20


class Placement(Struct, frozen=True, gc=False):
    """`candidates` in order of preference; without any, `refusals` with the true blocker first.

    `share_with`: the least loaded node whose devices a time slice could share (the last line of Algorithm 1), if any.
    """

    candidates: tuple[tuple[Claim, ...], ...]
    refusals: tuple[Refusal, ...] = ()
    share_with: str = ""


class Search(TypedDict, total=False):
    """How to look for places; what is not said is as in `_EVERYWHERE`."""

    # Seconds it has waited: while its patience lasts only what meets its wish is found.
    waited: float
    # None: the view's own.
    mode: Mode | None
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


def candidates(view: View, shape: GangShape, **search: Unpack[Search]) -> Placement:
    """Candidates for the gang, or why there is none.

    First where its state is parked, then the nodes reserved for it, then by Algorithm 1.
    """
    found = places(view, shape, **search)
    if found:
        return Placement(found)
    how: Search = {**_EVERYWHERE, **search}
    scan, widest = Scan.of(view, shape, how["avoid"], how["only"]), widest_now(shape, how["waited"])
    refusals = blockers(scan, widest)
    if widest < shape.locality.widest:
        refusals = (_still_patient(shape, how["waited"], widest), *refusals)
    return Placement((), refusals, _share_with(scan))


def places(view: View, shape: GangShape, **search: Unpack[Search]) -> tuple[tuple[Claim, ...], ...]:
    """The candidates alone, for who does not ask why: what stands in the way takes ten times as long to find."""
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
    for claims in _places(Scan.of(view, shape, avoid, only), mode, widest, limit, affinity):
        if len(found) >= limit:
            break
        if claims not in found:
            found.append(claims)
    return tuple(found)


def widest_now(shape: GangShape, waited: float) -> Level:
    """The widest level the gang takes after so many seconds: its wish while its patience lasts."""
    locality = shape.locality
    if locality.wish is not None and waited < locality.patience_seconds:
        return min(locality.wish, locality.widest)
    return locality.widest


def _places(scan: Scan, mode: Mode, widest: Level, limit: int, affinity: bool) -> list[tuple[Claim, ...]]:
    found: list[tuple[Claim, ...]] = []
    if limit <= 0:
        return found
    if scan.shape.nodes <= 1:
        found += _on_one_node(scan, mode, widest, limit, affinity)
    # Over several nodes only when no single one does: the closer gang always wins.
    for level in (Level.RACK, Level.FABRIC, Level.CLUSTER):
        if not found and level <= widest and scan.shape.nodes != 1 and scan.shape.tasks > 1:
            found += _over_nodes(scan, mode, level, limit, affinity)
    return found


def _on_one_node(scan: Scan, mode: Mode, widest: Level, limit: int, affinity: bool) -> Iterator[tuple[Claim, ...]]:
    slots = np.flatnonzero(scan.hosts(widest))
    everything = tuple(role.tasks for role in scan.shape.roles)
    for slot in _best_first(slots, _single_keys(scan, slots, mode, affinity), limit):
        claim = make_claim(scan.view, slot, scan.shape, everything, mode, widest)
        if claim is not None:
            yield (claim,)


def _single_keys(scan: Scan, slots: NDArray[np.intp], mode: Mode, affinity: bool) -> NDArray[np.int64]:
    """Smaller is better: class of Algorithm 1, level, load."""
    columns, gpus = scan.columns, scan.shape.gpus
    jobs = np.minimum(columns.jobs[slots], 255)
    if not gpus:
        # Cores beside devices are left to gangs that use the devices.
        devices = scan.device_counts[slots]
        cores = np.minimum(columns.millicores[slots] // 1000, 4095)
        load = (jobs << 12) + 4095 - cores if mode is Mode.SPREAD else cores
        return (devices << 24) + load
    left = scan.free_devices[slots] - gpus
    load = (63 - left << 8) + jobs if mode is Mode.SPREAD else (left << 8) + jobs
    levels = scan.closest(gpus)[slots].astype(np.int64)
    return ((_classes(scan, slots, affinity) * 16 + levels) << 16) + load


def _classes(scan: Scan, slots: NDArray[np.intp], affinity: bool) -> NDArray[np.int64]:
    """Lines of Algorithm 1: 0 the same affinity, 1 no jobs yet, 2 any."""
    if not affinity:
        return np.zeros(slots.size, np.int64)
    has = scan.columns.affinity[slots]
    return np.where(has == scan.shape.gpus, 0, np.where(has == 0, 1, 2)).astype(np.int64)


def _best_first(slots: NDArray[np.intp], keys: NDArray[np.int64], limit: int) -> list[int]:
    """The slots with the smallest keys, ties in the order in which nodes came."""
    whole = (keys << _SLOT_BITS) | slots
    if whole.size > limit:
        whole = np.partition(whole, limit - 1)[:limit]
    return [int(key) & ((1 << _SLOT_BITS) - 1) for key in np.sort(whole)]


def _over_nodes(scan: Scan, mode: Mode, level: Level, limit: int, affinity: bool) -> list[tuple[Claim, ...]]:
    roles = sorted(range(len(scan.shape.roles)), key=lambda index: -scan.shape.roles[index].shape.gpus)
    rooms = {index: scan.capacity(index) for index in roles}
    main = rooms[roles[0]]
    room = main
    if len(roles) > 1:
        # A node for the lesser roles alone comes after all that take the main one.
        room = main * PLENTY + np.minimum(sum(rooms[index] for index in roles[1:]), PLENTY - 1)
    spans = scan.spans(level)
    found: list[tuple[Claim, ...]] = []
    for span in _fitting_spans(scan, rooms, spans)[: _MOST_SPANS if level < Level.CLUSTER else 1]:
        slots = np.flatnonzero((spans == span) & (room > 0))
        # Servers of this affinity and idle ones first, as they keep the others' holes whole.
        classes = _classes(scan, slots, affinity)
        for chosen in (slots[classes < 2], slots) if affinity else (slots,):
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
    scan: Scan, slots: NDArray[np.intp], main: NDArray[np.int64], room: NDArray[np.int64], mode: Mode
) -> tuple[Claim, ...] | None:
    """The gang over these nodes: evenly over exactly so many, or over as few as will do."""
    order = slots[np.lexsort((slots, scan.columns.jobs[slots], -room[slots]))]
    shape = scan.shape
    if shape.nodes:
        share = -(-max(shape.roles, key=lambda role: role.shape.gpus).tasks // shape.nodes)
        roomy = order[main[order] >= share]
        # Packing uses the tightest nodes that will do, so that the roomy ones stay whole.
        even = evenly(scan.view, shape, (roomy if mode is Mode.SPREAD else roomy[::-1]).tolist(), mode)
        return even if even is not None else greedily(scan.view, shape, order.tolist(), mode)
    if len(shape.roles) == 1:
        rooms = main[order]
        edges = [0, *(np.flatnonzero(np.diff(rooms)) + 1).tolist(), order.size]
        runs = [(int(rooms[start]), iter(order[start:end].tolist())) for start, end in pairwise(edges) if start < end]
        return fewest(scan.view, shape, runs, mode)
    return greedily(scan.view, shape, order.tolist(), mode)


def still_free(view: View, shape: GangShape, parked: Sequence[Claim]) -> bool:
    """Whether a parked gang could go on where it is; its memory and arenas are its own still."""
    kept = [
        replace(claim, device_mask=0, millicores=(0,) * len(claim.millicores), tasks=())
        for claim in _known(view, parked)
    ]
    return not fit(view, shape, asked_for(parked), holding=kept)


def asked_for(parked: Sequence[Claim]) -> tuple[Claim, ...]:
    """What is parked, as a request has it."""
    return tuple([replace(claim, parked_bytes=()) if claim.parked_bytes else claim for claim in parked])


def _known(view: View, claims: Iterable[Claim]) -> Iterator[Claim]:
    return (claim for claim in claims if claim.node in view)


def _still_patient(shape: GangShape, waited: float, widest: Level) -> Refusal:
    left = shape.locality.patience_seconds - waited
    return Refusal(
        Reason.LOCALITY,
        {"wish": int(widest), "widest": int(shape.locality.widest), "patience_left_seconds": int(left)},
        detail=f"waits for {widest.name} before it takes {shape.locality.widest.name}",
    )


def _share_with(scan: Scan) -> str:
    """The least loaded node of this affinity that could take the gang if devices were shared."""
    gpus = scan.shape.gpus
    if not gpus:
        return ""
    hosts = scan.hosts(Level.NODE, (Reason.GPUS, Reason.CORES, Reason.MEMORY, Reason.LOCALITY))
    slots = np.flatnonzero(hosts & (scan.columns.affinity[: scan.size] == gpus))
    if not slots.size:
        return ""
    load = [sum(scan.view.device_rows[slot]) / max(1, scan.view.topologies[slot].devices) for slot in slots]
    return scan.view.nodes[int(slots[int(np.argmin(load))])]
