"""Host memory for OFFLOAD: reserved for a running gang as soon as its peak is known, if it fits beside all else."""

from __future__ import annotations

from msgspec.structs import replace

from ganger_master.core import gang_orders as orders
from ganger_master.core.model import Claim, Gang, GangIntent
from ganger_master.core.state import State


def follow(state: State) -> None:
    """Grows the arenas of the gangs that were reported; rows must be up to date."""
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
            state.put_gang(orders.reserve(gang, claims))
            # What this one takes the next one finds gone.
            for name in gang.nodes:
                state.dirty.rows.pop(name, None)
                if state.refresh_row(name):
                    state.dirty.shown[name] = None
    state.dirty.arenas.clear()


def has_arenas(gang: Gang) -> bool:
    return all(piece.claim.arena_bytes or not piece.claim.device_mask for piece in gang.pieces)


def per_device(gang: Gang) -> int:
    """Bytes of arena reserved for each device of the gang."""
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
