"""What is kept for gangs that go first: pieces that requests ranked behind them may not take.

Protected pieces may be free or held; a request is in the way only where what would be left free is less than what is
kept. Pieces are kept with the rank and the job they are kept for, so that a refusal names whom one waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim
from ganger.cluster.view import View
from msgspec import Struct, field

from ganger_master.core.reservations import Reservation


class ProtectedPieces(Struct, frozen=True, gc=False):
    """One node's pieces kept for one job."""

    job: str
    rank: int
    device_mask: int
    millicores: tuple[int, ...]
    memory_bytes: int


class Protected(Struct, frozen=True, gc=False):
    """By node, in rank order. `everything`: job and rank of the first in a strict queue; nobody may pass it."""

    nodes: Mapping[str, tuple[ProtectedPieces, ...]] = field(default_factory=dict)
    everything: tuple[str, int] | None = None


NOTHING = Protected()


def protect(view: View, reservations: Iterable[Reservation], everything: tuple[str, int] | None = None) -> Protected:
    """The protected set of these reservations. Nodes that left the view protect nothing, nor does a claim of other
    sockets than its node has: a plan may keep whatever it likes."""
    nodes: dict[str, tuple[ProtectedPieces, ...]] = {}
    for reservation in sorted(reservations, key=lambda one: (one.rank, one.job)):
        for claim in reservation.claims:
            if claim.node in view and len(claim.millicores) == len(view.topology(claim.node).sockets):
                kept = ProtectedPieces(
                    reservation.job,
                    reservation.rank,
                    claim.device_mask,
                    claim.millicores,
                    claim.memory_bytes + claim.arena_bytes,
                )
                nodes[claim.node] = (*nodes.get(claim.node, ()), kept)
    return Protected(nodes, everything)


def trespass(
    view: View, protected: Protected, claims: Sequence[Claim], *, rank: int = 0, job: str = ""
) -> tuple[Refusal, ...]:
    """Why these claims, which fit, may not be had by a job of this rank (0: behind everybody); empty if they may."""
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
    for claim in claims if protected.nodes else ():
        slot = view.slots.get(claim.node)
        if slot is None:
            continue
        memory = 0
        millicores = [0] * len(claim.millicores)
        for kept in protected.nodes.get(claim.node, ()):
            if not _goes_first(kept.job, kept.rank, rank, job):
                continue
            memory += kept.memory_bytes
            millicores = [have + more for have, more in zip(millicores, kept.millicores, strict=True)]
            figures = _in_the_way(view, slot, claim, kept.device_mask, millicores, memory)
            if figures:
                refusals.append(
                    Refusal(
                        Reason.RESERVED,
                        {**figures, "rank": rank, "first_rank": kept.rank},
                        node=claim.node,
                        job=kept.job,
                    )
                )
                break
    return tuple(refusals)


def _goes_first(job: str, its_rank: int, rank: int, own: str) -> bool:
    return job != own and (rank == 0 or its_rank < rank)


def _in_the_way(
    view: View, slot: int, claim: Claim, mask: int, millicores: Sequence[int], memory: int
) -> dict[str, int]:
    """What the claim would take of these devices, or of the cores and bytes that are kept so far."""
    if claim.device_mask & mask:
        return {"kept_devices": (claim.device_mask & mask).bit_count()}
    for have, wanted, kept in zip(view.millicores[slot], claim.millicores, millicores, strict=True):
        if wanted and wanted > max(0, have - kept):
            return {"kept_millicores": kept, "free_millicores": have}
    wanted_memory = claim.memory_bytes + claim.arena_bytes
    if wanted_memory and wanted_memory > max(0, view.memory[slot] - memory):
        return {"kept_bytes": memory, "free_bytes": view.memory[slot]}
    return {}
