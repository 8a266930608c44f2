"""Places kept for gangs that optimistic requests would starve, and pieces that lower-ranked requests may not take.

Kept places are one table in rank order, recomputed in each pass, so they end with the job, node or rank. A kept place
is whole or absent: one that the gang could hold if all other jobs left it. The place with the most of it free
is taken, so that the last piece frees soonest. Protected pieces may be free or held; a request conflicts only where it
would leave less free than is kept. Pieces carry the rank and the job that they are kept for: a refusal names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.claims import split_cores
from ganger.cluster.fit import demand, lacking_bandwidth
from ganger.cluster.placement import beside
from ganger.cluster.preferences import BEST_FIT
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Bandwidth, Claim, GangShape, LocalityLevel, more_bandwidth
from ganger.cluster.search import PlacementRequest, hosting
from ganger.cluster.topology import Topology, bits
from ganger.cluster.view import View
from msgspec import Struct, field
from msgspec.structs import replace

# A gang is kept a place after so many refusals, or so long a wait.
CONFLICTS_BEFORE = 3
# Jobs that places are kept for at once.
_MOST_KEPT = 8
# The first of the nodes that may do nearly always does.
_NODES_TRIED = 8
_SPREADS_TRIED = 4


class KeptPlaceRequest(Struct, frozen=True, gc=False):
    """A waiting job that has earned a place, and the nodes that are closed to it."""

    job: str
    rank: int
    shape: GangShape
    closed: tuple[str, ...] = ()


class KeptPlace(Struct, frozen=True, gc=False):
    job: str
    rank: int
    claims: tuple[Claim, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(claim.node for claim in self.claims)


def begins_at(conflicts: int, since: float, after_s: float) -> float:
    """Return the Unix second from which a place is kept for a gang that waits since `since`: after `after_s`, or at
    once where many of its requests, `conflicts`, were refused for another claim."""
    return since if conflicts >= CONFLICTS_BEFORE else since + after_s


def keep_places(view: View, wanting: Sequence[KeptPlaceRequest]) -> tuple[KeptPlace, ...]:
    """Return places for the first jobs in rank order, disjoint, each whole or absent."""
    found: list[KeptPlace] = []
    if not wanting:
        return ()
    idle = view.vacant()
    for one in sorted(wanting, key=lambda wanted: (wanted.rank, wanted.job))[:_MOST_KEPT]:
        claims = _place(view, idle, replace(one.shape, arena_bytes_per_device=0), one.closed)
        if claims is not None:
            for claim in claims:
                idle.take(claim, one.shape.gpus)
            found.append(KeptPlace(one.job, one.rank, claims))
    for place in found:
        for claim in place.claims:
            idle.give(claim)
    return tuple(found)


def _place(view: View, idle: View, shape: GangShape, closed: Collection[str]) -> tuple[Claim, ...] | None:
    if shape.nodes <= 1:
        claim = _on_one_node(view, idle, shape, closed)
        if claim is not None:
            return (claim,)
    patient = replace(shape, locality=replace(shape.locality, wish=None))
    request = PlacementRequest(patient, avoid=frozenset(closed), limit=_SPREADS_TRIED)
    found = BEST_FIT.places(CapacityIndex.of(idle), request)
    return min(found, key=lambda claims: -_free_already(view, claims), default=None)


def _on_one_node(view: View, idle: View, shape: GangShape, closed: Collection[str]) -> Claim | None:
    """Return the node that lacks the fewest devices, then cores. Both views have the same slots."""
    everything = tuple(role.tasks for role in shape.roles)
    index = CapacityIndex.of(idle)
    with index.excluding(closed):
        slots = hosting(index, shape, shape.locality.widest)
    now = view.columns()
    takable = now.free[: len(view.nodes)].copy()
    for slot in view.parked if shape.device_memory_bytes else ():
        takable[slot] &= np.uint64(view.roomy(slot, shape.device_memory_bytes))
    free = np.bitwise_count(takable[slots] & idle.columns().free[slots]).astype(np.int64)
    lacking = np.maximum(0, shape.gpus - free)
    for slot in map(int, slots[np.lexsort((slots, -now.millicores[slots], lacking))][:_NODES_TRIED]):
        topology = idle.topologies[slot]
        needed = demand(topology.configuration_set, shape, everything)
        mask = _mask(topology, idle.free[slot], int(takable[slot]), needed.gpus, shape.locality.widest)
        millicores = split_cores(topology, idle.millicores[slot], mask or 0, needed.millicores)
        if mask is not None and millicores is not None:
            memory, bandwidth = needed.memory_bytes, needed.bandwidth
            return Claim(idle.nodes[slot], mask, millicores, memory, 0, everything, bandwidth=bandwidth)
    return None


def _mask(topology: Topology, allowed: int, free: int, count: int, widest: LocalityLevel) -> int | None:
    """Return `count` of the allowed devices within `widest`, free ones first."""
    free &= allowed
    mask = topology.best(free, count, min(widest, LocalityLevel.NODE))
    if mask is not None or allowed.bit_count() < count:
        return mask
    if widest >= LocalityLevel.NODE:
        return _some(free, allowed, count)
    fallback = topology.best(allowed, count, widest)
    near = [group.device_mask for group in topology.configuration_set.groups if group.level <= widest]
    if widest >= LocalityLevel.SOCKET:
        near += topology.sockets
    choices = [_some(free & group, allowed & group, count) for group in near if (allowed & group).bit_count() >= count]
    choices += [fallback] if fallback is not None else []
    return min(choices, key=lambda choice: (-(choice & free).bit_count(), choice), default=None)


def _some(first: int, then: int, count: int) -> int:
    chosen = [*bits(first), *bits(then & ~first)][:count]
    return sum(1 << device for device in chosen)


def _free_already(view: View, claims: Sequence[Claim]) -> int:
    return sum((view.free[view.slots[claim.node]] & claim.device_mask).bit_count() for claim in claims)


class ProtectedPieces(Struct, frozen=True, gc=False):
    """The pieces of one node that are kept for one job."""

    job: str
    rank: int
    device_mask: int
    millicores: tuple[int, ...]
    memory_bytes: int
    bandwidth: Bandwidth = ()


class Protected(Struct, frozen=True, gc=False):
    """Protected pieces by node, in rank order. `everything`: the first job of a strict queue, and its rank."""

    nodes: Mapping[str, tuple[ProtectedPieces, ...]] = field(default_factory=dict)
    everything: tuple[str, int] | None = None


NOTHING = Protected()


def protect(view: View, places: Iterable[KeptPlace]) -> Protected:
    """Return the protected set of these kept places. Nodes that left the view protect nothing, nor does a claim
    of other sockets than its node has: plans may keep such claims."""
    nodes: dict[str, tuple[ProtectedPieces, ...]] = {}
    for one in sorted(places, key=lambda one: (one.rank, one.job)):
        for claim in one.claims:
            if claim.node in view and len(claim.millicores) == len(view.topology(claim.node).sockets):
                memory_bytes = claim.memory_bytes + claim.arena_bytes
                pieces = (claim.device_mask, claim.millicores, memory_bytes, claim.bandwidth)
                kept = ProtectedPieces(one.job, one.rank, *pieces)
                nodes[claim.node] = (*nodes.get(claim.node, ()), kept)
    return Protected(nodes)


def trespass(
    view: View,
    protected: Protected,
    claims: Sequence[Claim],
    *,
    rank: int = 0,
    job: str = "",
    holding: Sequence[Claim] = (),
) -> tuple[Refusal, ...]:
    """Return why a job of this rank (0: behind all) may not have these claims, which fit; empty if it may.

    `holding`: pieces that the job has already, and gives up for these. What the claims have beyond them counts."""
    if protected.everything is not None and _goes_first(*protected.everything, rank, job):
        first, its_rank = protected.everything
        return (
            Refusal(
                Reason.PROTECTED,
                {"rank": rank, "first_rank": its_rank},
                job=first,
                detail="the queue is strict and another job goes first",
            ),
        )
    refusals: list[Refusal] = []
    own = {claim.node: claim for claim in holding}
    for whole in claims if protected.nodes else ():
        slot = view.slots.get(whole.node)
        if slot is None:
            continue
        claim = beyond(whole, own.get(whole.node))
        memory = 0
        bandwidth: Bandwidth = ()
        millicores = [0] * len(claim.millicores)
        for kept in protected.nodes.get(claim.node, ()):
            if not _goes_first(kept.job, kept.rank, rank, job):
                continue
            memory += kept.memory_bytes
            bandwidth = more_bandwidth(bandwidth, kept.bandwidth)
            millicores = [have + more for have, more in zip(millicores, kept.millicores, strict=True)]
            figures = _in_the_way(view, slot, claim, kept.device_mask, millicores, memory)
            if not figures and lacking_bandwidth(view, slot, more_bandwidth(claim.bandwidth, bandwidth)):
                figures = {"kept_mb_per_s": sum(bandwidth)} if claim.bandwidth else {}
            if figures:
                figures |= {"rank": rank, "first_rank": kept.rank}
                refusals.append(Refusal(Reason.KEPT, figures, node=claim.node, job=kept.job))
                break
    return tuple(refusals)


def beyond(claim: Claim, held: Claim | None) -> Claim:
    """Return what a claim has beyond what its job holds there: arenas count as memory."""
    if held is None:
        return claim
    memory_bytes = claim.memory_bytes + claim.arena_bytes - held.memory_bytes - held.arena_bytes
    return replace(beside(claim, held), memory_bytes=max(0, memory_bytes), arena_bytes=0)


def _goes_first(job: str, its_rank: int, rank: int, own: str) -> bool:
    return job != own and (rank == 0 or its_rank < rank)


def _in_the_way(
    view: View, slot: int, claim: Claim, mask: int, millicores: Sequence[int], memory: int
) -> dict[str, int]:
    """Return what the claim would take of these devices, or of the cores and bytes that are kept so far."""
    if claim.device_mask & mask:
        return {"kept_devices": (claim.device_mask & mask).bit_count()}
    for have, wanted, kept in zip(view.millicores[slot], claim.millicores, millicores, strict=True):
        if wanted and wanted > max(0, have - kept):
            return {"kept_millicores": kept, "free_millicores": have}
    wanted_memory = claim.memory_bytes + claim.arena_bytes
    if wanted_memory and wanted_memory > max(0, view.memory[slot] - memory):
        return {"kept_bytes": memory, "free_bytes": view.memory[slot]}
    return {}
