"""The roles of a job as people describe them, one by `gpus`, `tasks` and the like or several by `roles`, each with its
own shape, program and variables; and the reader that collects what is wrong with a description."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from ganger.cluster.resources import DIMENSIONS
from ganger.spec_values import (
    command_hint,
    number_or_range,
    parse_command,
    parse_cores_or_auto,
    parse_gpus,
    parse_list,
    parse_mapping,
    parse_text,
    whole_number,
)
from ganger.text import counted, meant, parse_memory
from ganger.v1.job_pb2 import JobSpec, RoleProgram
from ganger.v1.resources_pb2 import Role, TaskShape
from ganger.wire.errors import Violation

Value = TypeVar("Value")
MOST_TASKS: Final = 10_000
_ROLE_KEYS: Final = frozenset({"name", "tasks", "gpus", "cpus", "memory", "command", "environment", *DIMENSIONS})
_MAX_MB_PER_S: Final = 1_000_000_000
# Most characters of a message about one key.
_LONGEST: Final = 300
_MAX_ENVIRONMENT_BYTES: Final = 256 * 1024
# What Linux gives to a program in one string, without "=" and the NUL at the end.
_MAX_VARIABLE_BYTES: Final = 128 * 1024 - 2
VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def bounded(text: str) -> str:
    """Shorten a message in the middle: values may be of any length, and the remedy is at the end."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


class DescriptionReader:
    """Reads keys of one mapping and collects what is wrong with them."""

    def __init__(self, description: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        self.violations: list[Violation] = []
        self._description = description
        self._origins = origins

    def has(self, key: str) -> bool:
        return self._description.get(key) is not None

    def complain(self, key: str, description: str) -> None:
        self.violations.append(Violation(self._origins.get(key, key), description))

    def read(self, key: str, parse: Callable[[Any], Value], default: Value, required: str = "") -> Value:
        value = self._description.get(key)
        if value is None:
            if required:
                self.complain(key, f"missing: {required}")
            return default
        try:
            return parse(value)
        except ValueError as error:
            self.complain(key, bounded(str(error)))
            return default


class DescribedRoles(NamedTuple):
    """The roles of a job. `programs`: of roles that do not run the job's command as it is. `gpus_min`, `gpus_max`:
    the range of an elastic job, both 0 for others; roles with ranges have their fewest tasks."""

    roles: list[Role]
    programs: Sequence[RoleProgram] = ()
    gpus_min: int = 0
    gpus_max: int = 0

    @property
    def common_command(self) -> list[str]:
        """Return the command of a job that names none: that of the first role, if every role has its own."""
        own = {program.role: program.command for program in self.programs if program.command}
        return list(own[self.roles[0].name]) if self.roles and own.keys() >= {role.name for role in self.roles} else []


def read_roles(reader: DescriptionReader) -> DescribedRoles:
    """Return the roles of a description, each as far as it is right."""
    if reader.has("roles"):
        for key in ("gpus", "gpus_per_task", "tasks", "cpus_per_gpu", "cpus_per_task", "memory", *DIMENSIONS):
            if reader.has(key):
                reader.complain(key, "does not go with roles: each role has its own")
        return _listed_roles(reader)
    # Read first and whole, so that one mistake does not hide another.
    gpus, most = reader.read("gpus", parse_gpus, (-1, 0))
    per_task = reader.read("gpus_per_task", whole_number(1, 64), 0)
    tasks = reader.read("tasks", whole_number(1, MOST_TASKS), 0)
    per_gpu = reader.read("cpus_per_gpu", parse_cores_or_auto, 0)
    per_cpu_task = reader.read("cpus_per_task", parse_cores_or_auto, 0)
    memory = reader.read("memory", parse_memory, 0)
    if gpus < 0:
        gpus = (tasks or 1) * (per_task or 1)
    shape_gpus = 0
    if gpus == 0:
        if per_task:
            reader.complain("gpus_per_task", "does not go with 0 GPUs")
        if per_gpu:
            instead = "give the cores of a task instead (--cpus-per-task)"
            reader.complain("cpus_per_gpu", f"does not go with 0 GPUs: {instead}")
        tasks = tasks or 1
    else:
        shape_gpus = per_task or (gpus // tasks if tasks and gpus % tasks == 0 else 1)
        _check_split(reader, gpus, most, shape_gpus, tasks)
        tasks = max(1, gpus // shape_gpus)
    if per_gpu and per_cpu_task:
        reader.complain("cpus_per_task", "does not go with the cores per GPU: give one of them")
    if max(tasks, most // (shape_gpus or 1)) > MOST_TASKS:
        reader.complain("gpus", f"{max(tasks, most // (shape_gpus or 1))} tasks are more than {MOST_TASKS}")
        tasks = min(tasks, MOST_TASKS)
    millicores = per_cpu_task or per_gpu * shape_gpus
    if gpus == 0 and not millicores:
        # Without devices there is no share to go by: a core each.
        millicores = 1_000
    shape = TaskShape(gpus=shape_gpus, millicores=millicores, memory_bytes=memory, **_bandwidth(reader))
    roles = [Role(name="worker", tasks=tasks, shape=shape)]
    return DescribedRoles(roles, gpus_min=gpus, gpus_max=most) if most else DescribedRoles(roles)


def _bandwidth(reader: DescriptionReader) -> dict[str, int]:
    """Return the bandwidth of one task by name, in megabytes per second."""
    return {name: reader.read(name, whole_number(0, _MAX_MB_PER_S), 0) for name in DIMENSIONS}


def _check_split(reader: DescriptionReader, gpus: int, most: int, shape_gpus: int, tasks: int) -> None:
    """Check that `gpus` (up to `most` of an elastic job) make whole tasks of `shape_gpus`; `tasks`: as given, or 0."""
    if gpus % shape_gpus:
        reader.complain("gpus_per_task", f"{counted(gpus, 'GPU')} cannot be shared out by {shape_gpus} to a task")
    elif tasks and tasks != gpus // shape_gpus:
        made = counted(gpus // shape_gpus, "task")
        reader.complain("tasks", f"{counted(gpus, 'GPU')}, {shape_gpus} to a task, make {made}, not {tasks}")
    if most and reader.has("tasks"):
        reader.complain("tasks", "does not go with a range of GPUs: say how many a task has (--gpus-per-task)")
    if most % shape_gpus:
        reader.complain("gpus", f"{most} GPUs cannot be shared out by {shape_gpus} to a task")
    if most and reader.has("nodes"):
        reader.complain("nodes", "does not go with a range of GPUs: where it grows is found out as it runs")


def _listed_roles(reader: DescriptionReader) -> DescribedRoles:
    nothing: Sequence[Any] = ()
    no_words: list[str] = []
    listed = reader.read("roles", parse_list, nothing)
    if not listed:
        reader.complain("roles", "must list at least one role")
    roles: list[Role] = []
    programs: list[RoleProgram] = []
    seen: set[str] = set()
    for index, description in enumerate(listed[:100]):
        path = f"roles[{index}]"
        if not isinstance(description, Mapping):
            reader.complain(path, f"must be a mapping of {', '.join(sorted(_ROLE_KEYS))}")
            continue
        one = DescriptionReader(description, {str(key): f"{path}.{key}" for key in (*description, *_ROLE_KEYS)})
        for key in sorted(str(key) for key in set(description) - _ROLE_KEYS):
            one.complain(key, f"there is no such key; {meant(key, _ROLE_KEYS)}")
        is_only = len(listed) == 1
        name = one.read("name", parse_text, "worker" if is_only else "", required="" if is_only else "name it")
        gpus = one.read("gpus", whole_number(0, 64), 0)
        shape = TaskShape(
            gpus=gpus,
            millicores=one.read("cpus", parse_cores_or_auto, 0 if gpus else 1_000),
            memory_bytes=one.read("memory", parse_memory, 0),
            **_bandwidth(one),
        )
        tasks, most = one.read("tasks", number_or_range(1, MOST_TASKS, "tasks"), (1, 0))
        roles.append(Role(name=name, tasks=tasks, shape=shape, tasks_min=tasks if most else 0, tasks_max=most))
        if name and name in seen:
            one.complain("name", f"{name!r} is taken by an earlier role")
        seen.add(name)
        program = RoleProgram(
            role=name, command=one.read("command", parse_command, no_words), environment=read_environment(one, {})
        )
        if program.command or program.environment:
            programs.append(program)
        reader.violations += one.violations
    if sum(max(role.tasks, role.tasks_max) for role in roles) > MOST_TASKS:
        reader.complain("roles", f"more than {MOST_TASKS} tasks in all")
    if reader.has("nodes") and any(role.tasks_max for role in roles):
        reader.complain("nodes", "does not go with a range of tasks: where it grows is found out as it runs")
    if len(roles) == 1 and roles[0].tasks_max and roles[0].shape.gpus:
        # As by `gpus: 2:8`, so that it is resized as it runs.
        each, only = roles[0].shape.gpus, roles[0]
        plain = Role(name=only.name, tasks=only.tasks, shape=only.shape)
        return DescribedRoles([plain], programs, only.tasks * each, only.tasks_max * each)
    return DescribedRoles(roles, programs)


def check_role_commands(spec: JobSpec, reader: DescriptionReader) -> None:
    """Complain of commands of roles that no node could execute."""
    names = [role.name for role in spec.roles]
    for program in spec.role_programs:
        if hint := command_hint(program.command, spec.working_directory):
            reader.complain(f"roles[{names.index(program.role)}].command", hint)


def read_environment(reader: DescriptionReader, captured: Mapping[str, str]) -> dict[str, str]:
    """Return the captured environment, overridden by the variables of the request."""
    nothing: Mapping[str, object] = {}
    given = reader.read("environment", parse_mapping, nothing)
    result: dict[str, str] = {}
    for name, text in {**captured, **given}.items():
        if not isinstance(name, str) or not VARIABLE_NAME.fullmatch(name):
            reader.complain("environment", f"{name!r} is not the name of an environment variable")
        elif name.startswith("GANGER_"):
            reader.complain("environment", f"{name} is Ganger's own: names starting with GANGER_ are set by it")
        else:
            try:
                result[name] = parse_text(text)
            except ValueError as error:
                reader.complain("environment", f"{name}: {error}")
                continue
            if len(os.fsencode(name)) + len(os.fsencode(result[name])) > _MAX_VARIABLE_BYTES:
                what = f"{name}: must be at most {_MAX_VARIABLE_BYTES} bytes, for no program can be started with more"
                reader.complain("environment", f"{what}: put it into a file")
    if sum(len(os.fsencode(name)) + len(os.fsencode(text)) for name, text in result.items()) > _MAX_ENVIRONMENT_BYTES:
        reader.complain("environment", f"must be at most {_MAX_ENVIRONMENT_BYTES} bytes in all")
    return result
