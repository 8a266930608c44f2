"""Jobs as frozen plain values: the spec of a user, the record of the master, and what both are made of.

Times are Unix seconds, memory is bytes, cores are millicores, node and job names are bare ("n1", number 7): the wire's
"nodes/n1" and "jobs/7" are made by the rpc layer. `msgspec.json` encodes and decodes every value without hooks.

The members of a job array share one stored description. That of a member, with its parameters put in, is made when it
is shown or sent.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Final

from ganger.cluster.resources import STORED_NAMES, GangShape, Locality, Role
from ganger.job_state import JobState
from ganger.protocol.gang_orders import Mechanism
from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ganger_master.core.array_model import MEMBERS_LIMIT, Membership
from ganger_master.core.tenancy import NO_TERMS, TIER, PartitionTerms


class SuspendLevel(IntEnum):
    """Higher levels keep less."""

    NONE = 0
    PAUSE = 1
    OFFLOAD = 2
    CHECKPOINT = 3


class Agent(StrEnum):
    AUTOMATIC = "AUTOMATIC"
    NONE = "NONE"


_ANYWHERE: Final = Locality()
_SIGNAL: Final = Mechanism.SIGNAL


class RoleProgram(Struct, frozen=True, gc=False, omit_defaults=True):
    """What the tasks of one role run: `command` instead of the job's, if not empty, and `environment` on top of it."""

    role: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class JobSpec(Struct, frozen=True, gc=False, omit_defaults=True, rename=STORED_NAMES):
    """A user's request; `ganger.v1.JobSpec` as plain values. Zero and empty mean what they mean on the wire."""

    command: tuple[str, ...]
    roles: tuple[Role, ...]
    display_name: str = ""
    working_directory: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)
    device_type: str = ""
    # As the user named it; empty: the default, if the cluster has partitions.
    partition: str = ""
    locality: Locality = _ANYWHERE
    nodes: int = 0
    priority: int = 0
    time_limit_s: float | None = None
    gpu_memory_bytes: int = 0
    max_failures: int = 0
    scheduler: str = ""
    preemptible: bool = True
    # An elastic job also runs with other numbers of devices, whole tasks, in this range; both zero: it is none.
    gpus_min: int = 0
    gpus_max: int = 0
    # Zero takes the cluster's default, negative none.
    checkpoint_interval_s: float = 0.0
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
    # The only mechanism to use; UNSPECIFIED: the strongest that applies.
    mechanism: Mechanism = Mechanism.UNSPECIFIED
    # Whether it fails at its first step if it turns out that it cannot be moved.
    is_move_required: bool = False
    # Whether its TCP connections to outside may be closed by an image of its processes.
    closes_connections: bool = False
    # The signal at which the script saves itself and exits, "TERM"; empty: none.
    stop_signal: str = ""
    stop_grace_s: float = 60.0
    role_programs: tuple[RoleProgram, ...] = ()
    # Set by the master.
    array: Membership | None = None

    @property
    def all_words(self) -> tuple[str, ...]:
        """Return the words of the job's command and of those of its roles."""
        return (*self.command, *[word for program in self.role_programs for word in program.command])

    @property
    def gpus(self) -> int:
        return sum([role.tasks * role.shape.gpus for role in self.roles])

    @property
    def tasks(self) -> int:
        return sum([role.tasks for role in self.roles])

    @property
    def is_elastic(self) -> bool:
        return self.gpus_max > 0

    @property
    def most_tasks(self) -> int:
        """The most tasks that its gang may have at one time."""
        return max(self.tasks, self.gpus_max // self.roles[0].shape.gpus) if self.is_elastic else self.tasks

    def accepts(self, gpus: int) -> bool:
        """Return whether its gang may have so many devices."""
        if not self.is_elastic:
            return gpus == self.gpus
        return self.gpus_min <= gpus <= self.gpus_max and gpus % self.roles[0].shape.gpus == 0

    def shape(
        self,
        arena_bytes_per_device: int = 0,
        used_device_bytes: int = 0,
        gpus: int = 0,
        task_memory_bytes: int = 0,
        partition: str = "",
        closed_nodes: frozenset[str] = frozenset(),
    ) -> GangShape:
        """Return the shape of the job's gang with `gpus` devices, a number that it accepts; zero: as its roles name.

        `used_device_bytes`, `task_memory_bytes`: needs of a device and of a task in host memory, as measured.
        `partition`: that which the job is in. `closed_nodes`: those that it may not use."""
        named, roles = self.gpu_memory_bytes, self.roles
        needed = named if named > used_device_bytes else used_device_bytes
        if gpus:
            roles = (replace(roles[0], tasks=gpus // roles[0].shape.gpus),)
        return GangShape(
            roles,
            self.device_type,
            self.locality,
            self.nodes,
            arena_bytes_per_device,
            needed,
            task_memory_bytes,
            partition=partition,
            closed_nodes=closed_nodes,
        )


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
    (zero: any); `reshard`: only from a checkpoint on storage. `presumed`: no agent has reported yet, perhaps because it
    is only starting. `withdrawn`: the part of `missing` that failed once and is not offered again, whatever the ranks
    of a later attempt report.
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
    # Devices with which it is to start, as `resize` chose while it held none; zero: as many as its roles name.
    gpus_chosen: int = 0
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
    # A member of an array that waits until another has ended: no place is sought for it.
    held: bool = False
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
        """Return whether the job is in the queue: no gang, no end, no backoff, and not held by its array."""
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
    def _other_size(self) -> int:
        return self.gpus_given if self.is_bound else self.gpus_chosen

    @property
    def shape(self) -> GangShape:
        """Return the shape that it requests now: by its spec, and by its measured memory."""
        return self.shape_with(self.arena_bytes_per_device)

    def shape_with(self, arena_bytes_per_device: int) -> GangShape:
        return self._shape(arena_bytes_per_device, self._other_size)

    def shape_for(self, gpus: int) -> GangShape:
        """Return its shape with that many devices, by its measured memory."""
        return self._shape(self.arena_bytes_per_device, gpus)

    def _shape(self, arena_bytes_per_device: int, gpus: int) -> GangShape:
        used, memory = self.used_device_bytes, self.task_memory_bytes
        return self.spec.shape(arena_bytes_per_device, used, gpus, memory, self.partition.name, self.closed_nodes)

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
    def task_memory_bytes(self) -> int:
        """What one task needs of host memory: the measured working set with a margin; zero while that is unknown."""
        used = self.working_set_bytes
        needed = used * 5 // 4 + _MEMORY_MARGIN_BYTES
        return -(-needed // _MEMORY_STEP_BYTES) * _MEMORY_STEP_BYTES if used else 0


def starting_anew(job: JobRecord) -> JobRecord:
    """Return the job with one more start of its gang."""
    return replace(job, starts=1 + (job.starts or job.failures + job.preemptions))


class Update(Struct, frozen=True, gc=False, omit_defaults=True, rename=STORED_NAMES):
    """The changes of an update; None: unchanged. A time limit of zero takes it away; zero cores (of each GPU) and
    bytes (of each task) leave them to the scheduler."""

    display_name: str | None = None
    priority: int | None = None
    time_limit_s: float | None = None
    device_type: str | None = None
    locality: Locality | None = None
    memory_bytes: int | None = None
    millicores_per_gpu: int | None = None
    partition: str | None = None


class Updated(Struct, frozen=True, gc=False):
    """An update that was carried out, with its request id, so that a repetition changes nothing."""

    request_id: str
    update: Update


class Submitted(Struct, frozen=True, gc=False, rename=STORED_NAMES):
    """The updatable values of a job's spec as submitted, by which a repeated submission is recognised."""

    display_name: str
    priority: int
    time_limit_s: float | None
    device_type: str
    locality: Locality
    roles: tuple[Role, ...]
    partition: str = ""


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


_PLACE: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Template:
    """A command with {NAME} in it, parsed once: the length of a member's command follows without building it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._length = sum(map(bytes_of, command))
        self._places = Counter(name for word in command for name in _PLACE.findall(word))
        self.places = self._places.total()
        # Whether the first word has text of its own; else it is made of these parameters alone.
        program = command[0] if command else ""
        self._has_program = bool(_PLACE.sub("", program))
        self._program_names = frozenset(_PLACE.findall(program))

    def length(self, index: int, parameters: Mapping[str, str]) -> int:
        """Return the bytes of the member's command."""
        given = {"index": str(index), **parameters}
        # Most members have many parameters, of which a command names few.
        return self._length + sum(
            [
                self._places[name] * (bytes_of(given[name]) - bytes_of(name) - len("{}"))
                for name in self._places.keys() & given.keys()
            ]
        )

    def has_program(self, index: int, parameters: Mapping[str, str]) -> bool:
        """Return whether the member's first word is not empty."""
        if self._has_program:
            return True
        given = {"index": str(index), **parameters}
        return any(given.get(name, name) for name in self._program_names)


def bytes_of(text: str) -> int:
    """Return the bytes of a text on the wire and on disk."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def resolved(spec: JobSpec) -> JobSpec:
    """Return the spec of an array member with {NAME} and {index} replaced in its command, and its parameters in its
    environment. Any other spec is returned as it is."""
    array = spec.array
    if array is None:
        return spec
    given = {"index": str(array.index), **array.parameters}

    def filled(found: re.Match[str]) -> str:
        # Other braces are the program's own.
        return given.get(found.group(1), found.group())

    variables = {
        "GANGER_ARRAY": str(array.array),
        "GANGER_ARRAY_INDEX": str(array.index),
        "GANGER_ARRAY_SIZE": str(array.size),
        "GANGER_ARRAY_PARAMETERS": json.dumps(array.parameters),
        **{f"GANGER_ARRAY_{name}": text for name, text in array.parameters.items()},
    }

    def with_values(command: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([_PLACE.sub(filled, word) for word in command])

    programs = tuple([replace(program, command=with_values(program.command)) for program in spec.role_programs])
    environment = {**spec.environment, **variables}
    return replace(spec, command=with_values(spec.command), environment=environment, role_programs=programs)
