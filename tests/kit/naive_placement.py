"""Placement by looking at every node for every question: slow, short, and the measure of the capacity index.

Nothing here is shared with the engine but claims on one node, and the filling of nodes in a given order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from ganger.cluster.claims import PLENTY, evenly, fewest, greedily, make_claim
from ganger.cluster.fit import Demand, demand
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim, GangShape, LocalityLevel
from ganger.cluster.view import LoadMode, View

_WIDE = (LocalityLevel.RACK, LocalityLevel.FABRIC, LocalityLevel.CLUSTER)
CONSTRAINTS = (
    *(Reason.GPUS, Reason.DEVICE_MEMORY, Reason.CORES, Reason.MEMORY),
    *(Reason.DISK, Reason.NETWORK, Reason.LOCALITY),
)
Claims = tuple[Claim, ...]


def usable(view: View, avoid: Collection[str] = ()) -> list[int]:
    return [slot for slot, name in enumerate(view.nodes) if view.available[slot] and name not in avoid]


def takable(view: View, slot: int, shape: GangShape, relaxed: Collection[Reason] = ()) -> int:
    """The devices of a node that the gang could take."""
    topology = view.topologies[slot]
    if shape.gpus and shape.device_type not in ("", topology.configuration_set.device_type):
        return 0
    mask = topology.all_mask if Reason.GPUS in relaxed else view.free[slot]
    return mask if Reason.DEVICE_MEMORY in relaxed else mask & view.roomy(slot, shape.device_memory_bytes)


def level(view: View, slot: int, shape: GangShape, relaxed: Collection[Reason] = ()) -> int:
    """The level of the closest devices of a node for the whole gang."""
    return view.topologies[slot].closest(takable(view, slot, shape, relaxed), shape.gpus) if shape.gpus else 1


def hosts_whole(
    view: View, slot: int, shape: GangShape, widest: LocalityLevel, relaxed: Collection[Reason] = ()
) -> bool:
    needed = demand(view.topologies[slot].configuration_set, shape, tuple(role.tasks for role in shape.roles))
    within = LocalityLevel.NODE if Reason.LOCALITY in relaxed else min(widest, LocalityLevel.NODE)
    return (
        level(view, slot, shape, relaxed) <= within
        and (Reason.CORES in relaxed or sum(view.millicores[slot]) >= needed.millicores)
        and (Reason.MEMORY in relaxed or view.memory[slot] >= needed.memory_bytes)
        and all(wanted <= free for wanted, free in _bandwidths(view, slot, needed, relaxed))
    )


def _bandwidths(view: View, slot: int, needed: Demand, relaxed: Collection[Reason]) -> list[tuple[int, int]]:
    """What is wanted and what is free, of each dimension that the node limits."""
    free = view.bandwidth.get(slot, ())
    pairs = zip((Reason.DISK, Reason.NETWORK), needed.bandwidth, free, strict=False)
    return [(wanted, left) for reason, wanted, left in pairs if reason not in relaxed]


def hosts(view: View, shape: GangShape, widest: LocalityLevel, avoid: Collection[str] = ()) -> list[int]:
    """Nodes that hold the whole gang."""
    return [slot for slot in usable(view, avoid) if hosts_whole(view, slot, shape, widest)]


def room(view: View, slot: int, shape: GangShape, role: int, relaxed: Collection[Reason] = ()) -> int:
    """How many tasks of one role a node could take, were it asked for nothing else."""
    one = tuple(int(other == role) for other in range(len(shape.roles)))
    needed = demand(view.topologies[slot].configuration_set, shape, one)
    found = PLENTY
    if needed.gpus:
        found = min(found, takable(view, slot, shape, relaxed).bit_count() // needed.gpus)
    if needed.millicores and Reason.CORES not in relaxed:
        found = min(found, sum(view.millicores[slot]) // needed.millicores)
    if needed.memory_bytes and Reason.MEMORY not in relaxed:
        found = min(found, view.memory[slot] // needed.memory_bytes)
    for wanted, left in _bandwidths(view, slot, needed, relaxed):
        found = min(found, left // wanted) if wanted else found
    return found


def by_weight(shape: GangShape) -> list[int]:
    """Roles, those whose tasks have the most devices first."""
    return sorted(range(len(shape.roles)), key=lambda role: -shape.roles[role].shape.gpus)


def spread_room(view: View, slot: int, shape: GangShape) -> int:
    """Tasks of the heaviest role that a node could take; among equals, those of the others."""
    first, *others = by_weight(shape)
    found = room(view, slot, shape, first)
    if others:
        found = found * PLENTY + min(sum(room(view, slot, shape, role) for role in others), PLENTY - 1)
    return found


def spans(view: View, slots: Sequence[int], wide: LocalityLevel) -> list[list[int]]:
    """Nodes by rack, fabric or cluster, in the order in which the first node of each came."""
    found: dict[tuple[str, ...], list[int]] = {}
    for slot, name in enumerate(view.nodes):
        if name:
            rack, fabric = view.racks[slot], view.fabrics[slot]
            named = {LocalityLevel.RACK: rack, LocalityLevel.FABRIC: fabric, LocalityLevel.CLUSTER: name}[wide]
            key = {LocalityLevel.RACK: (fabric, rack), LocalityLevel.FABRIC: (fabric,)}.get(wide, ())
            if named:
                found.setdefault(key, [])
                if slot in slots:
                    found[key].append(slot)
    return list(found.values())


Key = Callable[[int], Any]


def on_single_nodes(view: View, shape: GangShape, widest: LocalityLevel, key: Key, mode: LoadMode) -> list[Claims]:
    """The whole gang on each node that holds it, smallest key first."""
    if shape.nodes > 1:
        return []
    everything = tuple(role.tasks for role in shape.roles)
    found = [
        make_claim(view, slot, shape, everything, mode, widest)
        for slot in sorted(hosts(view, shape, widest), key=lambda slot: (key(slot), slot))
    ]
    return [(claim,) for claim in found if claim is not None]


def span_totals(view: View, shape: GangShape, span: Sequence[int]) -> list[int]:
    """By role: how many of its tasks the nodes could take, counted one by one."""
    return [sum(min(room(view, slot, shape, at), role.tasks) for slot in span) for at, role in enumerate(shape.roles)]


def over_nodes(
    view: View,
    shape: GangShape,
    widest: LocalityLevel,
    key: Key,
    mode: LoadMode = LoadMode.PACK,
    tries: Sequence[Callable[[int], bool]] = (lambda slot: True,),
    closest_first: bool = True,
    most_spans: int | None = 4,
) -> list[Claims]:
    if shape.nodes == 1 or shape.tasks <= 1 or widest < LocalityLevel.RACK:
        return []
    for wide in _WIDE if closest_first else (widest,):
        if wide > widest:
            break
        fitting = []
        for span in spans(view, usable(view), wide):
            totals = [
                sum(min(room(view, slot, shape, at), role.tasks) for slot in span)
                for at, role in enumerate(shape.roles)
            ]
            if all(total >= role.tasks for total, role in zip(totals, shape.roles, strict=True)):
                fitting.append((sum(totals), span))
        if closest_first:
            fitting.sort(key=itemgetter(0))
        found = []
        for _, span in fitting[: None if wide is LocalityLevel.CLUSTER else most_spans]:
            filled = (fill(view, shape, [slot for slot in span if accepts(slot)], key, mode) for accepts in tries)
            found += [claims for claims in filled if claims is not None][:1]
        if found:
            return found
    return []


def fill(view: View, shape: GangShape, slots: Sequence[int], key: Key, mode: LoadMode) -> Claims | None:
    """The gang over these nodes: evenly over exactly so many, or over as few as will do."""
    rooms = {slot: spread_room(view, slot, shape) for slot in slots}
    order = sorted((slot for slot in slots if rooms[slot]), key=lambda slot: (-rooms[slot], key(slot), slot))
    if shape.nodes:
        share = -(-shape.roles[by_weight(shape)[0]].tasks // shape.nodes) * (PLENTY if len(shape.roles) > 1 else 1)
        roomy = [slot for slot in order if rooms[slot] >= share]
        even = evenly(view, shape, roomy if mode is LoadMode.SPREAD else roomy[::-1], mode)
        return even if even is not None else greedily(view, shape, order, mode)
    if len(shape.roles) > 1:
        return greedily(view, shape, order, mode)
    runs: Iterator[tuple[int, Iterator[int]]] = (
        (most, iter(list(some))) for most, some in groupby(order, key=lambda slot: rooms[slot])
    )
    return fewest(view, shape, runs, mode)


def _first_fit(view: View, shape: GangShape, widest: LocalityLevel) -> list[Claims]:
    single = on_single_nodes(view, shape, widest, lambda slot: 0, LoadMode.PACK)
    return single or over_nodes(view, shape, widest, lambda slot: 0, closest_first=False, most_spans=None)


def _cut(view: View, slot: int, shape: GangShape) -> tuple[int, int]:
    topology = view.topologies[slot]
    if not shape.gpus:
        return (view.free[slot].bit_count(), topology.devices)
    free = takable(view, slot, shape)
    mask = topology.best(free, shape.gpus) or 0
    beside = sum((free & ~mask & circle).bit_count() for circle in topology.circles if circle & mask)
    return (free.bit_count() - shape.gpus, beside)


def _rest(view: View, slot: int) -> tuple[int, int]:
    return (sum(view.millicores[slot]), view.memory[slot])


def _best_fit(view: View, shape: GangShape, widest: LocalityLevel, by_level: bool = False) -> list[Claims]:
    def key(slot: int) -> Any:
        return (level(view, slot, shape) if by_level else 0, _cut(view, slot, shape), _rest(view, slot))

    def least(slot: int) -> Any:
        return (_free(view, slot, shape), _rest(view, slot))

    single = on_single_nodes(view, shape, widest, key, LoadMode.PACK)
    return single or over_nodes(view, shape, widest, least, most_spans=None if by_level else 4)


def _adaptive(view: View, shape: GangShape, widest: LocalityLevel) -> list[Claims]:
    if view.mode is LoadMode.PACK:
        return _best_fit(view, shape, widest)

    def key(slot: int) -> Any:
        jobs, cores = min(sum(view.socket_jobs[slot]), 255), min(sum(view.millicores[slot]) // 1000, 4095)
        if not shape.gpus:
            return (view.topologies[slot].devices, jobs, -cores)
        return (level(view, slot, shape), -_free(view, slot, shape), jobs)

    def least(slot: int) -> Any:
        return (_free(view, slot, shape), _rest(view, slot))

    return on_single_nodes(view, shape, widest, key, LoadMode.SPREAD) or over_nodes(view, shape, widest, least)


def _locality(view: View, shape: GangShape, widest: LocalityLevel) -> list[Claims]:
    return _best_fit(view, shape, widest, by_level=True)


def _free(view: View, slot: int, shape: GangShape) -> int:
    """Devices free on a node that have enough memory left, of whatever type."""
    return (view.free[slot] & view.roomy(slot, shape.device_memory_bytes)).bit_count()


def _line(view: View, slot: int, shape: GangShape) -> int:
    return 0 if view.affinity[slot] == shape.gpus else 2 if view.affinity[slot] else 1


def _gandiva(view: View, shape: GangShape, widest: LocalityLevel) -> list[Claims]:
    mode = view.mode

    def key(slot: int) -> Any:
        jobs, cores = min(sum(view.socket_jobs[slot]), 255), min(sum(view.millicores[slot]) // 1000, 4095)
        if not shape.gpus:
            load = (jobs, -cores) if mode is LoadMode.SPREAD else (cores,)
            return (view.topologies[slot].devices, *load)
        left = _free(view, slot, shape)
        return (_line(view, slot, shape), level(view, slot, shape), -left if mode is LoadMode.SPREAD else left, jobs)

    single = on_single_nodes(view, shape, widest, key, mode)
    tries = (lambda slot: _line(view, slot, shape) < 2, lambda slot: True)
    return single or over_nodes(view, shape, widest, lambda slot: sum(view.socket_jobs[slot]), mode, tries)


def _anywhere(view: View, shape: GangShape, widest: LocalityLevel) -> list[Claims]:
    if widest <= LocalityLevel.NODE or shape.tasks == 1 or shape.nodes == 1:
        return on_single_nodes(view, shape, widest, lambda slot: 0, LoadMode.PACK)
    found = []
    for span in spans(view, usable(view), widest):
        rooms = {slot: spread_room(view, slot, shape) for slot in span}
        totals = [
            sum(min(room(view, slot, shape, at), role.tasks) for slot in span) for at, role in enumerate(shape.roles)
        ]
        if any(total < role.tasks for total, role in zip(totals, shape.roles, strict=True)):
            continue
        slots = [slot for slot in span if rooms[slot]]
        claims = evenly(view, shape, slots, LoadMode.PACK) if shape.nodes else None
        claims = claims or greedily(view, shape, slots, LoadMode.PACK)
        found += [claims] if claims else []
    return found


# By preference: all candidates, the best first.
candidates_by: Mapping[str, Callable[[View, GangShape, LocalityLevel], list[Claims]]] = {
    "first-fit": _first_fit,
    "best-fit": _best_fit,
    "adaptive": _adaptive,
    "locality": _locality,
    "gandiva": _gandiva,
    "anywhere": _anywhere,
}


def is_enough(
    view: View, shape: GangShape, widest: LocalityLevel, slots: Sequence[int], relaxed: Collection[Reason] = ()
) -> bool:
    """Whether there is room by sums on these nodes without some constraints."""
    if shape.nodes <= 1 and any(hosts_whole(view, slot, shape, widest, relaxed) for slot in slots):
        return True
    widest = LocalityLevel.CLUSTER if Reason.LOCALITY in relaxed else widest
    if shape.nodes == 1:
        return False
    return any(
        _holds(view, shape, span, relaxed) for wide in _WIDE if wide <= widest for span in spans(view, slots, wide)
    )


def _holds(view: View, shape: GangShape, span: Sequence[int], relaxed: Collection[Reason]) -> bool:
    for at, role in enumerate(shape.roles):
        rooms = sorted((room(view, slot, shape, at, relaxed) for slot in span), reverse=True)
        if not shape.nodes:
            if sum(min(tasks, role.tasks) for tasks in rooms) < role.tasks:
                return False
            continue
        best = rooms[: shape.nodes]
        if len(best) < shape.nodes or sum(best) < role.tasks or (role.tasks >= shape.nodes and not all(best)):
            return False
    return True


def blocking_reasons(view: View, shape: GangShape, widest: LocalityLevel, avoid: Collection[str]) -> list[Reason]:
    """The reasons of `blockers`, in their order."""
    named = [slot for slot, name in enumerate(view.nodes) if name]
    some = usable(view, avoid)

    def is_typed(slot: int) -> bool:
        of = view.topologies[slot].configuration_set
        return not shape.gpus or (of.devices > 0 and shape.device_type in ("", of.device_type))

    def lacking() -> list[Reason]:
        names_bandwidth = any(role.shape.bandwidth for role in shape.roles)
        counted = [one for one in CONSTRAINTS if names_bandwidth or one not in (Reason.DISK, Reason.NETWORK)]
        alone = [one for one in counted if is_enough(view, shape, widest, some, {one})]
        short = [one for one in counted if not is_enough(view, shape, widest, some, {*CONSTRAINTS} - {one})]
        return alone or short or [Reason.GPUS if shape.gpus else Reason.CORES]

    if not any(is_typed(slot) for slot in named):
        return [Reason.DEVICE_TYPE]
    could_hold = is_enough(view, shape, widest, some, CONSTRAINTS)
    if is_enough(view, shape, widest, named):
        other_types = shape.device_type and some and not any(is_typed(slot) for slot in some)
        lacks = lacking() if some and could_hold else []
        return [*([Reason.DEVICE_TYPE] if other_types else []), *lacks, Reason.NODE_UNAVAILABLE]
    out_of_service = len(some) < len(named) and not could_hold
    return [*([Reason.NODE_UNAVAILABLE] if out_of_service else []), *lacking()]


def figures(
    view: View, shape: GangShape, widest: LocalityLevel, avoid: Collection[str]
) -> dict[Reason, dict[str, int]]:
    """What `blockers` counts for each constraint."""
    everything = tuple(role.tasks for role in shape.roles)
    typed = []
    for slot in usable(view, avoid):
        of = view.topologies[slot].configuration_set
        if not shape.gpus or (of.devices > 0 and shape.device_type in ("", of.device_type)):
            typed.append(slot)
    fewest_devices = min(role.shape.gpus for role in shape.roles)
    beside = [slot for slot in typed if _free(view, slot, shape) >= fewest_devices]
    needs = [demand(view.topologies[slot].configuration_set, shape, everything) for slot in typed]
    free = [view.free[slot].bit_count() for slot in typed]
    masks = [view.free[slot] & view.roomy(slot, shape.device_memory_bytes) for slot in typed]
    near = [
        view.topologies[slot].largest(mask, min(widest, LocalityLevel.NODE))
        for slot, mask in zip(typed, masks, strict=True)
    ]
    left = [
        size
        for slot in typed
        for device, size in enumerate(view.device_memory_left(slot))
        if view.free[slot] >> device & 1
    ]
    cores, memory = [sum(view.millicores[slot]) for slot in beside], [view.memory[slot] for slot in beside]
    return {
        Reason.GPUS: {"needed": shape.gpus, "free": sum(free), "largest_free": max(free, default=0)},
        Reason.LOCALITY: {"needed": shape.gpus, "widest": int(widest), "largest_free": max(near, default=0)},
        Reason.CORES: {
            "needed_millicores": min((need.millicores for need in needs), default=0),
            "free_millicores": sum(cores),
            "largest_free_millicores": max(cores, default=0),
        },
        Reason.MEMORY: {
            "needed_bytes": min((need.memory_bytes for need in needs), default=0),
            "free_bytes": sum(memory),
            "largest_free_bytes": max(memory, default=0),
        },
        **{
            reason: {
                "needed_mb_per_s": min((need.bandwidth[at] for need in needs if need.bandwidth), default=0),
                "free_mb_per_s": sum(view.bandwidth[slot][at] for slot in beside if slot in view.bandwidth),
                "largest_free_mb_per_s": max(
                    (view.bandwidth[slot][at] for slot in beside if slot in view.bandwidth), default=0
                ),
            }
            for at, reason in enumerate((Reason.DISK, Reason.NETWORK))
        },
        Reason.DEVICE_MEMORY: {
            "devices": shape.gpus,
            "devices_with_room": sum(_free(view, slot, shape) for slot in typed),
            "needed_bytes": shape.device_memory_bytes,
            "largest_free_bytes": max(left, default=0),
        },
    }
