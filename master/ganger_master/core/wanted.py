"""What a daemon is told to want: the complete set for one node, as values the wire layer converts."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from ganger_master.core.model import Claim, GangIntent, JobSpec, Matrix, SuspendLevel

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
    # The daemon has not yet launched this epoch, as far as it has said. No change of what is wanted.
    needs_spec: bool = True


class DesiredSource(Protocol):
    """What a gang means for one node, made when somebody asks for it: many sets are followed by others unread."""

    @property
    def desired(self) -> DesiredGang: ...


class DesiredRows(Struct, frozen=True, gc=False):
    """When the gangs of a node set run. The first member leads."""

    node_set: int
    set_epoch: int
    matrix: Matrix
    members: tuple[GangMember, ...]


class DesiredSet(Struct, frozen=True, gc=False):
    """All that is wanted on a node, by epoch, then the strays that are not. Gangs not named are not wanted."""

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
