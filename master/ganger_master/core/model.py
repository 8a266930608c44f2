"""The elements of the state, as frozen plain values: jobs, gangs, nodes, counters.

Times are Unix seconds, memory is bytes, cores are millicores, node and job names are bare ("n1", number 7): the wire's
"nodes/n1" and "jobs/7" are the rpc layer's business. `msgspec.json` encodes and decodes every element without hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Final, TypeAlias

from ganger.cluster.resources import Claim, ConfigurationSet, GangShape, Locality, LocalityLevel, NodeRow, Role
from ganger.job_state import JobState
from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ganger_master.core.array_model import Membership
from ganger_master.core.change_reason import NO_PURPOSE, Purpose

__all__ = [
    "Agent",
    "Capabilities",
    "Checkpoint",
    "Claim",
    "ConfigurationSet",
    "Counters",
    "Element",
    "Failure",
    "Gang",
    "GangIntent",
    "GangPhase",
    "GangRole",
    "JobMetric",
    "JobProgress",
    "JobRecord",
    "JobSpec",
    "JobState",
    "Locality",
    "LocalityLevel",
    "Matrix",
    "Node",
    "NodeRow",
    "NodeSet",
    "NodeState",
    "ObservedPhase",
    "Outcome",
    "OutcomeKind",
    "PendingRestore",
    "Piece",
    "Request",
    "Restore",
    "Role",
    "StoredOrder",
    "Stray",
    "SuspendLevel",
]


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


class SuspendLevel(IntEnum):
    """Higher levels keep less."""

    NONE = 0
    PAUSE = 1
    OFFLOAD = 2
    CHECKPOINT = 3


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


class NodeState(StrEnum):
    UNKNOWN = "UNKNOWN"
    READY = "READY"
    SILENT = "SILENT"
    CORDONED = "CORDONED"
    DRAINING = "DRAINING"
    LOST = "LOST"


class Agent(StrEnum):
    AUTOMATIC = "AUTOMATIC"
    NONE = "NONE"


_ANYWHERE: Final = Locality()


class JobSpec(Struct, frozen=True, gc=False, omit_defaults=True):
    """A user's request; `ganger.v1.JobSpec` as plain values. Zero and empty mean what they mean on the wire."""

    command: tuple[str, ...]
    roles: tuple[Role, ...]
    display_name: str = ""
    working_directory: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)
    device_type: str = ""
    locality: Locality = _ANYWHERE
    nodes: int = 0
    priority: int = 0
    time_limit_seconds: float | None = None
    gpu_memory_bytes: int = 0
    max_failures: int = 0
    scheduler: str = ""
    preemptible: bool = True
    # An elastic job also runs with other numbers of devices, whole tasks, in this range; both zero: it is none.
    gpus_min: int = 0
    gpus_max: int = 0
    # Zero takes the cluster's default, negative none.
    checkpoint_interval_seconds: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    agent: Agent = Agent.AUTOMATIC
    # Unix seconds by which it should have ended; zero: whenever.
    deadline: float = 0.0
    # Whether it may be moved for others, or to be closer together.
    movable: bool = True
    # Its share of what it has to share with others, to that of a job of weight 1.
    weight: float = 1.0
    # Its owner counts it as converged once its loss falls by less than this part of the largest decrease in each of
    # that many passes over the data; zero: not given.
    least_decrease: float = 0.0
    converged_passes: int = 1
    # Whether its only task has the variables of torchrun, too.
    distributed: bool = False
    # Set by the master.
    array: Membership | None = None

    @property
    def gpus(self) -> int:
        # Asked for all the time, and most jobs have one role.
        if len(self.roles) == 1:
            return self.roles[0].tasks * self.roles[0].shape.gpus
        return sum([role.tasks * role.shape.gpus for role in self.roles])

    @property
    def tasks(self) -> int:
        return sum([role.tasks for role in self.roles])

    @property
    def is_elastic(self) -> bool:
        return self.gpus_max > 0

    def accepts(self, gpus: int) -> bool:
        """Return whether its gang may have so many devices."""
        if not self.is_elastic:
            return gpus == self.gpus
        return self.gpus_min <= gpus <= self.gpus_max and gpus % self.roles[0].shape.gpus == 0

    def shape(self, arena_bytes_per_device: int = 0, used_device_bytes: int = 0, gpus: int = 0) -> GangShape:
        """With so many devices, which it must accept; zero: with as many as its roles name."""
        named, roles = self.gpu_memory_bytes, self.roles
        needed = named if named > used_device_bytes else used_device_bytes
        if gpus:
            roles = (replace(roles[0], tasks=gpus // roles[0].shape.gpus),)
        return GangShape(roles, self.device_type, self.locality, self.nodes, arena_bytes_per_device, needed)


class Capabilities(Struct, frozen=True, gc=False, omit_defaults=True):
    """The suspend levels that a job offers. All fields are meaningless until `known`.

    `missing`: why a level is not offered, by its name; under MOVE why the job cannot move, under TURNS why it cannot be
    time-sliced. `resize`: its state can be restored by another number of ranks, which must divide `resize_divides`
    (zero: any). `presumed`: no agent has reported yet, perhaps because it is only starting. `withdrawn`: the part of
    `missing` that failed once and is not offered again, whatever the ranks of a later attempt report.
    """

    pause: bool = False
    offload: bool = False
    checkpoint: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    known: bool = False
    resize: bool = False
    resize_divides: int = 0
    presumed: bool = False
    withdrawn: Mapping[str, str] = field(default_factory=dict)

    @property
    def no_turns(self) -> str:
        """Return why it cannot be time-sliced although it can be suspended; empty if it can."""
        return self.missing.get("TURNS", "")

    def without_turns(self, why: str) -> Capabilities:
        return replace(self, missing={**self.missing, "TURNS": why}) if why else self

    def without(self, failed: Mapping[str, str]) -> Capabilities:
        """`failed`: names as in `missing`, and why each is not offered again."""
        withdrawn = {**failed, **self.withdrawn}
        if not withdrawn:
            return self
        return replace(
            self,
            pause=self.pause and "PAUSE" not in withdrawn,
            offload=self.offload and "OFFLOAD" not in withdrawn,
            checkpoint=self.checkpoint and "CHECKPOINT" not in withdrawn,
            resize=self.resize and "RESIZE" not in withdrawn,
            missing={**self.missing, **withdrawn},
            withdrawn=withdrawn,
        )

    def offers(self, level: SuspendLevel) -> bool:
        match level:
            case SuspendLevel.PAUSE:
                return self.pause
            case SuspendLevel.OFFLOAD:
                return self.offload
            case SuspendLevel.CHECKPOINT:
                return self.checkpoint
            case SuspendLevel.NONE:
                return False


class Checkpoint(Struct, frozen=True, gc=False, omit_defaults=True):
    step: int
    epoch: int
    path: str
    size_bytes: int = 0
    create_time: float = 0.0


class JobMetric(Struct, frozen=True, gc=False):
    """A value that a job reported under a name; None: not a number. `step`: boundaries passed by then."""

    name: str
    value: float | None
    step: int = 0


class JobProgress(Struct, frozen=True, gc=False, omit_defaults=True):
    """The progress of an attempt when it was parked or ended. Without a `loss` the job reported no number."""

    epoch: int
    step: int
    samples: int = 0
    loss: float | None = None
    time: float = 0.0
    # Of the attempt, from its first step to its last.
    data_wait_share: float = 0.0
    metrics: tuple[JobMetric, ...] = ()


class Failure(Struct, frozen=True, gc=False, omit_defaults=True):
    """Why a FAILED job failed: EXIT, OUT_OF_MEMORY, TIME_LIMIT, LAUNCH_FAILED, NO_CHECKPOINT, ESCALATED."""

    reason: str
    message: str = ""
    exit_code: int = 0
    rank: int = 0
    epoch: int = 0


class JobRecord(Struct, frozen=True, gc=False, omit_defaults=True):
    number: int
    uid: str
    user: str
    spec: JobSpec
    create_time: float
    request_id: str = ""
    state: JobState = JobState.PENDING
    revision: int = 1
    # Since when it waits, for policies and estimates; zero when it does not.
    pending_since: float = 0.0
    # First step of the first attempt; zero before.
    start_time: float = 0.0
    end_time: float = 0.0
    # Running time of former stretches, and since when the present one lasts (zero: not running).
    run_seconds: float = 0.0
    running_since: float = 0.0
    # The gang that may step, and the destination of a move in progress; zero for none.
    epoch: int = 0
    next_epoch: int = 0
    # Devices of its newest gang, where that are not as many as its roles name; else zero.
    gpus_given: int = 0
    failures: int = 0
    # Failures in a row that came soon, and the end of the backoff for them; zero: it waits only for a place.
    failed_in_row: int = 0
    again_at: float = 0.0
    preemptions: int = 0
    # Moves given up since the last successful one: bounds how often a drain tries again.
    moves_aborted: int = 0
    # How long its last move made it stand still; zero if it was never moved.
    move_pause_seconds: float = 0.0
    # Failed starts since the last step, and the nodes that failed at them.
    launch_failures: int = 0
    launch_failed_on: tuple[str, ...] = ()
    # The newest epoch a committed move left behind: it and older ones never step again.
    moved_from: int = 0
    checkpoint: Checkpoint | None = None
    # The one before it, for when it turns out to be damaged; daemons keep the files of both.
    checkpoint_before: Checkpoint | None = None
    # Paths of those that could not be read, so that none is believed again; until an attempt has one of its own.
    unreadable: tuple[str, ...] = ()
    capabilities: Capabilities = Capabilities()
    peak_device_bytes: int = 0
    # The same, but no more than the devices it ran on have: what others must leave it.
    used_device_bytes: int = 0
    # Progress of the newest attempt that has ended. That of a running one is measured, and not stored.
    progress: JobProgress | None = None
    # The level at which a user's suspend has parked it; NONE until it is parked.
    suspended_level: SuspendLevel = SuspendLevel.NONE
    # The state that it gets once its gangs are gone; None while it is not ending.
    ending: JobState | None = None
    failure: Failure | None = None
    reason: str = ""
    # What went wrong last without ending it, until the next suspend, move or checkpoint.
    trouble: str = ""
    # A member of an array that waits until another has ended: no place is sought for it.
    held: bool = False
    # What it had reported at the rungs of its array's stop rule; None is no number.
    rungs: tuple[float | None, ...] = ()
    # For an updated job: the values as submitted, and its newest updates that had request ids.
    submitted: Submitted | None = None
    updates: tuple[Updated, ...] = ()

    @property
    def name(self) -> str:
        return f"jobs/{self.number}"

    @property
    def submitted_spec(self) -> JobSpec:
        """Without what was updated since."""
        return self.spec if self.submitted is None else replace(self.spec, **asdict(self.submitted))

    @property
    def arena_bytes_per_device(self) -> int:
        """What OFFLOAD needs in host memory: the peak of a device plus a tenth; zero while no peak is known."""
        peak, named = self.peak_device_bytes, self.spec.gpu_memory_bytes
        if named > peak:
            peak = named
        return peak + peak // 10

    @property
    def is_bound(self) -> bool:
        """Return whether it can continue only with as many devices as before: by its place or its checkpoint."""
        return self.epoch > 0 or (self.checkpoint is not None and not self.capabilities.resize)

    @property
    def gpus(self) -> int:
        """Devices of the gang that it has or asks for."""
        return self.gpus_given if self.gpus_given and self.is_bound else self.spec.gpus

    @property
    def shape(self) -> GangShape:
        """Return the shape that it requests now: by its spec, and by its measured memory."""
        return self.shape_with(self.arena_bytes_per_device)

    def shape_with(self, arena_bytes_per_device: int) -> GangShape:
        given = self.gpus_given if self.gpus_given and self.is_bound else 0
        return self.spec.shape(arena_bytes_per_device, self.used_device_bytes, given)


class Update(Struct, frozen=True, gc=False, omit_defaults=True):
    """The changes of an update; None: unchanged. A time limit of zero takes it away; zero cores (of each GPU) and
    bytes (of each task) leave them to the scheduler."""

    display_name: str | None = None
    priority: int | None = None
    time_limit_seconds: float | None = None
    device_type: str | None = None
    locality: Locality | None = None
    memory_bytes: int | None = None
    millicores_per_gpu: int | None = None


class Updated(Struct, frozen=True, gc=False):
    """An update that was carried out, with its request id, so that a repetition changes nothing."""

    request_id: str
    update: Update


class Submitted(Struct, frozen=True, gc=False):
    """The updatable values of a job's spec as submitted, by which a repeated submission is recognised."""

    display_name: str
    priority: int
    time_limit_seconds: float | None
    device_type: str
    locality: Locality
    roles: tuple[Role, ...]


class Request(Struct, frozen=True, gc=False):
    """The request id of a forgotten job: it is not accepted a second time."""

    number: int
    request_id: str
    # When the job was submitted, and its user: each user has ids of its own.
    time: float
    user: str = ""


class Outcome(Struct, frozen=True, gc=False, omit_defaults=True):
    kind: OutcomeKind = OutcomeKind.NONE
    exit_code: int = 0
    rank: int = 0
    message: str = ""
    # Complete checkpoints found on storage, where it could not start from the one in its order.
    checkpoints: tuple[Checkpoint, ...] = ()


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
    # When its processes were first reported, by the master's clock.
    launch_time: float = 0.0


class Restore(Struct, frozen=True, gc=False, omit_defaults=True):
    """The state that a gang starts from: a checkpoint's path, or the arenas of a parked epoch. `step`: the lowest
    acceptable one."""

    checkpoint_path: str = ""
    parked_epoch: int = 0
    step: int = 0
    # Its ranks start on a device only after the parked epoch has given it up.
    alone: bool = False
    # Of one of the parked epoch's devices, as far as was known; zero: not at all.
    peak_device_bytes: int = 0


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
    # The master_sequence at which the present stop began; zero when running is wanted.
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

    @property
    def claims(self) -> tuple[Claim, ...]:
        if len(self.pieces) == 1:
            return (self.pieces[0].claim,)
        return tuple([piece.claim for piece in self.pieces])

    @property
    def parked_claims(self) -> tuple[Claim, ...]:
        """Its placement to have to itself again, with what it keeps of devices there although it holds none, and of
        its memory."""
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
                )
                for piece in self.pieces
            ]
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        if len(self.pieces) == 1:
            return (self.pieces[0].claim.node,)
        return tuple([piece.claim.node for piece in self.pieces])

    @property
    def devices(self) -> int:
        if len(self.pieces) == 1:
            return self.pieces[0].claim.device_mask.bit_count()
        return sum([piece.claim.device_mask.bit_count() for piece in self.pieces])

    @property
    def is_gone(self) -> bool:
        return all(piece.gone for piece in self.pieces)

    def piece(self, node: str) -> Piece | None:
        for piece in self.pieces:
            if piece.claim.node == node:
                return piece
        return None


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


class Stray(Struct, frozen=True, gc=False, omit_defaults=True):
    """A gang reported by a node that the master does not want there.

    `quarantined` ones (unknown job, epoch from the future) are left alone and hold their devices until they end or an
    operator decides; others are older epochs and are stopped. What it was found as stands until it is gone.
    """

    job: int
    uid: str
    epoch: int
    device_mask: int
    master_sequence: int
    quarantined: bool
    note: str = ""
    phase: ObservedPhase = ObservedPhase.NONE
    # Once the daemon has sent it.
    told: StoredOrder | None = None
    # The level at which it is parked.
    level: SuspendLevel = SuspendLevel.NONE
    stop_step: int = 0
    residue_bytes: tuple[int, ...] = ()
    # How it ended.
    outcome: Outcome = Outcome()
    # An operator has ordered its end.
    is_ordered: bool = False
    kept_memory_bytes: int = 0

    @property
    def holds_back(self) -> bool:
        """True if its job must not start beside it."""
        return self.quarantined or self.is_ordered


class Node(Struct, frozen=True, gc=False, omit_defaults=True):
    name: str
    machine_uuid: str
    configuration_set: str
    rack: str = ""
    fabric: str = ""
    peer_address: str = ""
    stream_address: str = ""
    capabilities: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    boot_id: str = ""
    session: str = ""
    # The present session has sent its complete observed set.
    heard: bool = False
    # Its daemon has not called for longer than one without news does.
    silent: bool = False
    # Why calls of its daemon cannot be answered; empty when they can.
    unanswerable: str = ""
    # Lost until it opens a session again.
    lost: bool = False
    cordoned: bool = False
    draining: bool = False
    state_reason: str = ""
    device_faults: Mapping[int, str] = field(default_factory=dict)
    storage_proved: bool = False
    # Of the newest report that was applied.
    observation: int = 0
    applied_version: int = 0
    strays: tuple[Stray, ...] = ()
    # Ended gangs in the newest report whose outcome is kept: the daemon may forget them.
    acknowledged: tuple[int, ...] = ()
    # Gangs in a row that could not be launched here, since its session began or an operator uncordoned it, and the
    # message of the last failure.
    launch_failures: int = 0
    launch_failure: str = ""
    create_time: float = 0.0

    @property
    def state(self) -> NodeState:
        if self.lost:
            return NodeState.LOST
        if not self.heard:
            return NodeState.UNKNOWN
        if self.silent or self.unanswerable:
            return NodeState.SILENT
        if self.draining:
            return NodeState.DRAINING
        return NodeState.CORDONED if self.cordoned else NodeState.READY

    @property
    def takes_gangs(self) -> bool:
        return self.heard and not (self.lost or self.silent or self.unanswerable or self.draining or self.cordoned)

    @property
    def is_choosy(self) -> bool:
        """Return whether there may be jobs that it cannot take, whatever is free."""
        is_closed_to_some = not self.storage_proved or self.capabilities.get("switch_user", "yes") == "no"
        return is_closed_to_some or self.launch_failures > 0


class Matrix(Struct, frozen=True, gc=False, omit_defaults=True):
    """A slice matrix: `rows` are time slices of epochs that run at once, each for a quantum, in turn. An epoch in more
    slices than others has the larger share of the time."""

    version: int
    rows: tuple[tuple[int, ...], ...]
    quantum_seconds: float
    # The level at which a gang is parked between its slices: PAUSE or OFFLOAD.
    level: SuspendLevel

    @property
    def epochs(self) -> frozenset[int]:
        return frozenset([epoch for row in self.rows for epoch in row])


class NodeSet(Struct, frozen=True, gc=False, omit_defaults=True):
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


class PendingRestore(Struct, frozen=True, gc=False, omit_defaults=True):
    """The database is an older copy of what this cluster had. Until all nodes have reported what they run, nothing is
    started, stopped or changed. `why`: what revealed it, as a text for people."""

    since: float
    why: str


class Counters(Struct):
    """The next ids and versions, none of which is given twice. An epoch alone names a gang: it is unique.

    The one element that its state changes in place, because nearly every event counts something: what leaves the state
    is a copy.
    """

    next_job: int = 1
    next_epoch: int = 1
    next_event: int = 1
    next_session: int = 1
    next_set: int = 1
    view_version: int = 0
    # Of the newest set of gangs that any node is to want.
    desired_version: int = 0
    approved: int = 0
    # Gangs are packed, not spread apart: what the load made of it last.
    packs: bool = False
    storage_token: str = ""
    # Name of this database and of all its copies. Daemons and the file beside it record its next ids under this name.
    store: str = ""
    # Epochs [first, end) that were given after this copy was made, or by another master: ascending.
    skipped_epochs: tuple[tuple[int, int], ...] = ()
    restoring: PendingRestore | None = None


Element: TypeAlias = JobRecord | Request | Gang | Node | NodeSet | ConfigurationSet | Counters
