"""Jobs as the master records them, as frozen plain values. `core.job_spec` has the descriptions of users.

Times are Unix seconds, memory is bytes, cores are millicores, node and job names are bare ("n1", number 7): the wire's
"nodes/n1" and "jobs/7" are made by the rpc layer. `msgspec.json` encodes and decodes every value without hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

from ganger.cluster.resources import STORED_NAMES, Claim, GangShape, tasks_of
from ganger.job_state import JobState
from ganger.protocol.gang_orders import Mechanism
from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ganger_master.core.array_model import MEMBERS_LIMIT
from ganger_master.core.job_spec import Dependency, JobSpec, Submitted, Updated
from ganger_master.core.tenancy import NO_TERMS, TIER, PartitionTerms


class SuspendLevel(IntEnum):
    """Higher levels keep less."""

    NONE = 0
    PAUSE = 1
    OFFLOAD = 2
    CHECKPOINT = 3


_SIGNAL: Final = Mechanism.SIGNAL


# Margin beside a quarter of the working set: to restore a state takes memory of its own. Needs are rounded up.
_MEMORY_MARGIN_BYTES: Final = 1 << 30
_MEMORY_STEP_BYTES: Final = 64 << 20
# In place of a measured working set: more than the share of any node.
WHOLE_SHARE: Final = 1 << 60


class RefusedMechanism(Struct, frozen=True, gc=False):
    """A mechanism that does not apply to a job, and why."""

    mechanism: Mechanism
    reason: str


class Capabilities(Struct, frozen=True, gc=False, omit_defaults=True):
    """The suspend levels that a job offers. All fields are meaningless until `known`.

    `missing`: why a level is not offered, by its name; under MOVE why the job cannot move, under TURNS why it cannot be
    time-sliced. `resize`: its state can be restored by another number of ranks, which must divide `resize_divides`
    (zero: any); `reshard`: only from a checkpoint on storage. `role_divides`: what numbers of tasks must divide, by
    role. `presumed`: no agent has reported yet, perhaps because it is only starting. `withdrawn`: the part of `missing`
    that failed once and is not offered again, whatever the ranks of a later attempt report.
    `refused_mechanisms`: stronger ones than the one in use, strongest first; `offload_by`: how OFFLOAD is done where
    no agent does it.
    """

    pause: bool = False
    offload: bool = False
    checkpoint: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    known: bool = False
    resize: bool = False
    resize_divides: int = 0
    role_divides: tuple[int, ...] = ()
    reshard: bool = False
    presumed: bool = False
    withdrawn: Mapping[str, str] = field(default_factory=dict)
    mechanism: Mechanism = Mechanism.UNSPECIFIED
    refused_mechanisms: tuple[RefusedMechanism, ...] = ()
    offload_by: str = ""

    @property
    def starts_at_any_size(self) -> bool:
        """Return whether another number of ranks can start from its checkpoint."""
        return self.resize or self.reshard

    @property
    def no_turns(self) -> str:
        """Return why it cannot be time-sliced although it can be suspended; empty if it can."""
        return self.missing.get("TURNS", "")

    @property
    def can_hand_over(self) -> bool:
        """Return whether the job's state can be captured, carried elsewhere, and restored in another process."""
        return (self.offload or self.checkpoint) and "MOVE" not in self.missing and self.mechanism is not _SIGNAL

    @property
    def can_move(self) -> bool:
        """Return whether the job can continue elsewhere, if only by starting again from the files of its script."""
        return self.can_hand_over or (self.mechanism is _SIGNAL and self.checkpoint)

    def without_turns(self, why: str) -> Capabilities:
        return replace(self, missing={**self.missing, "TURNS": why}) if why else self

    def without(self, failed: Mapping[str, str]) -> Capabilities:
        """Return the capabilities without levels that failed. `failed`: the reason by name, as in `missing`."""
        withdrawn = {**failed, **self.withdrawn}
        if not withdrawn:
            return self
        return replace(
            self,
            pause=self.pause and "PAUSE" not in withdrawn,
            offload=self.offload and "OFFLOAD" not in withdrawn,
            checkpoint=self.checkpoint and "CHECKPOINT" not in withdrawn,
            resize=self.resize and "RESIZE" not in withdrawn,
            reshard=self.reshard and "RESIZE" not in withdrawn,
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
    # Those whose own disks have it; none: it lies on the storage that all nodes see.
    nodes: tuple[str, ...] = ()


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
    """Why a FAILED job failed: EXIT, OUT_OF_MEMORY, TIME_LIMIT, LAUNCH_FAILED, NO_CHECKPOINT, ESCALATED or
    CANNOT_MOVE."""

    reason: str
    message: str = ""
    exit_code: int = 0
    rank: int = 0
    epoch: int = 0


# To look up a member of an enumeration takes Python 3.11 as long as a call, and this one is compared all the time.
_PENDING: Final = JobState.PENDING


class JobRecord(Struct, frozen=True, gc=False, omit_defaults=True, rename=STORED_NAMES):
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
    run_s: float = 0.0
    running_since: float = 0.0
    # The gang that may step, and the destination of a move in progress; zero for none.
    epoch: int = 0
    next_epoch: int = 0
    # Devices of its newest gang, where that are not as many as its roles name; else zero.
    gpus_given: int = 0
    # Devices with which it is to start, as `resize` chose; zero: as many as its roles name.
    gpus_chosen: int = 0
    # The same two by role, of a job whose roles have ranges; empty: as its roles name.
    tasks_given: tuple[int, ...] = ()
    tasks_chosen: tuple[int, ...] = ()
    failures: int = 0
    # Failures in a row that came soon, and the end of the backoff for them; zero: it waits only for a place.
    failed_in_row: int = 0
    again_at: float = 0.0
    preemptions: int = 0
    # Starts of its gang so far, without moves and process images, which bring its state along; zero in records of old.
    starts: int = 0
    # Moves given up since the last successful one: bounds how often a drain tries again.
    moves_aborted: int = 0
    # How long its last move made it stand still; zero if it was never moved.
    move_pause_s: float = 0.0
    # Failed starts since the last step, and the nodes that failed at them.
    launch_failures: int = 0
    launch_failed_on: tuple[str, ...] = ()
    # It has stepped and was found to be movable, where its spec requires that.
    is_move_confirmed: bool = False
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
    # Largest measured working set of one task in host memory; `WHOLE_SHARE` once less than its share was too little.
    working_set_bytes: int = 0
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
    # It waits until other jobs have ended, by its array's limit or by its dependencies: no place is sought for it.
    held: bool = False
    # Its dependencies that are open.
    awaits: tuple[Dependency, ...] = ()
    # What it had reported at the rungs of its array's stop rule; None is no number.
    rungs: tuple[float | None, ...] = ()
    # For an updated job: the values as submitted, and its newest updates that had request ids.
    submitted: Submitted | None = None
    updates: tuple[Updated, ...] = ()
    # What follows from the partition that it is in.
    partition: PartitionTerms = NO_TERMS
    # Nodes that its next gang may not use. Only a planner sets it: the master finds them where it judges, and stores
    # none.
    closed_nodes: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return f"jobs/{self.number}"

    @property
    def is_waiting(self) -> bool:
        """Return whether the job is in the queue: no gang, no end, no backoff, and not held by others."""
        is_free = self.ending is None and self.next_epoch == 0
        return self.state is _PENDING and is_free and not self.held and not self.again_at

    def ran_s(self, now: float, since: float | None = None) -> float:
        """Return for how many seconds it has run by `now`. since: when the present stretch began, 0: not running; by
        default its first step."""
        since = self.running_since if since is None else since
        return self.run_s + (max(0.0, now - since) if since else 0.0)

    @property
    def attempt(self) -> int:
        """Number of the newest start of its gang, from 1, as its ranks have it in `GANGER_ATTEMPT`."""
        return self.starts or 1 + self.failures + self.preemptions

    @property
    def saves_itself(self) -> bool:
        """Whether its script saves itself at a signal, so that it continues from its own files."""
        return self.capabilities.mechanism is _SIGNAL

    @property
    def no_time_slices(self) -> str:
        """Return why it is not time-sliced although it can be suspended; empty if it may be."""
        if self.spec.is_scheduled_at_epochs:
            return "it is scheduled at ends of its epochs, and time slices end at any step"
        return self.capabilities.no_turns

    @property
    def submitted_spec(self) -> JobSpec:
        """The spec as it was submitted, without later updates."""
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
        return self.epoch > 0 or (self.checkpoint is not None and not self.capabilities.starts_at_any_size)

    @property
    def gpus(self) -> int:
        """Number of devices of the gang that the job has or requests."""
        return self._other_size or self.spec.gpus

    @property
    def tasks_by_role(self) -> tuple[int, ...]:
        """Number of tasks of each role of the gang that the job has or requests."""
        return tuple([role.tasks for role in self.shape.roles])

    @property
    def _other_size(self) -> int:
        return self.gpus_given if self.is_bound else self.gpus_chosen

    @property
    def shape(self) -> GangShape:
        """Return the shape that it requests now: by its spec, and by its measured memory."""
        return self.shape_with(self.arena_bytes_per_device)

    def shape_with(self, arena_bytes_per_device: int) -> GangShape:
        gpus, tasks = (self.gpus_given, self.tasks_given) if self.is_bound else (self.gpus_chosen, self.tasks_chosen)
        return self._shape(arena_bytes_per_device, gpus, tasks)

    def shape_for(self, gpus: int) -> GangShape:
        """Return its shape with that many devices, by its measured memory."""
        return self._shape(self.arena_bytes_per_device, gpus)

    def shape_for_tasks(self, tasks: tuple[int, ...]) -> GangShape:
        """Return its shape with these numbers of tasks by role, by its measured memory."""
        return self._shape(self.arena_bytes_per_device, 0, tasks)

    def _shape(self, arena_bytes_per_device: int, gpus: int, tasks: tuple[int, ...] = ()) -> GangShape:
        used, memory = self.used_device_bytes, self.task_memory_bytes
        partition, closed_nodes = self.partition.name, self.closed_nodes
        return self.spec.shape(arena_bytes_per_device, used, gpus, memory, partition, closed_nodes, tasks)

    def with_size_of(self, claims: Sequence[Claim]) -> JobRecord:
        """Return the job with the size of its newest gang, which has these claims."""
        gpus = sum([claim.device_mask.bit_count() for claim in claims])
        job = replace(self, gpus_given=0 if gpus == self.spec.gpus else gpus)
        if not self.spec.has_role_ranges:
            return job
        tasks = tasks_of(claims)
        return replace(job, tasks_given=() if tasks == self.spec.tasks_by_role else tasks)

    def with_size_chosen(self, gpus: int, tasks: tuple[int, ...]) -> JobRecord:
        """Return the job that is to start with so many devices, or tasks by role."""
        return replace(
            self,
            gpus_chosen=0 if gpus == self.spec.gpus else gpus,
            tasks_chosen=() if tasks == self.spec.tasks_by_role else tasks,
        )

    @property
    def priority(self) -> int:
        """Return the priority by which it is ordered: that of its partition first, then its own."""
        terms = self.partition
        return self.spec.priority if terms is NO_TERMS else TIER * terms.priority + self.spec.priority

    @property
    def preemptible(self) -> bool:
        """Return whether plans may suspend it. They may move it in any case, unless `spec.preemptible` is false."""
        return self.spec.preemptible and self.partition.preemptible

    @property
    def time_limit_s(self) -> float | None:
        """Return the running time after which it ends: its own, or that of its partition; None: none."""
        own = self.spec.time_limit_s
        return self.partition.time_limit_s if own is None else own

    @property
    def spec_in_force(self) -> JobSpec:
        """Return the spec with what its partition makes of it."""
        terms = self.partition
        if terms == NO_TERMS:
            return self.spec
        return replace(self.spec, partition=terms.name, preemptible=self.preemptible, time_limit_s=self.time_limit_s)

    @property
    def spec_now(self) -> JobSpec:
        """Return the spec in force, with the tasks that its gang has, had at the end, or is to have."""
        spec = self.spec_in_force
        if not spec.has_role_ranges:
            return spec
        return spec.with_tasks(self.tasks_given or spec.tasks_by_role if self.state.is_finished else self.tasks_by_role)

    @property
    def task_memory_bytes(self) -> int:
        """What one task needs of host memory: the measured working set with a margin; zero while that is unknown."""
        used = self.working_set_bytes
        needed = used * 5 // 4 + _MEMORY_MARGIN_BYTES
        return -(-needed // _MEMORY_STEP_BYTES) * _MEMORY_STEP_BYTES if used else 0


def starting_anew(job: JobRecord) -> JobRecord:
    """Return the job with one more start of its gang."""
    return replace(job, starts=1 + (job.starts or job.failures + job.preemptions))


class Request(Struct, frozen=True, gc=False):
    """The request id of a forgotten job: it is not accepted a second time."""

    number: int
    request_id: str
    # When the job was submitted, and its user: each user has ids of its own.
    time: float
    user: str = ""


def members_of(jobs: Mapping[int, JobRecord], array: int) -> list[JobRecord]:
    """Return the remembered members of an array in their order; empty if there is no such array, or none any more."""
    found: list[JobRecord] = []
    end = array + 1 + MEMBERS_LIMIT
    number = array + 1
    while number < end:
        job = jobs.get(number)
        if job is not None:
            membership = job.spec.array
            if membership is None or membership.array != array:
                break
            end = array + 1 + membership.size
            found.append(job)
        number += 1
    return found
