"""Places kept for gangs that optimistic requests would starve, and pieces that lower-ranked requests may not take.

Kept places are one table in rank order, recomputed in each pass, so they end with the job, node or rank. A kept place
is whole or absent: one that the gang could hold if all other jobs left it. The place with the most of it free
is taken, so that the last piece frees soonest. Protected pieces may be free or held; a request conflicts only where it
would leave less free than is kept. Pieces carry the rank and the job that they are kept for: a refusal names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

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

from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_rules import launch_failed_on
from ganger_master.core.queue import Blocked, KeptPlaces
from ganger_master.core.reservations import closures_of
from ganger_master.core.state import State

# A gang is kept a place after so many refusals, or so long a wait.
CONFLICTS_BEFORE = 3
# Jobs that places are kept for at once.
_MOST_KEPT = 8
# Nodes that are tried for one place: the first one nearly always has it.
_NODES_TRIED = 8
_SPREADS_TRIED = 4


class KeptPlaceRequest(Struct, frozen=True, gc=False):
    """A waiting job that has earned a place, and the nodes that are closed to it."""

    job: str
    rank: int
    shape: GangShape
    closed: tuple[str, ...] = ()


class KeptPlace(Struct, frozen=True, gc=False):
    """The claims that are kept for a job, and its rank."""

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
        claim = _added(whole, own.get(whole.node))
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


def _added(claim: Claim, held: Claim | None) -> Claim:
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


# -- of the state ------------------------------------------------------------------------------------------------------


def protected_from(state: State, job: JobRecord, now: float, out_of_turn: bool = False) -> Protected:
    """Return what is kept from a job: the places that the planner keeps, and those of blocked jobs ahead of it in the
    policy's order; out of turn, of all other blocked jobs."""
    by_order = _protected_by_order(state, job, now, out_of_turn)
    if not state.queue.kept_by_plan:
        return by_order
    by_plan = kept_by_plan(state, job)
    nodes = {
        name: (*by_plan.nodes.get(name, ()), *by_order.nodes.get(name, ()))
        for name in {**by_plan.nodes, **by_order.nodes}
    }
    return Protected(nodes, by_order.everything)


def kept_by_plan(state: State, job: JobRecord) -> Protected:
    """Return what the planner keeps for other jobs; it comes before every request."""
    others = [
        KeptPlace(f"jobs/{number}", 0, claims)
        for number, claims in state.queue.kept_by_plan.items()
        if number != job.number
    ]
    return protect(state.view, others)


def _protected_by_order(state: State, job: JobRecord, now: float, out_of_turn: bool) -> Protected:
    if state.is_planned:
        # Its ranking and the places that it keeps say which job goes first.
        return NOTHING
    found = _blocked(state)
    # A queue that is not strict keeps room only for jobs that have waited long.
    if not found.numbers or (now < found.waited_from and not state.policy.protects_all):
        return NOTHING
    blocked = first_blocked(state)
    key = (state.policy.key(job), job.number)
    ahead = [
        other
        for other in blocked
        if (state.policy.key(other), other.number) < key or (out_of_turn and other.number != job.number)
    ]
    if job.number in state.queue.resuming:
        # It may hold what they lack: it resumes, or neither ever would.
        others = [other for other in ahead if not lacks_memory(state, other)]
        ahead = [] if state.policy.protects_all and others[:1] != ahead[:1] else others
    if not ahead:
        return NOTHING
    if state.policy.protects_all:
        return Protected(everything=(ahead[0].name, state.queue_rank(ahead[0].number)))
    places = _kept_places(state, blocked, ahead, now)
    return protect(state.view, places) if places else NOTHING


def lacks_memory(state: State, job: JobRecord) -> bool:
    """Return whether a job waits for memory, of nodes or of devices: parked jobs keep some of it."""
    refusals = state.queue.refusals.get(job.number, ())
    return any(refusal.reason in (Reason.MEMORY, Reason.DEVICE_MEMORY) for refusal in refusals)


def kept_places_of(state: State, jobs: Sequence[JobRecord], now: float) -> tuple[KeptPlace, ...]:
    """Return places, by rank, for those of the jobs that are among the first blocked ones and waited long enough."""
    return _kept_places(state, first_blocked(state), jobs, now)


def _kept_places(
    state: State, blocked: Sequence[JobRecord], jobs: Sequence[JobRecord], now: float
) -> tuple[KeptPlace, ...]:
    waited = _waited(state, blocked, now)
    if not waited:
        return ()
    names = {job.name for job in jobs}
    if all(job.name not in names for job in waited):
        return ()
    kept = _places_for(state, waited, now)
    return tuple(
        KeptPlace(job.name, state.queue_rank(job.number), kept[job.name])
        for job in waited
        if job.name in names and job.name in kept
    )


def _waited(state: State, blocked: Sequence[JobRecord], now: float) -> list[JobRecord]:
    conflicts, after_s = state.queue.conflicts, state.settings.keep_place_after_s
    return [job for job in blocked if now >= begins_at(conflicts.get(job.number, 0), job.pending_since, after_s)]


def _places_for(state: State, waited: Sequence[JobRecord], now: float) -> Mapping[str, tuple[Claim, ...]]:
    """Return the kept places of jobs, searched anew only after a while: a search costs as much as many verdicts."""
    numbers = tuple(job.number for job in waited)
    kept = state.queue.kept
    if (
        kept is None
        or kept.numbers != numbers
        or (kept.view_version != state.view.version and not 0.0 <= now - kept.time < _KEPT_S)
    ):
        closures = closures_of(state, now)
        wanting = [
            KeptPlaceRequest(job.name, rank, job.shape, (*launch_failed_on(state, job), *closures.of(job, now)))
            for rank, job in enumerate(waited, 1)
        ]
        found = {one.job: one.claims for one in keep_places(state.view, wanting)}
        kept = KeptPlaces(numbers, state.view.version, now, found)
        state.queue.kept = kept
    return kept.places


_KEPT_S = 0.5


def first_blocked(state: State) -> list[JobRecord]:
    """Return the first waiting jobs that lack pieces, in the order of the queue."""
    return [state.jobs[number] for number in _blocked(state).numbers]


def _blocked(state: State) -> Blocked:
    blocked = state.queue.blocked
    if blocked is None:
        blocked = find_blocked(state)
        state.queue.blocked = blocked
    return blocked


_NO_BLOCKED: Final = Blocked((), 0.0)


def find_blocked(state: State) -> Blocked:
    """Return the first blocked jobs of the queue, which `state.queue.blocked` caches."""
    if not state.queue.lacking:
        return _NO_BLOCKED
    blocked: list[JobRecord] = []
    for number in state.queue.lacking:
        job = state.jobs[number]
        if number not in state.queue.declined and job.is_waiting:
            blocked.append(job)
            if len(blocked) >= state.settings.protected_jobs:
                break
    conflicts, after_s = state.queue.conflicts, state.settings.keep_place_after_s
    earliest = min(
        [begins_at(conflicts.get(job.number, 0), job.pending_since, after_s) for job in blocked], default=0.0
    )
    return Blocked(tuple([job.number for job in blocked]), earliest)
