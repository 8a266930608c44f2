"""Packing: who may be on devices of whom, and what it makes of those who are joined there.

A device that several gangs hold is held as long as one of them does. A claim says of which devices it shares
(`shared_mask`): a newcomer's because its plan says so, a host's because somebody has joined it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Final

from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.topology import bits
from msgspec.structs import replace

from ganger_master.core import gang_orders as orders
from ganger_master.core.model import Claim, Gang, JobRecord, Piece
from ganger_master.core.state import State
from ganger_master.core.worlds import has_two_worlds

# What a node says whose daemon runs several gangs on a device at once.
CAPABILITY: Final = "packing"
_NOBODY: Final = -1


def rules(state: State, job: JobRecord, claims: Sequence[Claim]) -> tuple[Refusal, ...]:
    """What keeps a job from sharing devices on these nodes, whatever room there is."""
    nodes = [claim.node for claim in claims if claim.shared_mask and claim.node in state.nodes]
    if nodes and not job.spec.preemptible:
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
    """Of the nodes where the claims share devices, as `fit` has it: bytes that those need who hold each device, by what
    they name and what was measured. Nobody joins who is not to be suspended, of whom nothing is known, who is being
    resized, who takes turns there, or its own job; nor, with `agreed_only`, who does not share the device already."""
    found = {}
    for claim in claims:
        if claim.shared_mask and claim.node in state.nodes:
            found[claim.node] = _company_on(state, job, claim, agreed_only)
    return found


def join(state: State, epoch: int, now: float, cause: str) -> None:
    """A gang has come to its place: whoever holds devices there too, shares them from now on."""
    gang = state.gangs[epoch]
    for piece in gang.pieces:
        if not piece.claim.shared_mask:
            continue
        for other, _ in _others_on(state, piece.claim, epoch):
            _let_in(state, other, piece.claim, now, cause)


def beside(state: State, gang: Gang) -> tuple[int, ...]:
    """Numbers of the jobs that hold devices of a gang, too, in order."""
    found = {
        other.job
        for piece in gang.pieces
        if piece.held is not None and piece.held.shared_mask
        for other, _ in _others_on(state, piece.held, gang.epoch)
    }
    return tuple(sorted(found - {gang.job}))


def leave(state: State, gang: Gang) -> None:
    """A gang is gone from everywhere: whoever shared devices with it alone has them to itself again, mark and all. A
    gang that rests keeps its mark, and those it was beside theirs: it may come back."""
    for piece in gang.pieces:
        if not piece.claim.shared_mask:
            continue
        node = piece.claim.node
        there = [(state.gangs[epoch], place) for epoch, place in state.gangs_on.get(node, {}).items()]
        for other, place in there:
            own = other.pieces[place].claim
            others = [one.pieces[at].claim.device_mask for one, at in there if one is not other]
            left = own.shared_mask & functools.reduce(operator.or_, others, stray_devices(state, node))
            if left != own.shared_mask:
                state.put_gang(orders.marked(other, node, left))


def stray_devices(state: State, node: str) -> int:
    """Return the devices of a node that gangs have which the master did not start: shared ones stay marked."""
    strays = state.nodes[node].strays if node in state.nodes else ()
    return functools.reduce(operator.or_, [stray.device_mask for stray in strays], 0)


def _company_on(state: State, job: JobRecord, claim: Claim, agreed_only: bool) -> tuple[int, ...]:
    """By device of the node; of those that are not to be shared nothing is said."""
    devices = state.view.topology(claim.node).devices
    needed: list[list[int]] = [[] for _ in range(devices)]
    for epoch, place in state.gangs_on.get(claim.node, {}).items():
        gang = state.gangs[epoch]
        held = gang.pieces[place].held
        if held is None or not held.device_mask & claim.shared_mask:
            continue
        other = state.jobs[gang.job]
        size = other.shape.device_memory_bytes
        is_open = gang.job != job.number and other.spec.preemptible and size > 0
        is_open = is_open and epoch not in state.set_of and not has_two_worlds(state, gang.job)
        for device in bits(held.device_mask & claim.shared_mask):
            agrees = is_open and (not agreed_only or bool(held.shared_mask >> device & 1))
            needed[device].append(size if agrees else _NOBODY)
    return tuple([sum(sizes) if sizes and min(sizes) >= 0 else _NOBODY for sizes in needed])


def _others_on(state: State, claim: Claim, epoch: int) -> list[tuple[Gang, Piece]]:
    found = []
    for other, place in list(state.gangs_on.get(claim.node, {}).items()):
        piece = state.gangs[other].pieces[place]
        if other != epoch and piece.held is not None and piece.held.device_mask & claim.device_mask:
            found.append((state.gangs[other], piece))
    return found


def _let_in(state: State, gang: Gang, newcomer: Claim, now: float, cause: str) -> None:
    sharing = orders.let_in(gang, newcomer)
    if sharing is gang:
        return
    state.put_gang(sharing)
    job = state.jobs[gang.job]
    # Whoever planned for it alone plans anew.
    state.put_job(replace(job, revision=job.revision + 1))
    state.history(now, job, "gang_joined", cause, epoch=gang.epoch, node=newcomer.node)
