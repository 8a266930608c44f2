"""Descriptions of jobs, as users submit and update them, as frozen plain values.

The members of a job array share one stored description. That of a member, with its parameters put in, is made when it
is shown or sent.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from ganger.cluster.resources import STORED_NAMES, GangShape, Locality, Role
from ganger.protocol.gang_orders import Mechanism
from msgspec import Struct, field
from msgspec.structs import replace

from ganger_master.core.array_model import Membership


class Agent(StrEnum):
    AUTOMATIC = "AUTOMATIC"
    NONE = "NONE"


_ANYWHERE: Final = Locality()


class Condition(StrEnum):
    """How another job, or all members of an array, must have ended. EACH: the member of the same index succeeded."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    ENDED = "ENDED"
    EACH = "EACH"


class Dependency(Struct, frozen=True, gc=False):
    """A job starts only after the job or array with that number has ended in that way."""

    condition: Condition
    number: int


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
    # Nodes that keep each of its checkpoints where not all nodes see the storage; zero stands for one.
    checkpoint_copies: int = 0
    # Plans stop it at ends of its epochs only.
    is_scheduled_at_epochs: bool = False
    dependencies: tuple[Dependency, ...] = ()
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
    def tasks_by_role(self) -> tuple[int, ...]:
        return tuple([role.tasks for role in self.roles])

    @property
    def is_elastic(self) -> bool:
        """Whether it has a range of devices; one with ranges of its roles has none (`has_role_ranges`)."""
        return self.gpus_max > 0

    @property
    def has_role_ranges(self) -> bool:
        """Whether the number of tasks of one of its roles may change."""
        return any(role.tasks_min or role.tasks_max for role in self.roles)

    @property
    def most_tasks(self) -> int:
        """The most tasks that its gang may have at one time."""
        if self.is_elastic:
            return max(self.tasks, self.gpus_max // self.roles[0].shape.gpus)
        return sum([max(role.tasks, role.tasks_max) for role in self.roles])

    def with_tasks(self, tasks: Sequence[int]) -> JobSpec:
        """Return the spec with these numbers of tasks, by role."""
        if tasks == self.tasks_by_role:
            return self
        return replace(self, roles=_roles_with(self.roles, tasks))

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
        tasks: Sequence[int] = (),
    ) -> GangShape:
        """Return the shape of the job's gang with `gpus` devices, a number that it accepts; zero: as its roles name.

        `tasks`: numbers of tasks by role, instead of `gpus`.
        `used_device_bytes`, `task_memory_bytes`: needs of a device and of a task in host memory, as measured.
        `partition`: that which the job is in. `closed_nodes`: those that it may not use."""
        named, roles = self.gpu_memory_bytes, self.roles
        needed = named if named > used_device_bytes else used_device_bytes
        if tasks:
            roles = _roles_with(roles, tasks)
        elif gpus:
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


def _roles_with(roles: Sequence[Role], tasks: Sequence[int]) -> tuple[Role, ...]:
    return tuple([replace(role, tasks=number) for role, number in zip(roles, tasks, strict=True)])


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
