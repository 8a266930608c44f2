"""From the state to what each node is to want: a pure projection, made once per batch for the nodes that were touched.

A node's version rises exactly when its set changes; versions are drawn from one counter, so that nothing of a node must
become durable for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.model import Claim, Gang, Intent, Job, Node, ObservedPhase, Piece, Role, Stray
from ganger_master.core.wanted import DesiredGang, DesiredRestore, DesiredSet, Member

if TYPE_CHECKING:
    from ganger_master.core.state import State


def desired_of(state: State, node: str) -> DesiredSet:
    """What was last projected for a node; empty for one that never joined."""
    return state.desired.get(node, _NOTHING)


class Projected(Struct, frozen=True, gc=False):
    """What a gang means for one node, and all that it was made of: as long as that is the same, so is what it means."""

    gang: Gang
    members: tuple[Member, ...]
    source_members: tuple[Member, ...]
    desired: DesiredGang


def project(state: State, node: Node) -> tuple[DesiredGang, ...]:
    """The gangs the node is to want now, by epoch; then the strays it is to stop."""
    known = state.projected.get(node.name, {})
    fresh: dict[int, Projected] = {}
    for epoch, place in state.gangs_on.get(node.name, {}).items():
        gang = state.gangs[epoch]
        piece = gang.pieces[place]
        # A lost piece counts as gone for its job, but is to be stopped should the node come back.
        if not piece.gone or piece.lost:
            fresh[epoch] = _projected(state, gang, piece, known.get(epoch))
    state.projected[node.name] = fresh
    gangs = [projected.desired for projected in fresh.values()]
    gangs.extend(_desired_stray(state, node.name, stray) for stray in node.strays if not stray.quarantined)
    return tuple(gangs)


def refresh(state: State) -> list[str]:
    """Projects the nodes that were touched anew; those whose set differs from before, under one new version."""
    version = state.counters.desired_version + 1
    changed = []
    for name, added in state.dirty.wants.items():
        node = state.nodes.get(name)
        if node is None:
            continue
        old = state.desired.get(name, _NOTHING)
        if added and not node.strays:
            # They have the newest epochs, so they come last.
            gangs = (*old.gangs, *[_project_one(state, name, epoch) for epoch in added])
            state.desired[name] = DesiredSet(version, gangs, node.acknowledged)
            changed.append(name)
            continue
        gangs = project(state, node)
        is_same = _alike(gangs, old.gangs) and node.acknowledged == old.acknowledged_epochs
        state.desired[name] = DesiredSet(old.version if is_same else version, gangs, node.acknowledged)
        # Who has just opened a session may have lost what it had: no spec is said again of what was begun before.
        if not is_same or not node.heard:
            changed.append(name)
    state.dirty.wants.clear()
    if changed:
        state.counters.desired_version = version
    return changed


def _project_one(state: State, node: str, epoch: int) -> DesiredGang:
    gang = state.gangs[epoch]
    projected = _projected(state, gang, gang.pieces[state.gangs_on[node][epoch]], None)
    state.projected.setdefault(node, {})[epoch] = projected
    return projected.desired


def _alike(one: tuple[DesiredGang, ...], other: tuple[DesiredGang, ...]) -> bool:
    """Whether the same is wanted; that a spec need not be sent any more is no change."""
    return len(one) == len(other) and all(
        a is b or replace(a, needs_spec=b.needs_spec) == b for a, b in zip(one, other, strict=True)
    )


def ranks_by_claim(roles: Sequence[Role], claims: Sequence[Claim]) -> tuple[tuple[int, ...], ...]:
    """Ranks are numbered role by role and, within a role, claim by claim."""
    if len(claims) == 1:
        return (tuple(range(sum(claims[0].tasks[: len(roles)]))),)
    ranks: list[list[int]] = [[] for _ in claims]
    following = 0
    for role in range(len(roles)):
        for index, claim in enumerate(claims):
            count = claim.tasks[role] if role < len(claim.tasks) else 0
            ranks[index].extend(range(following, following + count))
            following += count
    return tuple([tuple(own) for own in ranks])


def members_of(state: State, job: Job, gang: Gang) -> tuple[Member, ...]:
    """Everybody, the node that holds rank 0 first. The state forgets them when a node's addresses change."""
    known = state.members.get(gang.epoch)
    if known is None:
        known = state.members[gang.epoch] = _members(state, job, gang)
    return known


def _members(state: State, job: Job, gang: Gang) -> tuple[Member, ...]:
    members = []
    for claim, ranks in zip(gang.claims, ranks_by_claim(job.spec.roles, gang.claims), strict=True):
        node = state.nodes.get(claim.node)
        peer, stream = (node.peer_address, node.stream_address) if node else ("", "")
        members.append(Member(claim.node, peer, stream, ranks))
    if len(members) > 1:
        members.sort(key=lambda member: (0 not in member.ranks, member.ranks))
    return tuple(members)


def threads_of(claims: Sequence[Claim]) -> int:
    """Threads per rank: the whole cores of its share on the tightest node, at least one."""
    return max(1, min([sum(claim.millicores) // 1000 // (sum(claim.tasks) or 1) for claim in claims]))


def _projected(state: State, gang: Gang, piece: Piece, known: Projected | None) -> Projected:
    parked = gang.restore.parked_epoch
    if known is not None and known.gang is gang and not parked and known.members is state.members.get(gang.epoch):
        return known
    job = state.jobs[gang.job]
    members = members_of(state, job, gang)
    source = state.gangs.get(parked) if parked else None
    source_members = members_of(state, job, source) if source is not None else ()
    # What else it depends on never changes: spec, uid and user of a job, settings.
    if known is not None and known.gang is gang and known.members is members and known.source_members is source_members:
        return known
    return Projected(gang, members, source_members, _desired_gang(state, job, gang, piece, members, source_members))


def _desired_gang(
    state: State, job: Job, gang: Gang, piece: Piece, members: tuple[Member, ...], source_members: tuple[Member, ...]
) -> DesiredGang:
    interval = job.spec.checkpoint_interval_seconds or state.settings.checkpoint_interval_seconds
    restore = gang.restore
    return DesiredGang(
        job=job.number,
        uid=job.uid,
        epoch=gang.epoch,
        master_sequence=gang.master_sequence,
        intent=gang.intent,
        level=gang.park_level,
        stop_sequence=gang.stop_sequence,
        claim=piece.claim,
        members=members,
        spec=job.spec,
        user=job.user,
        restore=_FROM_THE_BEGINNING
        if not (restore.parked_epoch or restore.checkpoint_path or restore.step)
        else DesiredRestore(restore.checkpoint_path, restore.parked_epoch, source_members, restore.step),
        threads=gang.threads,
        checkpoint_interval_seconds=max(0.0, interval),
        checkpoint_request=gang.checkpoint_request,
        repin_request=gang.repin_request,
        grace_seconds=state.settings.grace_seconds,
        checkpoint_first=gang.checkpoint_first,
        needs_spec=piece.phase is ObservedPhase.NONE,
    )


_FROM_THE_BEGINNING: Final = DesiredRestore()
_NOTHING: Final = DesiredSet()


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
