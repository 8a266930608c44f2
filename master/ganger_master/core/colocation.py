"""Co-location: which gangs may share devices, and the host and device memory that their offloaded state needs.

A device that several gangs hold is held as long as one of them does. The `shared_mask` of a claim marks its shared
devices: a plan sets it for the gang that comes, and `join` for the gangs that are there. Arenas for OFFLOAD are
reserved for a running gang as soon as its peak is known, if they fit. The residue is the device memory that the
processes of an offloaded gang keep, as measured, or else as presumed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Final

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim
from ganger.cluster.topology import bits
from ganger.text import format_memory
from msgspec.structs import replace

from ganger_master.core import gang_orders
from ganger_master.core.commands import ObservedGang
from ganger_master.core.gang_model import Gang, GangIntent, ObservedPhase, Piece
from ganger_master.core.gang_orders import has_two_worlds
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.state import State


def follow(state: State) -> None:
    """Grow the arenas of the gangs that were reported; the view must be up to date."""
    for number in list(state.dirty.arenas):
        job = state.jobs.get(number)
        gang = state.gangs.get(job.epoch) if job is not None else None
        if job is None or gang is None or gang.intent is not GangIntent.RUN or job.next_epoch or job.ending is not None:
            continue
        bytes_per_device = job.arena_bytes_per_device
        if not bytes_per_device:
            continue
        before = gang.claims
        claims = tuple([_with_arena(claim, bytes_per_device) for claim in before])
        if claims != before and _fits(state, gang, claims):
            state.put_gang(gang_orders.reserve(gang, claims))
            # The next gang is judged by what is left.
            for name in gang.nodes:
                state.dirty.rows.pop(name, None)
                if state.refresh_row(name):
                    state.dirty.shown[name] = None
    state.dirty.arenas.clear()


def has_arenas(gang: Gang) -> bool:
    return all(piece.claim.arena_bytes or not piece.claim.device_mask for piece in gang.pieces)


def offload_obstacle(job: JobRecord, gang: Gang | None) -> str:
    """Return why a running job cannot be offloaded although its program can; empty if nothing is known against it."""
    if gang is None or gang.intent is not GangIntent.RUN or has_arenas(gang) or not job.arena_bytes_per_device:
        return ""
    lacking = [claim for claim in gang.claims if claim.device_mask and not claim.arena_bytes]
    size = format_memory(job.arena_bytes_per_device * sum(claim.device_mask.bit_count() for claim in lacking))
    nodes = ", ".join(f"nodes/{claim.node}" for claim in lacking)
    return f"no host memory is left on {nodes} for the {size} that it has on GPUs: submit it with less --memory"


def per_device(gang: Gang) -> int:
    """Return the bytes of arena reserved for each device of the gang."""
    claim = next((claim for claim in gang.claims if claim.device_mask), None)
    return claim.arena_bytes // claim.device_mask.bit_count() if claim is not None else 0


def _with_arena(claim: Claim, bytes_per_device: int) -> Claim:
    wanted = claim.device_mask.bit_count() * bytes_per_device
    return replace(claim, arena_bytes=wanted) if wanted > claim.arena_bytes else claim


def _fits(state: State, gang: Gang, claims: tuple[Claim, ...]) -> bool:
    view = state.view
    return all(
        new.arena_bytes - old.arena_bytes <= view.memory[view.slots[new.node]]
        for old, new in zip(gang.claims, claims, strict=True)
    )


def residue_of(state: State, gang: Gang, piece: Piece, observed: ObservedGang) -> tuple[int, ...]:
    """Return the bytes that a part keeps of its devices, by device of the node; empty where it keeps none.

    While the part is not reported at OFFLOAD, that is its last value. A presumed value is at most what the job may use.
    """
    if observed.phase is not ObservedPhase.PARKED or observed.level is not SuspendLevel.OFFLOAD:
        return piece.residue_bytes
    return kept_of(state, piece.claim, state.jobs[gang.job].spec.gpu_memory_bytes, observed.residue_bytes)


def kept_of(state: State, claim: Claim, gpu_memory_bytes: int, measured: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes that a gang parked at OFFLOAD with this claim keeps, by device of the node.

    gpu_memory_bytes: limit of its job for each device; zero: none. measured: bytes by device; empty: not measured."""
    configuration_set = state.nodes.configuration_sets[state.nodes[claim.node].configuration_set]
    whole = configuration_set.device_memory_bytes
    found = measured
    if len(found) != configuration_set.devices:
        limits = [size for size in (whole, gpu_memory_bytes) if size]
        found = (min([state.settings.residue_bytes, *limits]),) * configuration_set.devices
    mask = claim.device_mask
    kept = tuple([min(size, whole or size) if mask >> at & 1 else 0 for at, size in enumerate(found)])
    return kept if any(kept) else ()


def kept_memory_of(piece: Piece, observed: ObservedGang) -> int:
    """Return the bytes of host memory that a part parked at OFFLOAD keeps besides its arenas, as measured when it was
    parked. Zero otherwise, and where that is unknown: then it keeps all that is claimed."""
    if observed.phase is not ObservedPhase.PARKED or observed.level is not SuspendLevel.OFFLOAD:
        return 0
    if piece.phase is ObservedPhase.PARKED and piece.level is SuspendLevel.OFFLOAD:
        return piece.kept_memory_bytes
    return observed.kept_memory_bytes


def holders_on(state: State, node: str) -> list[tuple[int, Claim]]:
    """Return the numbers of the jobs whose gangs hold something on a node, and their claims, by epoch."""
    gangs = [(state.gangs[epoch], place) for epoch, place in state.gangs.places_on.get(node, {}).items()]
    held = [(gang.job, gang.pieces[place].held) for gang, place in gangs]
    return [(number, claim) for number, claim in held if claim is not None]


# The capability of a node whose daemon runs several gangs on a device at once.
CAPABILITY: Final = "packing"
# In place of bytes: the device may not be shared.
_NOT_SHARED: Final = -1


def rules(state: State, job: JobRecord, claims: Sequence[Claim]) -> tuple[Refusal, ...]:
    """Return why a job may not share devices on these nodes, whatever room there is; empty if it may."""
    nodes = [claim.node for claim in claims if claim.shared_mask and claim.node in state.nodes]
    if nodes and not job.preemptible:
        detail = "a job that must not be suspended shares no devices"
        return (Refusal(Reason.WRONG_STATE, job=job.name, detail=detail),)
    detail = "its daemon lets no two gangs use a device at once"
    return tuple(
        [
            Refusal(Reason.NOT_SUPPORTED, node=node, detail=detail)
            for node in nodes
            if state.nodes[node].capabilities.get(CAPABILITY) != "yes"
        ]
    )


def company_of(
    state: State, job: JobRecord, claims: Sequence[Claim], agreed_only: bool = False
) -> Mapping[str, tuple[int, ...]]:
    """Return the device memory that present gangs need on nodes where the claims share devices, as `fit` takes it.

    The bytes are those that the jobs name or that were measured. A device cannot be joined where a gang is of the same
    job, must not be suspended, has unknown memory, is being resized or is time-sliced; with `agreed_only`, also where
    its gang does not share it yet."""
    shared = [claim for claim in claims if claim.shared_mask and claim.node in state.nodes]
    return {claim.node: _company_on(state, job, claim, agreed_only) for claim in shared}


def join(state: State, epoch: int, now: float, cause: str) -> None:
    """Mark the devices of a new gang as shared for the gangs that hold them already."""
    gang = state.gangs[epoch]
    for piece in gang.pieces:
        if not piece.claim.shared_mask:
            continue
        for other, _ in _others_on(state, piece.claim, epoch):
            _let_in(state, other, piece.claim, now, cause)


def beside(state: State, gang: Gang) -> tuple[int, ...]:
    """Return the numbers of the other jobs that hold devices of a gang, in order."""
    found = {other.job for held in gang.held if held.shared_mask for other, _ in _others_on(state, held, gang.epoch)}
    return tuple(sorted(found - {gang.job}))


def leave(state: State, gang: Gang) -> None:
    """Remove the marks of devices that were shared only with this gang, which is gone from every node. A parked gang
    keeps its marks, and so do the gangs beside it, because it may resume."""
    for piece in gang.pieces:
        if not piece.claim.shared_mask:
            continue
        node = piece.claim.node
        there = [(state.gangs[epoch], place) for epoch, place in state.gangs.places_on.get(node, {}).items()]
        for other, place in there:
            own = other.pieces[place].claim
            others = [one.pieces[at].claim.device_mask for one, at in there if one is not other]
            left = own.shared_mask & functools.reduce(operator.or_, others, stray_devices(state, node))
            if left != own.shared_mask:
                state.put_gang(gang_orders.marked(other, node, left))


def stray_devices(state: State, node: str) -> int:
    """Return the devices of a node that quarantined gangs hold: shared ones stay marked."""
    strays = state.nodes[node].strays if node in state.nodes else ()
    return functools.reduce(operator.or_, [stray.device_mask for stray in strays], 0)


def _company_on(state: State, job: JobRecord, claim: Claim, agreed_only: bool) -> tuple[int, ...]:
    """Return the bytes needed by device of the node; `_NOT_SHARED` for those that may not be shared."""
    devices = state.view.topology(claim.node).devices
    needed: list[list[int]] = [[] for _ in range(devices)]
    for epoch, place in state.gangs.places_on.get(claim.node, {}).items():
        gang = state.gangs[epoch]
        held = gang.pieces[place].held
        if held is None or not held.device_mask & claim.shared_mask:
            continue
        other = state.jobs[gang.job]
        size = other.shape.device_memory_bytes
        is_open = gang.job != job.number and other.preemptible and size > 0
        is_open = is_open and epoch not in state.gangs.set_of and not has_two_worlds(state, gang.job)
        for device in bits(held.device_mask & claim.shared_mask):
            agrees = is_open and (not agreed_only or bool(held.shared_mask >> device & 1))
            needed[device].append(size if agrees else _NOT_SHARED)
    return tuple([sum(sizes) if sizes and min(sizes) >= 0 else _NOT_SHARED for sizes in needed])


def _others_on(state: State, claim: Claim, epoch: int) -> list[tuple[Gang, Piece]]:
    found = []
    for other, place in list(state.gangs.places_on.get(claim.node, {}).items()):
        piece = state.gangs[other].pieces[place]
        if other != epoch and piece.held is not None and piece.held.device_mask & claim.device_mask:
            found.append((state.gangs[other], piece))
    return found


def _let_in(state: State, gang: Gang, newcomer: Claim, now: float, cause: str) -> None:
    sharing = gang_orders.let_in(gang, newcomer)
    if sharing is gang:
        return
    state.put_gang(sharing)
    job = state.jobs[gang.job]
    # A plan that was made for the gang alone is outdated.
    state.put_job(replace(job, revision=job.revision + 1))
    state.history(now, job, "gang_joined", cause, epoch=gang.epoch, node=newcomer.node)
