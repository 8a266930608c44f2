"""The commands of the core: requests of users, daemons and schedulers, and the clock. `decide` answers them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from ganger.cluster.refusals import Refusal
from ganger.cluster.resources import STORED_NAMES, Claim, ConfigurationSet
from ganger.job_state import JobState
from msgspec import Struct, field

from ganger_master.core.array_model import StopRule
from ganger_master.core.gang_model import ObservedPhase, Outcome, StoredOrder
from ganger_master.core.job_model import Capabilities, Checkpoint, JobProgress, SuspendLevel
from ganger_master.core.job_spec import JobSpec, Update
from ganger_master.core.node_model import Counters, ListChange, Reservation
from ganger_master.core.plan_changes import CoresCurve, PlanChange, TrialFinding


class SubmitJob(Struct, frozen=True, gc=False):
    """`uid` is made by the shell; `request_id` makes the call idempotent for 24 h."""

    spec: JobSpec
    uid: str
    user: str = ""
    request_id: str = ""
    # The user is no operator: the limits of each user hold.
    limited: bool = False


class SubmitArray(Struct, frozen=True, gc=False):
    """One job of `spec` for each member: (index, parameters), with as many `uids`. See `Membership`."""

    spec: JobSpec
    members: tuple[tuple[int, Mapping[str, str]], ...]
    uids: tuple[str, ...]
    at_once: int = 0
    rule: StopRule | None = None
    user: str = ""
    request_id: str = ""
    # The user is no operator: the limits of each user hold.
    limited: bool = False


class CancelArray(Struct, frozen=True, gc=False):
    number: int
    reason: str = ""
    user: str = ""


class RecordMetric(Struct, frozen=True, gc=False):
    """A member has reached a rung of its array's rule: amount `at` of the resource, with this value of the metric."""

    number: int
    epoch: int
    value: float | None
    at: float


class CancelJob(Struct, frozen=True, gc=False):
    number: int
    reason: str = ""
    user: str = ""


class UpdateJob(Struct, frozen=True, gc=False):
    """`request_id`: requests with the same one are carried out once; empty: each time. `may_end`: update the job even
    if that ends it at once."""

    number: int
    update: Update
    request_id: str = ""
    user: str = ""
    may_end: bool = False


class UpdateArray(Struct, frozen=True, gc=False):
    number: int
    update: Update
    request_id: str = ""
    user: str = ""
    may_end: bool = False


class SuspendJob(Struct, frozen=True, gc=False):
    """NONE takes the level that frees most without leaving memory."""

    number: int
    level: SuspendLevel = SuspendLevel.NONE
    user: str = ""


class ResumeJob(Struct, frozen=True, gc=False):
    number: int
    user: str = ""


class MoveJob(Struct, frozen=True, gc=False):
    """Move a gang to `nodes`. Without `nodes` the placement chooses other ones than the present."""

    number: int
    nodes: tuple[str, ...] = ()
    user: str = ""


class RetuneJob(Struct, frozen=True, gc=False):
    """The job names `millicores` for each task from now on, and gets them; zero leaves them to the scheduler again.
    `repin` asks for other cores of the same number instead."""

    number: int
    millicores: int = 0
    repin: bool = False
    user: str = ""


class ResizeJob(Struct, frozen=True, gc=False):
    """`gpus`: of a job without ranges of roles. `tasks`: (role, number of its tasks) pairs; other roles keep theirs."""

    number: int
    gpus: int
    user: str = ""
    tasks: tuple[tuple[str, int], ...] = ()


class RequestGang(Struct, frozen=True, gc=False):
    """Candidates are tuples of claims in order of preference; none: the scheduler passes, for `blockers`."""

    number: int
    revision: int
    candidates: tuple[tuple[Claim, ...], ...]
    turn: int = 0
    blockers: tuple[Refusal, ...] = ()
    scheduler: str = ""
    # Of the view it was computed from; zero: not given.
    view_version: int = 0


class ReleaseGang(Struct, frozen=True, gc=False):
    number: int
    epoch: int
    scheduler: str = ""


class Line(Struct, frozen=True, gc=False):
    """The waiting jobs in the order of the named policy."""

    numbers: tuple[int, ...]
    policy: str = ""


class KeepPlace(Struct, frozen=True, gc=False):
    """A place that is kept until its job, which waits, starts."""

    number: int
    claims: tuple[Claim, ...]


# The writer judges a plan in one piece, at 50 us a change: other calls wait 15 ms at most.
CHANGES_LIMIT: Final = 250
# Most claims in all changes of a plan, and in all places that it keeps.
CLAIMS_LIMIT: Final = 4_096
LINE_LIMIT: Final = 10_000
KEPT_PLACES_LIMIT: Final = 1_000


class ProposePlan(Struct, frozen=True, gc=False):
    """A plan of the planner. Without a `line`, or `kept_places`, those of the last plan stand."""

    changes: tuple[PlanChange, ...]
    reason: str = ""
    proposer: str = "planner"
    line: Line | None = None
    kept_places: tuple[KeepPlace, ...] | None = None
    findings: tuple[TrialFinding, ...] = ()
    curves: tuple[CoresCurve, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to decide."""
        given = self.changes or self.findings or self.curves
        return not given and self.line is None and self.kept_places is None


class Marks(Struct, frozen=True, gc=False, omit_defaults=True):
    """The next ids and versions of a database as recorded outside it, in the file beside it or by a daemon. A daemon
    has only the first two, and what follows from the ids in its orders."""

    store: str = ""
    desired_version: int = 0
    next_epoch: int = 0
    next_job: int = 0
    next_event: int = 0
    next_session: int = 0
    next_set: int = 0

    @classmethod
    def of(cls, counters: Counters) -> Marks:
        """Return the marks of a database with these counters."""
        return cls(*[getattr(counters, name) for name in cls.__struct_fields__])


NO_MARKS: Final = Marks()


class OpenSession(Struct, frozen=True, gc=False):
    node: str
    machine_uuid: str
    configuration_set: ConfigurationSet
    boot_id: str = ""
    rack: str = ""
    fabric: str = ""
    peer_address: str = ""
    stream_address: str = ""
    capabilities: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    storage_token: str = ""
    seen: Marks = NO_MARKS


_NO_OUTCOME: Final = Outcome()
_NOTHING_KNOWN: Final = Capabilities()


class ObservedGang(Struct, frozen=True, gc=False):
    """A node's part of a gang as its daemon reports it."""

    job: int
    uid: str
    epoch: int
    phase: ObservedPhase
    master_sequence: int = 0
    level: SuspendLevel = SuspendLevel.NONE
    stop_sequence: int = 0
    stop_step: int = 0
    pids: tuple[int, ...] = ()
    outcome: Outcome = _NO_OUTCOME
    checkpoint: Checkpoint | None = None
    peak_device_bytes: int = 0
    capabilities: Capabilities = _NOTHING_KNOWN
    # No rank has reported its capabilities: they are those of an opaque job.
    presumed: bool = False
    arena_bytes: int = 0
    threads: int = 0
    repin_done: int = 0
    trouble: str = ""
    cores: tuple[str, ...] = ()
    device_mask: int = 0
    # Device memory that its processes keep at OFFLOAD, by device of the node; empty while unknown.
    residue_bytes: tuple[int, ...] = ()
    kept_memory_bytes: int = 0
    # Largest working set of its processes so far; zero where it is not measured.
    working_set_bytes: int = 0
    # Of a part that has ended.
    progress: JobProgress | None = None
    # Of the slowest rank: the last step before it was parked, and the first one since it runs.
    last_step_time: float = 0.0
    first_step_time: float = 0.0
    # It has made no step and used no device for as long as the daemon was to wait.
    devices_idle: bool = False
    # The order that the daemon has for it; only where the master requested that.
    newest_order: StoredOrder | None = field(default=None, name="told")
    # It has ended, and one of its ranks did a step in this epoch.
    has_stepped: bool = False


class FinishedGang(Struct, frozen=True, gc=False):
    """A part of a gang that has ended on a node and was acknowledged: the newest of its job there. `nodes`: how many
    the gang had; zero where that was not recorded. `has_stepped`: whether a rank did a step; false where that was not
    recorded."""

    job: int
    uid: str
    epoch: int
    outcome: Outcome = _NO_OUTCOME
    nodes: int = 0
    checkpoint: Checkpoint | None = None
    has_stepped: bool = False


class ObservedSlices(Struct, frozen=True, gc=False, rename=STORED_NAMES):
    """A node's report on its time-slice group: the versions of its active and its newest matrix, the slice that runs,
    the seconds of the last switch (zero: none yet), and the gangs that cannot be time-sliced."""

    node_set: int
    version: int
    known: int
    row: int = 0
    switch_s: float = 0.0
    unable: tuple[int, ...] = ()


class Observe(Struct, frozen=True, gc=False):
    """The complete observed set of a node. Sent for every call with `changed`; others are `NodeAnswered`."""

    node: str
    session: str
    observation: int
    desired_version: int
    gangs: tuple[ObservedGang, ...] = ()
    device_faults: Mapping[int, str] = field(default_factory=dict)
    # Why the node itself is out of service, by source.
    node_faults: Mapping[str, str] = field(default_factory=dict)
    storage_proved: bool = False
    rows: tuple[ObservedSlices, ...] = ()
    # Sent only during a restore.
    finished: tuple[FinishedGang, ...] = ()
    # Devices in service that are slower than they should be, and why, by index.
    device_warnings: Mapping[int, str] = field(default_factory=dict)


class Answer(Struct, frozen=True, gc=False):
    """The shell is about to answer a Reconcile: from this instant the lost-node time counts. Not durable.
    `problem`: why it cannot answer; the node takes no gangs until it can."""

    node: str
    session: str
    desired_version: int = 0
    problem: str = ""


class DrainNode(Struct, frozen=True, gc=False):
    node: str
    reason: str
    user: str = ""


class CordonNode(Struct, frozen=True, gc=False):
    node: str
    reason: str
    user: str = ""


class UncordonNode(Struct, frozen=True, gc=False):
    """`tested`: only once it has passed a test."""

    node: str
    user: str = ""
    tested: bool = False


class DeclareLost(Struct, frozen=True, gc=False):
    node: str
    user: str = ""


class RemoveNode(Struct, frozen=True, gc=False):
    """It does not come back: to be forgotten."""

    node: str
    user: str = ""


class ReserveNodes(Struct, frozen=True, gc=False):
    """Keep nodes for users or for maintenance, for a time."""

    reservation: Reservation
    user: str = ""


class UpdateReservation(Struct, frozen=True, gc=False):
    """Change a reservation that is not over. None: as it is. `start` without `duration_s` leaves its duration. No
    `users`: maintenance."""

    name: str
    nodes: tuple[str, ...] | None = None
    start: float | None = None
    duration_s: float | None = None
    users: tuple[str, ...] | None = None
    reason: str | None = None
    lead_s: float | None = None
    user: str = ""
    nodes_change: ListChange = ListChange.REPLACE
    users_change: ListChange = ListChange.REPLACE


class CreateToken(Struct, frozen=True, gc=False):
    """Let a person call as the user `holder`. `name` and `digest` are made by the shell, of a text that it shows once.
    `user`: the operator."""

    name: str
    digest: str
    holder: str
    lasts_s: float
    user: str = ""


class RevokeToken(Struct, frozen=True, gc=False):
    name: str
    user: str = ""


class DeleteReservation(Struct, frozen=True, gc=False):
    """End a reservation, or forget one that has not begun."""

    name: str
    user: str = ""


class NoteCopies(Struct, frozen=True, gc=False):
    """The daemon of a node has found checkpoints on its disk that are not known to be there: job and path of each."""

    node: str
    session: str
    copies: tuple[tuple[int, str], ...]


class NoteSlowNode(Struct, frozen=True, gc=False):
    """Jobs step more slowly on a node than elsewhere, as `reason` has it; empty: they do no longer."""

    node: str
    reason: str


class OpenStore(Struct, frozen=True, gc=False):
    """The shell has read the database. `name`: what it is called from now on if it has no name yet; `marks`: of the
    file beside it, None where there is none; `must_have_marks`: that file exists unless this is a copy;
    `is_restored`: the operator states that it was restored."""

    name: str
    marks: Marks | None = None
    must_have_marks: bool = False
    is_restored: bool = False


class RecordedEnd(Struct, frozen=True, gc=False):
    """How a job ended, as recorded beside the database or on storage. `state`: None where only the end is recorded."""

    state: JobState | None
    time: float


class NoteEnds(Struct, frozen=True, gc=False):
    """Recorded ends of jobs that are live in the database, by uid. The shell sends it once after a restore."""

    ends: Mapping[str, RecordedEnd]


class GoOn(Struct, frozen=True, gc=False):
    """After a restore: settle with what has been reported, without the nodes that are still missing."""

    user: str = ""


class EndQuarantined(Struct, frozen=True, gc=False):
    """Kill a quarantined gang on all its nodes."""

    uid: str
    epoch: int
    user: str = ""


class AdoptQuarantined(Struct, frozen=True, gc=False):
    """Take a quarantined gang as the one of its job. A job that is not known is made from the gang's order."""

    uid: str
    epoch: int
    user: str = ""


class ClaimTurns(Struct, frozen=True, gc=False):
    """A lease stream opened or closed: it claims these jobs, or is a default host when it claims none. `alone`: until
    it opened there was no default host, so no host received the leases given to default hosts."""

    scheduler: str
    jobs: tuple[int, ...] = ()
    connected: bool = True
    alone: bool = False


class Tick(Struct, frozen=True, gc=False):
    """Time has passed. The shell sends a tick at the last `wake_at`, and before all else when the clock was set (by
    `set_by` seconds, forward or back) or the master stood still. `looks_again`: the shell has lost what it did not
    store; draw the consequences of the nodes' reports anew. `newest_sent`: the newest lease that was sent; None where
    leases are sent at once."""

    set_by: float = 0.0
    stood_still: bool = False
    looks_again: bool = False
    newest_sent: int | None = field(default=None, name="told")


JobCommand: TypeAlias = SubmitJob | CancelJob | UpdateJob | SuspendJob | ResumeJob | MoveJob | RetuneJob | ResizeJob
ArrayCommand: TypeAlias = SubmitArray | CancelArray | UpdateArray | RecordMetric
NodeCommand: TypeAlias = DrainNode | CordonNode | UncordonNode | DeclareLost | RemoveNode
ReservationCommand: TypeAlias = ReserveNodes | UpdateReservation | DeleteReservation
TokenCommand: TypeAlias = CreateToken | RevokeToken
RestoreCommand: TypeAlias = OpenStore | NoteEnds | GoOn | EndQuarantined | AdoptQuarantined
SessionCommand: TypeAlias = (
    RequestGang
    | ReleaseGang
    | ProposePlan
    | ClaimTurns
    | Observe
    | Answer
    | OpenSession
    | NoteCopies
    | NoteSlowNode
    | Tick
)
Command: TypeAlias = (
    JobCommand | ArrayCommand | NodeCommand | ReservationCommand | TokenCommand | RestoreCommand | SessionCommand
)
