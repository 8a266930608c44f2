"""The desired state of each node: a pure projection of the state, made once per batch for the nodes that were touched.

A node's version rises exactly when its set changes; versions are drawn from one counter, so that nothing of a node must
become durable for it. The complete set of one node is plain values, which the wire layer converts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.model import (
    Claim,
    Gang,
    GangIntent,
    JobRecord,
    JobSpec,
    Matrix,
    Node,
    ObservedPhase,
    Piece,
    Role,
    Stray,
    SuspendLevel,
)
from ganger_master.core.settings import CoreSettings

if TYPE_CHECKING:
    from ganger_master.core.commands import ObservedGang
    from ganger_master.core.state import State

NO_CLAIM = Claim("", 0, (), 0)


class GangMember(Struct, frozen=True, gc=False):
    """One node of a gang; `ranks` ascend. The first member leads."""

    node: str
    peer_address: str
    stream_address: str
    ranks: tuple[int, ...]


class DesiredRestore(Struct, frozen=True, gc=False):
    """`checkpoint_path`, or the arenas of `parked_epoch` on `parked_members`; neither: from the beginning."""

    checkpoint_path: str = ""
    parked_epoch: int = 0
    parked_members: tuple[GangMember, ...] = ()
    step: int = 0
    alone: bool = False
    peak_device_bytes: int = 0
    # Paths of checkpoints that could not be read.
    unreadable: tuple[str, ...] = ()


class DesiredGang(Struct, frozen=True, gc=False):
    job: int
    uid: str
    epoch: int
    master_sequence: int
    intent: GangIntent
    level: SuspendLevel = SuspendLevel.NONE
    stop_sequence: int = 0
    claim: Claim = NO_CLAIM
    members: tuple[GangMember, ...] = ()
    spec: JobSpec | None = None
    user: str = ""
    restore: DesiredRestore = DesiredRestore()
    threads: int = 1
    checkpoint_interval_seconds: float = 0.0
    checkpoint_request: int = 0
    repin_request: int = 0
    grace_seconds: float = 0.0
    checkpoint_first: bool = False
    # For the leader: paths of the checkpoints that the job would start from. They alone make no new version.
    kept_checkpoints: tuple[str, ...] = ()
    # How many times the job was started, this time included.
    attempt: int = 1
    # The daemon has not reported that it launched this epoch. Not a change of the desired state.
    needs_spec: bool = True


class DesiredSource(Protocol):
    """A gang's desired state on one node, made when it is read: many sets are replaced before that."""

    @property
    def desired(self) -> DesiredGang: ...


class DesiredRows(Struct, frozen=True, gc=False):
    """The slice matrix as a node of the group gets it. The first member leads."""

    node_set: int
    set_epoch: int
    matrix: Matrix
    members: tuple[GangMember, ...]


class DesiredSet(Struct, frozen=True, gc=False):
    """The desired gangs of a node by epoch, then the strays to stop. Gangs that are not named are not desired."""

    version: int = 0
    wanted: tuple[DesiredSource, ...] = ()
    acknowledged_epochs: tuple[int, ...] = ()
    strays: tuple[DesiredGang, ...] = ()
    rows: tuple[DesiredRows, ...] = ()
    # Epochs of gangs whose orders the daemon is to send.
    describe: tuple[int, ...] = ()

    @property
    def gangs(self) -> tuple[DesiredGang, ...]:
        return (*[one.desired for one in self.wanted], *self.strays)


def desired_of(state: State, node: str) -> DesiredSet:
    """Return the last projection for a node; empty for a node that never joined."""
    return state.desired.get(node, _NOTHING)


class Party(Struct, eq=False, gc=False):
    """A gang with all that its orders are made of. They also depend on the job's spec and checkpoints: when those
    change, the state forgets the party."""

    gang: Gang
    job: JobRecord
    settings: CoreSettings
    # Of its pieces: when an address among them changes, the state forgets the party.
    nodes: Sequence[Node | None]
    # The one whose arenas it starts from.
    source: Party | None
    _members: tuple[GangMember, ...] | None = None

    @property
    def members(self) -> tuple[GangMember, ...]:
        """Return all parts of the gang, the node of rank 0 first."""
        if self._members is None:
            members = []
            claims = self.gang.claims
            ranks = ranks_by_claim(self.job.spec.roles, claims)
            for claim, node, own in zip(claims, self.nodes, ranks, strict=True):
                peer, stream = (node.peer_address, node.stream_address) if node else ("", "")
                members.append(GangMember(claim.node, peer, stream, own))
            members.sort(key=lambda member: (0 not in member.ranks, member.ranks))
            self._members = tuple(members)
        return self._members


class Projected(Struct, eq=False, gc=False):
    """A gang's desired state for the node of one of its pieces; it is the same as long as the party is."""

    party: Party
    place: int
    _desired: DesiredGang | None = None

    @property
    def desired(self) -> DesiredGang:
        if self._desired is None:
            self._desired = _desired_gang(self.party, self.party.gang.pieces[self.place])
        return self._desired


def project(state: State, node: Node, version: int = 0) -> DesiredSet:
    """Return the gangs that the node is to have now, by epoch, and the strays that it is to stop.

    During a restore the set is empty and of version zero, with which a daemon begins: it changes nothing then."""
    if state.counters.restoring is not None:
        report = state.reports.get(node.name)
        state.projected[node.name] = {}
        return DesiredSet(describe=() if report is None else undescribed(report[1].gangs))
    known = state.projected.get(node.name, {})
    fresh: dict[int, Projected] = {}
    for epoch, place in state.gangs_on.get(node.name, {}).items():
        gang = state.gangs[epoch]
        piece = gang.pieces[place]
        # A lost piece counts as gone for its job, but is to be stopped should the node come back.
        if not piece.gone or piece.lost:
            party, before = party_of(state, gang), known.get(epoch)
            fresh[epoch] = before if before is not None and before.party is party else Projected(party, place)
    state.projected[node.name] = fresh
    strays = [_desired_stray(state, node.name, stray) for stray in node.strays if not stray.quarantined]
    describe = tuple(
        [
            stray.epoch
            for stray in node.strays
            if stray.quarantined and stray.told is None and stray.phase is not ObservedPhase.ENDED
        ]
    )
    rows = rows_on(state, node.name)
    return DesiredSet(version, tuple(fresh.values()), node.acknowledged, tuple(strays), rows, describe)


def undescribed(gangs: Iterable[ObservedGang]) -> tuple[int, ...]:
    """Return the epochs of living gangs whose orders the daemon has not sent yet."""
    return tuple(sorted({gang.epoch for gang in gangs if gang.told is None and gang.phase is not ObservedPhase.ENDED}))


def rows_on(state: State, node: str) -> tuple[DesiredRows, ...]:
    """Return the slice matrices of a node: that of the one group it is in."""
    number = state.set_on.get(node)
    if number is None:
        return ()
    node_set = state.sets[number]
    others = [name for name in node_set.nodes if name != node_set.leader]
    members = []
    for name in (node_set.leader, *others):
        known = state.nodes.get(name)
        members.append(GangMember(name, known.peer_address if known else "", known.stream_address if known else "", ()))
    return (DesiredRows(number, node_set.set_epoch, node_set.newest, tuple(members)),)


def refresh(state: State) -> list[str]:
    """Project the nodes that were touched; those whose set differs get one new version. Return their names."""
    if not state.tells:
        state.dirty.wants.clear()
        return []
    version = state.counters.desired_version + 1
    if state.counters.restoring is not None:
        return _refresh_restoring(state)
    changed = []
    for name, added in state.dirty.wants.items():
        node = state.nodes.get(name)
        if node is None:
            continue
        if added and not node.strays:
            # They have the newest epochs, so they go last.
            known = state.projected.setdefault(name, {})
            for gang, place in added:
                known[gang.epoch] = Projected(party_of(state, gang), place)
            rows = desired_of(state, name).rows
            state.desired[name] = DesiredSet(version, tuple(known.values()), node.acknowledged, rows=rows)
            changed.append(name)
            continue
        old = state.desired.get(name, _NOTHING)
        new = project(state, node, version)
        is_same = _alike(new, old)
        state.desired[name] = replace(new, version=old.version) if is_same else new
        # A daemon that has just opened a session may have lost its gangs: their specs are not sent again.
        if not is_same or not node.heard:
            changed.append(name)
    state.dirty.wants.clear()
    if changed:
        state.counters.desired_version = version
    return changed


def _refresh_restoring(state: State) -> list[str]:
    changed = [name for name in state.dirty.wants if name in state.nodes]
    for name in changed:
        state.desired[name] = project(state, state.nodes[name])
    state.dirty.wants.clear()
    return changed


def _alike(one: DesiredSet, other: DesiredSet) -> bool:
    """Return whether the same is wanted; that a spec need not be sent any more is no change."""
    return (
        one.acknowledged_epochs == other.acknowledged_epochs
        and one.strays == other.strays
        and one.rows == other.rows
        and one.describe == other.describe
        and len(one.wanted) == len(other.wanted)
        and all(
            a is b or replace(a.desired, needs_spec=b.desired.needs_spec) == b.desired
            for a, b in zip(one.wanted, other.wanted, strict=True)
        )
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


def party_of(state: State, gang: Gang) -> Party:
    known = state.parties.get(gang.epoch)
    parked = state.gangs.get(gang.restore.parked_epoch) if gang.restore.parked_epoch else None
    source = party_of(state, parked) if parked is not None else None
    if known is None or known.gang is not gang or known.source is not source:
        nodes = [state.nodes.get(piece.claim.node) for piece in gang.pieces]
        known = Party(gang, state.jobs[gang.job], state.settings, nodes, source)
        state.parties[gang.epoch] = known
    return known


def threads_of(claims: Sequence[Claim]) -> int:
    """Threads per rank: the whole cores of its share on the tightest node, at least one."""
    return max(1, min([sum(claim.millicores) // 1000 // (sum(claim.tasks) or 1) for claim in claims]))


def _desired_gang(party: Party, piece: Piece) -> DesiredGang:
    job, gang, settings = party.job, party.gang, party.settings
    interval = job.spec.checkpoint_interval_seconds or settings.checkpoint_interval_seconds
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
        members=party.members,
        spec=job.spec,
        user=job.user,
        restore=DesiredRestore(
            restore.checkpoint_path,
            restore.parked_epoch,
            party.source.members if party.source else (),
            restore.step,
            restore.alone,
            restore.peak_device_bytes,
            job.unreadable,
        ),
        threads=gang.threads,
        checkpoint_interval_seconds=max(0.0, interval),
        checkpoint_request=gang.checkpoint_request,
        repin_request=gang.repin_request,
        # Its job goes on without a lost piece: if that comes back, it gets no grace.
        grace_seconds=0.0 if piece.lost else settings.grace_seconds,
        checkpoint_first=gang.checkpoint_first and not piece.lost,
        kept_checkpoints=_kept_checkpoints(job) if party.members[0].node == piece.claim.node else (),
        attempt=1 + job.failures + job.preemptions,
        needs_spec=not _is_begun(piece),
    )


def _kept_checkpoints(job: JobRecord) -> tuple[str, ...]:
    """Return the paths of the checkpoints that the job would start from. While its leader gets the same paths, no newer
    checkpoint is durable here."""
    return tuple([one.path for one in (job.checkpoint, job.checkpoint_before) if one is not None])


def _is_begun(piece: Piece) -> bool:
    """Return whether its daemon has launched a part. A restarted daemon has no record of a part that still waits, for
    its time slice or for devices."""
    return piece.phase is not ObservedPhase.NONE and (piece.phase is not ObservedPhase.STARTING or bool(piece.pids))


_NOTHING: Final = DesiredSet()


def _desired_stray(state: State, node: str, stray: Stray) -> DesiredGang:
    return DesiredGang(
        job=stray.job,
        uid=stray.uid,
        epoch=stray.epoch,
        master_sequence=stray.master_sequence,
        intent=GangIntent.STOP,
        claim=stray.told.claim if stray.told is not None else Claim(node, stray.device_mask, (), 0),
        grace_seconds=state.settings.grace_seconds if stray.is_ordered else 0.0,
        needs_spec=False,
    )
