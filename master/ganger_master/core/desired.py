"""From the state to what each node is to want: a pure projection. Its version rises exactly when it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ganger_master.core.model import Claim, Gang, Intent, Job, Node, ObservedPhase, Role, Stray
from ganger_master.core.wanted import DesiredGang, DesiredRestore, DesiredSet, Member

if TYPE_CHECKING:
    from ganger_master.core.state import State


def desired_of(state: State, node: str) -> DesiredSet:
    """What was last projected for a node; empty for one that never joined."""
    return state.desired.get(node, DesiredSet())


def project(state: State, node: Node) -> DesiredSet:
    """What the node is to want now, under its present version."""
    gangs = [
        _desired_gang(state, state.jobs[gang.job], gang, node.name)
        for gang in (state.gangs[epoch] for epoch in sorted(state.gangs_on.get(node.name, ())))
        if _is_wanted_on(gang, node.name)
    ]
    gangs.extend(_desired_stray(state, node.name, stray) for stray in node.strays if not stray.quarantined)
    return DesiredSet(node.desired_version, tuple(gangs), node.acknowledged)


def ranks_by_claim(roles: Sequence[Role], claims: Sequence[Claim]) -> tuple[tuple[int, ...], ...]:
    """Ranks are numbered role by role and, within a role, claim by claim."""
    ranks: list[list[int]] = [[] for _ in claims]
    following = 0
    for role in range(len(roles)):
        for index, claim in enumerate(claims):
            count = claim.tasks[role] if role < len(claim.tasks) else 0
            ranks[index].extend(range(following, following + count))
            following += count
    return tuple(tuple(own) for own in ranks)


def members_of(state: State, job: Job, gang: Gang) -> tuple[Member, ...]:
    """Everybody, the node that holds rank 0 first."""
    members = []
    for claim, ranks in zip(gang.claims, ranks_by_claim(job.spec.roles, gang.claims), strict=True):
        node = state.nodes.get(claim.node)
        peer, stream = (node.peer_address, node.stream_address) if node else ("", "")
        members.append(Member(claim.node, peer, stream, ranks))
    return tuple(sorted(members, key=lambda member: (0 not in member.ranks, member.ranks)))


def threads_of(claims: Sequence[Claim]) -> int:
    """Threads per rank: the whole cores of its share on the tightest node, at least one."""
    return max(1, min(sum(claim.millicores) // 1000 // max(1, sum(claim.tasks)) for claim in claims))


def _is_wanted_on(gang: Gang, node: str) -> bool:
    # A lost piece counts as gone for its job, but is to be stopped should the node come back.
    piece = gang.piece(node)
    return piece is not None and (not piece.gone or piece.lost)


def _desired_gang(state: State, job: Job, gang: Gang, node: str) -> DesiredGang:
    piece = gang.piece(node)
    assert piece is not None
    interval = job.spec.checkpoint_interval_seconds or state.settings.checkpoint_interval_seconds
    return DesiredGang(
        job=job.number,
        uid=job.uid,
        epoch=gang.epoch,
        master_sequence=gang.master_sequence,
        intent=gang.intent,
        level=gang.park_level,
        stop_sequence=gang.stop_sequence,
        claim=piece.claim,
        members=members_of(state, job, gang),
        spec=job.spec,
        user=job.user,
        restore=_restore_of(state, job, gang),
        threads=gang.threads,
        checkpoint_interval_seconds=max(0.0, interval),
        checkpoint_request=gang.checkpoint_request,
        repin_request=gang.repin_request,
        grace_seconds=state.settings.grace_seconds,
        checkpoint_first=gang.checkpoint_first,
        needs_spec=piece.phase is ObservedPhase.NONE,
    )


def _restore_of(state: State, job: Job, gang: Gang) -> DesiredRestore:
    restore = gang.restore
    source = state.gangs.get(restore.parked_epoch)
    members = members_of(state, job, source) if source else ()
    return DesiredRestore(restore.checkpoint_path, restore.parked_epoch, members, restore.step)


def _desired_stray(state: State, node: str, stray: Stray) -> DesiredGang:
    return DesiredGang(
        job=stray.job,
        uid=stray.uid,
        epoch=stray.epoch,
        master_sequence=stray.master_sequence,
        intent=Intent.STOP,
        claim=Claim(node, stray.device_mask, (), 0),
        grace_seconds=state.settings.grace_seconds,
        needs_spec=False,
    )


def refresh(state: State, name: str) -> bool:
    """Projects a node anew; raises its version if that differs from before. True if it did."""
    node = state.nodes[name]
    old = state.desired.get(name, DesiredSet())
    fresh = project(state, node)
    if (fresh.gangs, fresh.acknowledged_epochs) == (old.gangs, old.acknowledged_epochs):
        state.desired[name] = replace(fresh, version=old.version or node.desired_version)
        return False
    version = node.desired_version + 1
    state.put_node(replace(node, desired_version=version))
    state.desired[name] = replace(fresh, version=version)
    for desired in fresh.gangs:
        _note_first_wanted(state, desired.epoch, name, version)
    return True


def _note_first_wanted(state: State, epoch: int, node: str, version: int) -> None:
    gang = state.gangs.get(epoch)
    piece = gang.piece(node) if gang else None
    if gang is not None and piece is not None and piece.wanted_from == 0:
        pieces = tuple(replace(p, wanted_from=version) if p is piece else p for p in gang.pieces)
        state.put_gang(replace(gang, pieces=pieces))
