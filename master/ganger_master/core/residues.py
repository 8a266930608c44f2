"""What the processes of a gang keep of devices once they have offloaded: as measured, else as presumed."""

from __future__ import annotations

from ganger_master.core.commands import ObservedGang
from ganger_master.core.model import Claim, Gang, ObservedPhase, Piece, SuspendLevel
from ganger_master.core.state import State


def residue_of(state: State, gang: Gang, piece: Piece, observed: ObservedGang) -> tuple[int, ...]:
    """Bytes by device of the node, of devices of the gang's alone; empty where they keep none.

    While the gang is not seen at OFFLOAD, what is known already. What is presumed is no more than the job may use.
    """
    if observed.phase is not ObservedPhase.PARKED or observed.level is not SuspendLevel.OFFLOAD:
        return piece.residue_bytes
    return kept_of(state, piece.claim, state.jobs[gang.job].spec.gpu_memory_bytes, observed.residue_bytes)


def kept_of(state: State, claim: Claim, gpu_memory_bytes: int, measured: tuple[int, ...]) -> tuple[int, ...]:
    """Return the same of a gang that rests at OFFLOAD with this claim. `gpu_memory_bytes`: what its job may use of a
    device, zero where it names nothing. `measured`: bytes by device, empty where they were not measured."""
    configuration_set = state.configuration_sets[state.nodes[claim.node].configuration_set]
    whole = configuration_set.device_memory_bytes
    found = measured
    if len(found) != configuration_set.devices:
        limits = [size for size in (whole, gpu_memory_bytes) if size]
        found = (min([state.settings.residue_bytes, *limits]),) * configuration_set.devices
    mask = claim.device_mask
    kept = tuple([min(size, whole or size) if mask >> at & 1 else 0 for at, size in enumerate(found)])
    return kept if any(kept) else ()


def kept_memory_of(piece: Piece, observed: ObservedGang) -> int:
    """Return the bytes of host memory that a part keeps beside its arenas while it rests at OFFLOAD, as measured when
    it came to rest. Zero otherwise, and where that is not known: then it keeps all that is claimed."""
    if observed.phase is not ObservedPhase.PARKED or observed.level is not SuspendLevel.OFFLOAD:
        return 0
    if piece.phase is ObservedPhase.PARKED and piece.level is SuspendLevel.OFFLOAD:
        return piece.kept_memory_bytes
    return observed.kept_memory_bytes


def holders_on(state: State, node: str) -> list[tuple[int, Claim]]:
    """Numbers of the jobs whose gangs hold something on a node, and what, by epoch."""
    gangs = [(state.gangs[epoch], place) for epoch, place in state.gangs_on.get(node, {}).items()]
    held = [(gang.job, gang.pieces[place].held) for gang, place in gangs]
    return [(number, claim) for number, claim in held if claim is not None]
