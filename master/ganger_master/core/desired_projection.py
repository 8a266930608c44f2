"""The desired states of nodes as last projected, and what they are made of.

The complete set of one node is plain values, which the wire layer converts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ganger.cluster.resources import Claim, Role, tasks_of
from msgspec import Struct
from msgspec.structs import asdict, replace

from ganger_master.core.gang_model import Gang, GangIntent, Matrix, ObservedPhase, Piece, Restore
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.node_model import Node
from ganger_master.core.settings import CoreSettings

NO_CLAIM = Claim("", 0, (), 0)


class GangMember(Struct, frozen=True, gc=False):
    """One node of a gang; `ranks` ascend. The first member leads."""

    node: str
    peer_address: str
    stream_address: str
    ranks: tuple[int, ...]


class DesiredRestore(Restore, frozen=True, gc=False):
    """`checkpoint_path`, or the arenas of `parked_epoch` on `parked_members`; neither: from the beginning."""

    parked_members: tuple[GangMember, ...] = ()
    # Paths of checkpoints that could not be read.
    unreadable: tuple[str, ...] = ()
    # Those whose own disks have the checkpoint; none: it lies on the storage that all nodes see.
    checkpoint_nodes: tuple[str, ...] = ()


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
    checkpoint_interval_s: float = 0.0
    checkpoint_request: int = 0
    repin_request: int = 0
    grace_s: float = 0.0
    checkpoint_first: bool = False
    # For the leader: paths of the checkpoints that the job would start from. They alone make no new version.
    kept_checkpoints: tuple[str, ...] = ()
    # Its checkpoints are kept on its leader's own disk, and on those of so many nodes in all.
    on_nodes: bool = False
    checkpoint_copies: int = 0
    # How many times the job was started, this time included.
    attempt: int = 1
    # What its processes on the node are held to for a trial of memory; zero: none.
    trial_memory_bytes: int = 0
    # After how long without use of its devices the daemon reports that; zero: not at all.
    idle_after_s: float = 0.0
    # The daemon has not reported that it launched this epoch. Not a change of the desired state.
    needs_spec: bool = True


class DesiredSlices(Struct, frozen=True, gc=False):
    """The slice matrix as a node of the group gets it. The first member leads."""

    node_set: int
    set_epoch: int
    matrix: Matrix
    members: tuple[GangMember, ...]


class DesiredSet(Struct, frozen=True, gc=False):
    """The desired gangs of a node by epoch, then the strays to stop. Gangs that are not named are not desired."""

    version: int = 0
    wanted: tuple[Projected, ...] = ()
    acknowledged_epochs: tuple[int, ...] = ()
    strays: tuple[DesiredGang, ...] = ()
    rows: tuple[DesiredSlices, ...] = ()
    # Epochs of gangs whose orders the daemon is to send.
    describe: tuple[int, ...] = ()

    @property
    def gangs(self) -> tuple[DesiredGang, ...]:
        return (*[one.desired for one in self.wanted], *self.strays)

    def is_like(self, other: DesiredSet) -> bool:
        """Return whether the same is wanted; that a spec need not be sent any more is no change."""
        return (
            self.acknowledged_epochs == other.acknowledged_epochs
            and self.strays == other.strays
            and self.rows == other.rows
            and self.describe == other.describe
            and len(self.wanted) == len(other.wanted)
            and all(
                a is b or replace(a.desired, needs_spec=b.desired.needs_spec) == b.desired
                for a, b in zip(self.wanted, other.wanted, strict=True)
            )
        )


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
    # Of each of its GPUs, under trial; zero: none.
    trial_memory_bytes: int = 0
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
    """A gang's desired state for the node of one of its pieces; it is the same as long as the party is.

    It is made when it is read: many sets are replaced before that."""

    party: Party
    place: int
    _desired: DesiredGang | None = None

    @property
    def desired(self) -> DesiredGang:
        if self._desired is None:
            self._desired = _desired_gang(self.party, self.party.gang.pieces[self.place])
        return self._desired


_NOTHING: Final = DesiredSet()


class DesiredProjection(dict[str, DesiredSet]):
    """The last projection, by node.

    parties: what orders are made of, by epoch. projected: the gangs of each node, by epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parties: dict[int, Party] = {}
        self.projected: dict[str, dict[int, Projected]] = {}

    def of(self, node: str) -> DesiredSet:
        """Return the last projection for a node; empty for a node that never joined."""
        return self.get(node, _NOTHING)

    def forget_gang(self, epoch: int) -> None:
        """Forget what a gang's orders are made of: it is gone, or its spec, checkpoints, addresses or trial changed."""
        self.parties.pop(epoch, None)

    def forget_node(self, name: str) -> None:
        self.pop(name, None)
        self.projected.pop(name, None)


def _desired_gang(party: Party, piece: Piece) -> DesiredGang:
    job, gang, settings = party.job, party.gang, party.settings
    interval = job.spec.checkpoint_interval_s or settings.checkpoint_interval_s
    known = [one for one in (job.checkpoint, job.checkpoint_before) if one is not None]
    leads = party.members[0].node == piece.claim.node
    # A restarted daemon has no record of a part that still waits, for its time slice or for devices.
    waits = piece.phase is ObservedPhase.STARTING and not piece.pids
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
        # Ranks are numbered by the tasks that the gang has.
        spec=job.spec.with_tasks(tasks_of(gang.claims)) if job.spec.has_role_ranges else job.spec,
        user=job.user,
        restore=DesiredRestore(
            **asdict(gang.restore),
            parked_members=party.source.members if party.source else (),
            unreadable=job.unreadable,
            checkpoint_nodes=next((one.nodes for one in known if one.path == gang.restore.checkpoint_path), ()),
        ),
        threads=gang.threads,
        checkpoint_interval_s=max(0.0, interval),
        checkpoint_request=gang.checkpoint_request,
        repin_request=gang.repin_request,
        # Its job continues without a lost piece: if that comes back, it gets no grace.
        grace_s=0.0 if piece.lost else settings.grace_s,
        checkpoint_first=gang.checkpoint_first and not piece.lost,
        # While its leader gets the same paths, no newer checkpoint is durable here.
        kept_checkpoints=tuple([one.path for one in known]) if leads else (),
        on_nodes=gang.on_nodes,
        checkpoint_copies=job.spec.checkpoint_copies if leads and gang.on_nodes else 0,
        attempt=gang.attempt or 1,
        trial_memory_bytes=party.trial_memory_bytes * piece.claim.device_mask.bit_count(),
        idle_after_s=settings.idle_after_s(job.partition.name) if piece.claim.device_mask else 0.0,
        needs_spec=waits or piece.phase is ObservedPhase.NONE,
    )


def ranks_by_claim(roles: Sequence[Role], claims: Sequence[Claim]) -> tuple[tuple[int, ...], ...]:
    """Ranks are numbered role by role and, within a role, claim by claim."""
    ranks: list[list[int]] = [[] for _ in claims]
    following = 0
    for role in range(len(roles)):
        for index, claim in enumerate(claims):
            count = claim.tasks[role] if role < len(claim.tasks) else 0
            ranks[index].extend(range(following, following + count))
            following += count
    return tuple([tuple(own) for own in ranks])


def threads_of(claims: Sequence[Claim]) -> int:
    """Threads per rank: the whole cores of its share on the tightest node, at least one."""
    return max(1, min([sum(claim.millicores) // 1000 // (sum(claim.tasks) or 1) for claim in claims]))
