"""Candidate gangs for a request in order of preference, or what blocks it; the load mode; and gangs of another size.

A gang that grows takes the closest free devices; one that shrinks gives up those that lie apart from the rest. A gang
that not even the idle cluster could hold is refused, with the largest of its kind that could be held.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

from msgspec import Struct
from msgspec.structs import replace

from ganger.cluster.blockers import blockers
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import split_cores
from ganger.cluster.fit import demand
from ganger.cluster.preferences import BEST_FIT, GANDIVA
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, GangShape, exceeds, less_bandwidth, more_bandwidth
from ganger.cluster.search import PlacementPreference, PlacementRequest
from ganger.cluster.view import LoadMode, View


class PlacementAnswer(Struct, frozen=True, gc=False):
    """`candidates` in order of preference; without any, `refusals` with the true blocker first."""

    candidates: tuple[tuple[Claim, ...], ...]
    refusals: tuple[Refusal, ...] = ()


def place(
    index: CapacityIndex, request: PlacementRequest, preference: PlacementPreference = GANDIVA
) -> PlacementAnswer:
    """Candidates for the gang, or why there is none."""
    found = preference.places(index, request)
    return PlacementAnswer(tuple(found)) if found else PlacementAnswer((), blockers(index, request))


def candidates(
    view: View,
    shape: GangShape,
    *,
    waited_s: float = 0.0,
    parked: Sequence[Claim] = (),
    kept_nodes: Collection[str] = (),
    avoid: Collection[str] = (),
    only: Collection[str] | None = None,
    limit: int = 4,
) -> PlacementAnswer:
    """Return the placements that the default scheduler finds for a gang in a view, by Algorithm 1."""
    request = PlacementRequest(
        shape,
        waited_s,
        tuple(parked),
        frozenset(kept_nodes),
        frozenset(avoid),
        only if only is None else frozenset(only),
        limit,
    )
    return place(CapacityIndex.of(view), request)


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
    """Return the part of a claim that is not held already. Both parts sum to the larger of the two claims."""
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
        bandwidth=less_bandwidth(claim.bandwidth, held.bandwidth),
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
    # A gang that accepts several types stays on the one that it has.
    is_choosy = "," in shape.device_type
    held_types = {view.topology(name).configuration_set.device_type for name in masks if is_choosy and masks[name]}
    own = sorted(masks, key=lambda node: -masks[node].bit_count())
    others: list[str] = []
    if missing and not one_node_only:
        closed = masks.keys() | shape.closed_nodes
        free = [(-view.free[slot].bit_count(), name) for name, slot in view.slots.items() if name not in closed]
        others = [name for devices, name in sorted(free) if devices]
    for node in (*own, *others):
        slot = view.slots.get(node)
        if slot is None or not view.available[slot] or not missing:
            continue
        topology = view.topologies[slot]
        device_type = topology.configuration_set.device_type
        is_accepted = topology.accepts(shape.device_type, shape.partition)
        if not is_accepted or (held_types and device_type not in held_types):
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
    """Return the claim on these devices of a node, or None if it does not fit. Cores: as many as the shape requests, or
    else as many as the tasks have in `own`. The arena is left out where memory is short."""
    slot = view.slots[node]
    tasks = mask.bit_count() // shape.roles[0].shape.gpus
    needed = demand(view.topologies[slot].configuration_set, shape, (tasks,))
    free = view.millicores[slot]
    memory = view.memory[slot]
    if own is not None:
        free = tuple([have + held for have, held in zip(free, own.millicores, strict=True)])
        memory += own.memory_bytes + own.arena_bytes
    cores = split_cores(view.topologies[slot], free, mask, needed.millicores)
    if cores is None and own is not None and own.tasks:
        cores = split_cores(view.topologies[slot], free, mask, sum(own.millicores) // own.tasks[0] * tasks)
    if cores is None or memory < needed.memory_bytes:
        return None
    free_bandwidth = view.bandwidth.get(slot, ())
    if free_bandwidth and own is not None:
        free_bandwidth = more_bandwidth(free_bandwidth, own.bandwidth)
    if exceeds(needed.bandwidth, free_bandwidth):
        return None
    arena = needed.arena_bytes if memory >= needed.memory_bytes + needed.arena_bytes else 0
    return Claim(node, mask, cores, needed.memory_bytes, arena, (tasks,), bandwidth=needed.bandwidth)


# Every submission asks, most for one of few shapes; the answer holds as long as the idle cluster is the same.
_MOST_ANSWERS = 4096
_ANSWERS: WeakKeyDictionary[View, dict[GangShape, Refusal | None]] = WeakKeyDictionary()


def impossible(view: View, shape: GangShape) -> Refusal | None:
    """Why not even the idle cluster could hold the gang, with the largest that it could; None if it could.

    Cordoned, draining and lost nodes count: they may come back. None too while no node of its partition, or of the
    cluster, has ever joined.
    """
    if not view.slots or not view.has_node_in(shape.partition):
        return None
    idle = view.idle()
    known = _ANSWERS.setdefault(idle, {})
    if shape not in known:
        if len(known) >= _MOST_ANSWERS:
            known.clear()
        known[shape] = _judge(idle, shape)
    return known[shape]


def _judge(idle: View, shape: GangShape) -> Refusal | None:
    patient = replace(shape, locality=replace(shape.locality, wish=None), arena_bytes_per_device=0)
    index = CapacityIndex.of(idle)
    placement = place(index, PlacementRequest(patient), BEST_FIT)
    if placement.candidates:
        return None
    tasks = _largest(index, patient)
    by_devices = shape.gpus > 0 and len(shape.roles) == 1
    each, what = (shape.roles[0].shape.gpus, "devices") if by_devices else (1, "tasks")
    why = placement.refusals[0]
    if why.reason is Reason.DEVICE_MEMORY and not tasks:
        largest = why.figures["largest_free_bytes"]
        return Refusal(
            Reason.GANG_IMPOSSIBLE,
            {"needed_bytes": shape.device_memory_bytes, "largest_bytes": largest},
            detail="no device has so much memory",
        )
    kind = why.reason.name.lower()
    # The sentence leaves units out of names, so that of a task would stand there twice.
    of_task = {
        f"{kind}_{name}" if name.endswith(("_bytes", "_mb_per_s")) else name: why.figures[name] for name in why.figures
    }
    fits = f"the largest that fits has {tasks * each} {what}" if tasks else "no smaller one fits either"
    return Refusal(
        Reason.GANG_IMPOSSIBLE,
        {**of_task, "needed": shape.tasks * each, "largest": tasks * each},
        detail=f"not even {_idle_nodes(shape)} could hold it ({why.detail or why.reason.meaning}); {fits}",
    )


def _idle_nodes(shape: GangShape) -> str:
    return f"the idle partition {shape.partition!r}" if shape.partition else "the idle cluster"


def _largest(index: CapacityIndex, shape: GangShape) -> int:
    """Tasks of the largest gang of this kind the idle cluster could hold; roles keep their proportions. Zero: none."""
    # Fits are monotone in the number of tasks but for exact node counts, where fewer tasks than nodes never fit.
    low, high = 0, max(role.tasks for role in shape.roles)
    while low < high:
        middle = (low + high + 1) // 2
        if BEST_FIT.place(index, PlacementRequest(_scaled(shape, middle))) is not None:
            low = middle
        else:
            high = middle - 1
    return _scaled(shape, low).tasks if low else 0


def _scaled(shape: GangShape, most: int) -> GangShape:
    largest = max(role.tasks for role in shape.roles)
    roles = tuple(replace(role, tasks=max(1, role.tasks * most // largest)) for role in shape.roles)
    return replace(shape, roles=roles, nodes=min(shape.nodes, sum(role.tasks for role in roles)))
