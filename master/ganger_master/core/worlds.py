"""Two worlds of one elastic job: the old one, and the one with another number of devices that is to follow it.

The new world is the destination of a move whose source is the old one. What both are to hold they have in common, so
the cluster is never asked for more than the larger of the two. A world that gives devices back rests first, with its
state in host memory, and so does one whose devices have no room for two worlds at once; any other goes on until the new
one is ready. Until the commit the old world is the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from ganger.cluster.fit import MEMORY_SHARE
from ganger.cluster.resized import beside
from msgspec.structs import replace

from ganger_master.core import gang_orders as orders
from ganger_master.core.model import (
    Claim,
    Gang,
    GangIntent,
    GangPhase,
    GangRole,
    JobRecord,
    LocalityLevel,
    Piece,
    Restore,
    SuspendLevel,
)
from ganger_master.core.purpose import NO_PURPOSE, Purpose
from ganger_master.core.sizes import devices_of
from ganger_master.core.state import State


def begin_resize(
    state: State,
    number: int,
    claims: Sequence[Claim],
    level: LocalityLevel,
    now: float,
    cause: str,
    reason: str = "",
    purpose: Purpose = NO_PURPOSE,
) -> int:
    """The new world is prepared; the old one goes on, or is told to rest."""
    job = replace(state.jobs[number], revision=state.jobs[number].revision + 1, trouble="")
    source = state.gangs[job.epoch]
    epoch = begin_with(state, job, source, claims, level, now)
    state.put_gang(replace(state.gangs[epoch], purpose=purpose))
    if source.phase is not GangPhase.PARKED:
        if _gives_back(source, claims) or state.gangs[epoch].restore.alone:
            source = orders.park(source, SuspendLevel.OFFLOAD, now, by_plan=True)
        state.put_gang(replace(source, phase=GangPhase.RESIZING))
    figures = {"devices": source.devices, "becomes": devices_of(claims)}
    state.history(now, job, "resize_begun", cause, reason, epoch=epoch, **figures, **purpose.figures)
    return epoch


def begin_with(
    state: State, job: JobRecord, source: Gang, claims: Sequence[Claim], level: LocalityLevel, now: float
) -> int:
    """The destination of a change of worlds; the job's next epoch."""
    epoch = state.take_epoch()
    alone = source.phase is not GangPhase.PARKED and not _fits_twice(state, job, source, claims)
    restore = Restore(
        parked_epoch=source.epoch, step=source.stop_step, alone=alone, peak_device_bytes=job.peak_device_bytes
    )
    version = state.next_desired_version
    gang = orders.new_gang(epoch, job.number, claims, level, now, GangRole.DESTINATION, restore, version)
    taken = taken_by(source, claims)
    pieces = tuple([replace(piece, held=held) for piece, held in zip(gang.pieces, taken, strict=True)])
    state.put_gang(replace(gang, phase=GangPhase.RESIZING, resizes=True, pieces=pieces))
    state.put_job(replace(job, next_epoch=epoch))
    return epoch


def share_pieces(state: State, job: JobRecord, gangs: Sequence[Gang]) -> bool:
    """Of the worlds of a job the present one holds what it wants, the others what they want beside that: first the one
    that is to follow, then those that were given up and are leaving. Whether somebody holds something else than
    before."""
    if len(gangs) < 2:
        return False
    sources = {gang.restore.parked_epoch for gang in gangs if gang.resizes}
    worlds = [gang for gang in gangs if gang.resizes or gang.epoch in sources]
    if len(worlds) < 2:
        return False
    changed = False
    taken = _Taken()
    if job.epoch in [gang.epoch for gang in worlds]:
        # One that is left alone holds its own, and its cores may be those of several who take turns.
        changed = has_two_worlds(state, job.number) and _hold(state, state.gangs[job.epoch], taken)
        taken.present = {piece.claim.node: piece.held for piece in state.gangs[job.epoch].pieces}
    for gang in sorted(worlds, key=lambda gang: (gang.epoch != job.next_epoch, gang.epoch)):
        if gang.epoch != job.epoch:
            changed = _hold(state, gang, taken) or changed
            taken.add(state.gangs[gang.epoch])
    return changed


def has_two_worlds(state: State, number: int) -> bool:
    """Whether a job is between two worlds, be it that the old one is only still leaving: what both have in common the
    one of them holds, and who comes to it there would not be known to the other."""
    return any(one.resizes and one.restore.parked_epoch in state.gangs for one in state.gangs_of_job(number))


def can_go_back(gang: Gang) -> bool:
    """Whether an old world that was told to rest, or to hand over, can simply go on: it has given nothing up yet."""
    return gang.intent in (GangIntent.RUN, GangIntent.HAND_OVER) or gang.phase is not GangPhase.PARKED


def rests_for_any_size(state: State, job: JobRecord) -> bool:
    """Whether it waits with its state parked where a world of another size can take it up."""
    gang = state.gangs.get(job.epoch)
    return gang is not None and job.capabilities.resize and gang.rested_level is SuspendLevel.OFFLOAD


def taken_by(gang: Gang, claims: Sequence[Claim]) -> tuple[Claim, ...]:
    """What the change of a gang to these claims takes at once, beside what the gang holds."""
    held = {piece.claim.node: piece.held for piece in gang.pieces}
    return tuple([beside(claim, held.get(claim.node)) for claim in claims])


class _Taken:
    """What worlds hold on nodes before it is another's turn to say what it holds beside."""

    def __init__(self) -> None:
        self.present: Mapping[str, Claim | None] = {}
        self._others: dict[str, Claim] = {}

    def add(self, gang: Gang) -> None:
        for piece in gang.pieces:
            if piece.held is not None:
                before = self._others.get(piece.held.node)
                self._others[piece.held.node] = piece.held if before is None else _sum(before, piece.held)

    def on(self, node: str) -> Claim | None:
        present, others = self.present.get(node), self._others.get(node)
        if present is None or others is None:
            return present or others
        # Of those that leave each still has its own memory, beside what the present one has.
        both = _sum(present, others)
        return replace(both, memory_bytes=present.memory_bytes, arena_bytes=present.arena_bytes)


def _sum(one: Claim, other: Claim) -> Claim:
    cores = zip_longest(one.millicores, other.millicores, fillvalue=0)
    return replace(
        one,
        device_mask=one.device_mask | other.device_mask,
        millicores=tuple([own + beside for own, beside in cores]),
        memory_bytes=one.memory_bytes + other.memory_bytes,
        arena_bytes=one.arena_bytes + other.arena_bytes,
    )


def _hold(state: State, gang: Gang, taken: _Taken) -> bool:
    pieces = tuple([_holding(gang, piece, taken.on(piece.claim.node)) for piece in gang.pieces])
    if pieces == gang.pieces:
        return False
    state.put_gang(replace(gang, pieces=pieces))
    return True


def _holding(gang: Gang, piece: Piece, taken: Claim | None) -> Piece:
    if piece.gone or piece.held is None:
        return piece
    rests = gang.rested_level is SuspendLevel.OFFLOAD
    wanted = orders.kept_offloaded(piece) if rests else piece.claim
    return replace(piece, held=beside(wanted, taken))


def _gives_back(gang: Gang, claims: Sequence[Claim]) -> bool:
    masks = {claim.node: claim.device_mask for claim in claims}
    return any(claim.device_mask & ~masks.get(claim.node, 0) for claim in gang.claims)


def _fits_twice(state: State, job: JobRecord, gang: Gang, claims: Sequence[Claim]) -> bool:
    """Whether the devices that both worlds use have memory for both, each with as much as was seen of the job and what
    its processes keep beside."""
    common = [
        claim.node
        for claim in claims
        if any(own.node == claim.node and own.device_mask & claim.device_mask for own in gang.claims)
    ]
    used = max(job.used_device_bytes, job.spec.gpu_memory_bytes)
    for node in common:
        whole = state.configuration_sets[state.nodes[node].configuration_set].device_memory_bytes
        if not used or 2 * (used + min(state.settings.residue_bytes, used)) > MEMORY_SHARE * whole:
            return False
    return True
