"""Gangs and time-slice groups as frozen plain values. Units as in `job_model`."""

from __future__ import annotations

from enum import StrEnum

from ganger.cluster.resources import STORED_NAMES, Claim, LocalityLevel, less_bandwidth
from msgspec import Struct
from msgspec.structs import replace

from ganger_master.core.job_model import Capabilities, Checkpoint, SuspendLevel
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import NO_PURPOSE, Purpose


class GangPhase(StrEnum):
    """Phase of a gang as users see it."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PARKED = "PARKED"
    MOVING = "MOVING"
    RESIZING = "RESIZING"
    STOPPING = "STOPPING"


class GangRole(StrEnum):
    """Which of a job's gangs this one is. At most one ACTIVE and one DESTINATION; only the ACTIVE one may step."""

    ACTIVE = "ACTIVE"
    # Being prepared; becomes ACTIVE by the commit of the move.
    DESTINATION = "DESTINATION"
    # The parked copy a move came from, kept until the new gang has stepped.
    SOURCE = "SOURCE"
    # Over: stopped wherever it still is, then forgotten.
    LEAVING = "LEAVING"


class GangIntent(StrEnum):
    RUN = "RUN"
    PREPARE = "PREPARE"
    PARK = "PARK"
    HAND_OVER = "HAND_OVER"
    STOP = "STOP"


class ObservedPhase(StrEnum):
    """Phase of one node's part of a gang, as its daemon reports it; NONE before the first report."""

    NONE = "NONE"
    STARTING = "STARTING"
    PREPARED = "PREPARED"
    READY = "READY"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    PARKED = "PARKED"
    ENDED = "ENDED"


class OutcomeKind(StrEnum):
    NONE = "NONE"
    DONE = "DONE"
    YIELDED = "YIELDED"
    FAILED = "FAILED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    STOPPED = "STOPPED"
    UNKNOWN = "UNKNOWN"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    FENCED = "FENCED"
    ESCALATED = "ESCALATED"
    STATE_UNREADABLE = "STATE_UNREADABLE"
    # Storage has a newer checkpoint than the one it was to start from: nothing was started.
    STATE_OUTDATED = "STATE_OUTDATED"


class Outcome(Struct, frozen=True, gc=False, omit_defaults=True):
    kind: OutcomeKind = OutcomeKind.NONE
    exit_code: int = 0
    rank: int = 0
    message: str = ""
    # Complete checkpoints found on storage, where it could not start from the one in its order.
    checkpoints: tuple[Checkpoint, ...] = ()
    # What is wrong with the node, by its prolog or epilog: the node is at fault, and not the job.
    node_fault: str = ""


class Piece(Struct, frozen=True, gc=False, omit_defaults=True):
    """A gang's part on one node: what it holds there, and its last report."""

    # The placement, unchanged while the gang lives (RETUNE changes its millicores).
    claim: Claim
    # What the view counts as held now; None once free.
    held: Claim | None
    phase: ObservedPhase = ObservedPhase.NONE
    level: SuspendLevel = SuspendLevel.NONE
    # Highest order the daemon obeyed or obeys.
    master_sequence: int = 0
    stop_sequence: int = 0
    stop_step: int = 0
    outcome: Outcome = Outcome()
    trouble: str = ""
    # By local rank order.
    pids: tuple[int, ...] = ()
    cores: tuple[str, ...] = ()
    threads: int = 0
    repin_done: int = 0
    arena_bytes: int = 0
    capabilities: Capabilities = Capabilities()
    # Desired version with which the gang was first wanted on the node: only then absence means something.
    wanted_from: int = 0
    # Nothing of it is left on the node, or the node is lost and counts as such for the job.
    gone: bool = False
    lost: bool = False
    # What its processes kept of each of the node's devices when they last offloaded; empty for nothing.
    residue_bytes: tuple[int, ...] = ()
    # Bytes of the claimed memory that they keep while they rest at OFFLOAD; zero: all of it.
    kept_memory_bytes: int = 0
    # By the node's clock: the last step before the present rest, and the first one since it runs; zero while unknown.
    last_step_time: float = 0.0
    first_step_time: float = 0.0
    # When its processes were first reported, and since when they use no device, by the master's clock; zero for the
    # latter: they use one, or are suspended.
    launch_time: float = 0.0
    idle_since: float = 0.0


class Idleness(Struct, frozen=True, gc=False, omit_defaults=True):
    """The state of a gang that does not use its devices. `since`: at the latest, in Unix seconds; `park_time`: when it
    is, or was, parked for it, zero: not at all; `park_refusal`: why it is not, although the
    settings have a time; empty otherwise."""

    since: float
    park_time: float = 0.0
    park_refusal: str = ""


class Restore(Struct, frozen=True, gc=False, omit_defaults=True):
    """The state that a gang starts from: a checkpoint's path, or arenas of a parked epoch. `step`: the lowest one."""

    checkpoint_path: str = ""
    parked_epoch: int = 0
    step: int = 0
    # Its ranks start on a device only after the parked epoch has given it up.
    alone: bool = False
    # Of one of the parked epoch's devices, as far as was known; zero: not at all.
    peak_device_bytes: int = 0
    # The parked epoch gives images of its processes, and not what they have put into their arenas.
    is_process_image: bool = False


class Gang(Struct, frozen=True, gc=False, omit_defaults=True):
    """One attempt on one placement. The first piece's node holds rank 0 and leads."""

    epoch: int
    job: int
    role: GangRole
    phase: GangPhase
    pieces: tuple[Piece, ...]
    level: LocalityLevel
    create_time: float
    intent: GangIntent = GangIntent.RUN
    park_level: SuspendLevel = SuspendLevel.NONE
    # Rises with every change of what is wanted.
    master_sequence: int = 1
    # The master_sequence at which the present stop began, with EPOCH_BIT where it waits for the end of an epoch; zero
    # when running is wanted.
    stop_sequence: int = 0
    # Where every rank stopped, once all are parked.
    stop_step: int = 0
    restore: Restore = Restore()
    threads: int = 1
    checkpoint_request: int = 0
    repin_request: int = 0
    checkpoint_first: bool = False
    # Whether its first step was reported; since when the phase stands.
    stepped: bool = False
    since: float = 0.0
    # Parked by the planner: the job stays HOLDING.
    parked_by_plan: bool = False
    # A plan stops it, or moves its job away, at the end of an epoch.
    stops_at_epoch_end: bool = False
    # The level at which it is parked, also while a deeper one is ordered; NONE once it runs.
    rested_level: SuspendLevel = SuspendLevel.NONE
    # When a part last reported that the desired level is not available; zero: never.
    refused_at: float = 0.0
    # The group in which it is time-sliced; zero: none.
    node_set: int = 0
    # The reason of its move to this place, or of its being parked here.
    purpose: Purpose = NO_PURPOSE
    # It follows a world of another size, that of the epoch it restores from, and has pieces in common with it.
    resizes: bool = False
    # The number of the start that it belongs to, as its ranks have it; zero in records of old.
    attempt: int = 0
    # Its checkpoints are kept on its leader's own disk.
    on_nodes: bool = False
    # It runs without using its devices, or is parked for that.
    idle: Idleness | None = None

    @property
    def claims(self) -> tuple[Claim, ...]:
        return tuple([piece.claim for piece in self.pieces])

    @property
    def held(self) -> tuple[Claim, ...]:
        """What its pieces hold; less than its claims where it is parked."""
        return tuple([piece.held for piece in self.pieces if piece.held is not None])

    @property
    def parked_claims(self) -> tuple[Claim, ...]:
        """Its placement to have to itself again, with the memory and device memory that it keeps there."""
        return tuple(
            [
                replace(
                    piece.claim,
                    parked_bytes=piece.held.parked_bytes if piece.held is not None else (),
                    shared_mask=0,
                    parked_memory_bytes=piece.held.memory_bytes if piece.held is not None else 0,
                )
                for piece in self.pieces
            ]
        )

    @property
    def lacking_claims(self) -> tuple[Claim, ...]:
        """Claims for what it needs to run where it is parked, beyond what it keeps there."""
        return tuple(
            [
                replace(
                    piece.claim,
                    memory_bytes=max(0, piece.claim.memory_bytes - (piece.held.memory_bytes if piece.held else 0)),
                    arena_bytes=0,
                    shared_mask=0,
                    bandwidth=less_bandwidth(piece.claim.bandwidth, piece.held.bandwidth if piece.held else ()),
                )
                for piece in self.pieces
            ]
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple([piece.claim.node for piece in self.pieces])

    @property
    def devices(self) -> int:
        return sum([piece.claim.device_mask.bit_count() for piece in self.pieces])

    @property
    def is_gone(self) -> bool:
        return all(piece.gone for piece in self.pieces)

    def piece(self, node: str) -> Piece | None:
        for piece in self.pieces:
            if piece.claim.node == node:
                return piece
        return None


def uses_otherwise(old: Gang, gang: Gang) -> bool:
    """Return whether a change of a gang may change what its job is charged for."""
    if (old.node_set, old.stepped) != (gang.node_set, gang.stepped):
        return True
    pairs = zip(old.pieces, gang.pieces, strict=True)
    return any(before.held != piece.held or before.lost != piece.lost for before, piece in pairs)


class StoredOrder(Struct, frozen=True, gc=False, omit_defaults=True):
    """The newest order that a daemon has for a gang, as stored on its disk. `nodes`: all members of the gang,
    the leader first. `spec` is None where the daemon's copy cannot be read as a job."""

    master_sequence: int
    intent: GangIntent
    claim: Claim
    nodes: tuple[str, ...]
    level: SuspendLevel = SuspendLevel.NONE
    stop_sequence: int = 0
    user: str = ""
    spec: JobSpec | None = None
    restore: Restore = Restore()
    threads: int = 1
    checkpoint_request: int = 0
    repin_request: int = 0
    # It is in a time-slice group: when it runs follows from the group's slice matrix.
    is_sliced: bool = False


class Matrix(Struct, frozen=True, gc=False, omit_defaults=True, rename=STORED_NAMES):
    """A slice matrix: `rows` are time slices of epochs that run at once, each for a quantum, in turn. An epoch in more
    slices than others has the larger share of the time."""

    version: int
    rows: tuple[tuple[int, ...], ...]
    quantum_s: float
    # The level at which a gang is parked between its slices: PAUSE or OFFLOAD.
    level: SuspendLevel

    @property
    def epochs(self) -> frozenset[int]:
        return frozenset([epoch for row in self.rows for epoch in row])


class TimesliceGroup(Struct, frozen=True, gc=False, omit_defaults=True):
    """A time-slice group: nodes whose gangs are time-sliced, led by one of them. No node is in two groups."""

    number: int
    nodes: tuple[str, ...]
    leader: str
    active: Matrix
    # The next matrix, until every node has made it the active one: what is held is held for both.
    coming: Matrix | None = None
    # Raised with every other leader.
    set_epoch: int = 1

    @property
    def newest(self) -> Matrix:
        return self.coming or self.active

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """All that may run at once, now and soon."""
        return self.active.rows if self.coming is None else self.active.rows + self.coming.rows
