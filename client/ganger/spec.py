"""A job as people describe it, by flags, a YAML or TOML file, or keyword arguments, as the JobSpec of the wire.

All that is wrong is found at once, each with its path ("roles[0].tasks", or "--gpus" if it came from a flag). Checks
that need the state of the cluster (could the gang ever fit?) are left to the master.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ganger.cluster.resources import DIMENSIONS
from ganger.launch_command import with_ranks
from ganger.spec_values import (
    command_hint,
    level_text,
    parse_agent,
    parse_boolean,
    parse_checkpoint_interval,
    parse_command,
    parse_convergence,
    parse_cores_or_auto,
    parse_deadline,
    parse_device_types,
    parse_directory,
    parse_gpus,
    parse_labels,
    parse_level,
    parse_list,
    parse_mapping,
    parse_mechanism,
    parse_name,
    parse_positive_duration,
    parse_scheduler,
    parse_stop_signal,
    parse_text,
    parse_weight,
    shortened,
    whole_number,
)
from ganger.text import counted, meant, os_reason, parse_duration, parse_memory
from ganger.v1.job_pb2 import (
    MECHANISM_ADAPTER,
    MECHANISM_IMAGE,
    MECHANISM_NONE,
    MECHANISM_REPLAY,
    MECHANISM_SIGNAL,
    MECHANISM_UNSPECIFIED,
    JobSpec,
)
from ganger.v1.job_service_pb2 import JobUpdate
from ganger.v1.resources_pb2 import Level, Locality, Role, TaskShape
from ganger.wire import times
from ganger.wire.errors import SpecInvalid, Violation

Value = TypeVar("Value")
KEYS = frozenset(
    [
        *("name", "command", "directory", "environment", "gpus", "gpus_per_task", "tasks", "roles", "gpu_type"),
        *("nodes", "cpus_per_gpu", "cpus_per_task", "memory", "gpu_memory", "locality", "tolerance", "patience"),
        *("priority", "weight", "converges", "time", "deadline", "max_failures", "scheduler", "preemptible", "movable"),
        *("checkpoint_every", "labels", "agent", "distributed", "mechanism", "must_move", "close_connections"),
        *("signal", "grace", "requeue", "disk_mb_per_s", "net_mb_per_s", "partition"),
    ]
)
# One of locality, tolerance and patience replaces all of them.
UPDATE_KEYS = (
    *("name", "priority", "time", "gpu_type", "partition", "locality", "tolerance", "patience", "memory"),
    "cpus_per_gpu",
)
_NO_LIMIT = "never"
_ROLE_KEYS = frozenset({"name", "tasks", "gpus", "cpus", "memory", *DIMENSIONS})
_MAX_MB_PER_S = 1_000_000_000
_DEFAULT_PATIENCE_S = 600.0
# As Slurm's --signal without a time.
_STOP_GRACE_S = 60.0
_MAX_TASKS = 10_000
# Most characters of a message about one key.
_LONGEST = 300
_MAX_ENVIRONMENT_BYTES = 256 * 1024
# What Linux gives to a program in one string, without "=" and the NUL at the end.
_MAX_VARIABLE_BYTES = 128 * 1024 - 2
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What a training script needs of the submitting shell. Neither secrets nor thread counts: those the scheduler sets.
_CAPTURED = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV"),
        *("CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "PYTHONHASHSEED"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "CUDA_PATH", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TORCH_HOME"),
        *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    ]
)
_CAPTURED_PREFIXES = ("LC_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_")


def captured_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the submitting shell's environment that a job gets, by an allow-list."""
    return {
        name: value
        for name, value in environ.items()
        if name in _CAPTURED or (name.startswith(_CAPTURED_PREFIXES) and _VARIABLE.fullmatch(name))
    }


def make_spec(
    description: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    origins: Mapping[str, str] | None = None,
    wrong: Sequence[Violation] = (),
) -> JobSpec:
    """Return the JobSpec of a description, whose keys are those of docs/reference/cli.md.

    `origins` gives the name of a key in errors where it differs from the key. `wrong` are violations that the caller
    has found already. Raises SpecInvalid with all violations.
    """
    variables = captured_environment(os.environ if environ is None else environ)
    description, misfits = with_ranks(description, variables)
    reader = _Reader(description, origins or {})
    reader.violations += wrong
    for key, text in misfits.items():
        reader.complain(key, _bounded(text))
    no_variables: dict[str, str] = {}
    no_words: list[str] = []
    for key in sorted(set(description) - KEYS):
        reader.complain(key, _unknown(key))
    roles, (gpus_min, gpus_max) = _roles(reader)
    spec = JobSpec(
        display_name=reader.read("name", parse_name, ""),
        command=reader.read("command", parse_command, no_words, required="say what to run"),
        working_directory=reader.read("directory", parse_directory, "") if reader.has("directory") else _here(reader),
        environment=_merged_environment(reader, variables),
        roles=roles,
        gpus_min=gpus_min,
        gpus_max=gpus_max,
        device_type=reader.read("gpu_type", parse_device_types, ""),
        partition=reader.read("partition", parse_name, ""),
        locality=_locality(reader),
        nodes=reader.read("nodes", whole_number(0, _MAX_TASKS), 0),
        priority=reader.read("priority", whole_number(-1_000, 1_000), 0),
        weight=reader.read("weight", parse_weight, 0.0),
        gpu_memory_bytes=reader.read("gpu_memory", parse_memory, 0),
        max_failures=reader.read("max_failures", whole_number(0, 1_000), 0),
        scheduler=reader.read("scheduler", parse_scheduler, ""),
        labels=reader.read("labels", parse_labels, no_variables),
        agent=reader.read("agent", parse_agent, JobSpec.AGENT_AUTOMATIC),
        distributed=reader.read("distributed", parse_boolean, None) or False,
        mechanism=reader.read("mechanism", parse_mechanism, MECHANISM_UNSPECIFIED),
        is_move_required=reader.read("must_move", parse_boolean, None) or False,
        closes_connections=reader.read("close_connections", parse_boolean, None) or False,
    )
    if hint := command_hint(spec.command, spec.working_directory):
        reader.complain("command", hint)
    if spec.nodes > (tasks := sum(role.tasks for role in roles)) > 0:
        reader.complain("nodes", f"{spec.nodes} nodes are more than there are tasks ({tasks}): each has one at least")
    _read_mechanism(spec, reader)
    _read_optional(spec, reader)
    if reader.violations:
        raise SpecInvalid("the job cannot be submitted as described", violations=reader.violations)
    return spec


def make_update(changes: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> JobUpdate:
    """The update of `changes`, keys of a job file with their new values; time "never" takes the limit away. `origins`
    as in `make_spec`. Raises SpecInvalid with every violation."""
    given = {key: value for key, value in changes.items() if value is not None}
    known = f"what can be changed is {', '.join(UPDATE_KEYS)}"
    if not given:
        raise SpecInvalid(f"say what to change: {known}")
    wrong = [Violation((origins or {}).get(key, key), known) for key in given if key not in UPDATE_KEYS]
    known_keys = [key for key in given if key in UPDATE_KEYS and (key, given[key]) != ("time", _NO_LIMIT)]
    described = {key: given[key] for key in known_keys}
    try:
        # What is not described is not looked at.
        spec = make_spec({**described, "command": ["any"], "directory": "/"}, {}, origins, wrong)
    except SpecInvalid as error:
        raise SpecInvalid("the job cannot be updated as described", violations=error.violations) from None
    return _picked(spec, given)


def _picked(spec: JobSpec, given: Mapping[str, Any]) -> JobUpdate:
    shape = spec.roles[0].shape
    fields: dict[str, tuple[str, Any]] = {
        "name": ("display_name", spec.display_name),
        "priority": ("priority", spec.priority),
        # None in the spec: of no length.
        "time": ("time_limit", spec.time_limit),
        "gpu_type": ("device_type", spec.device_type),
        "partition": ("partition", spec.partition),
        **dict.fromkeys(("locality", "tolerance", "patience"), ("locality", spec.locality)),
        "memory": ("memory_bytes", shape.memory_bytes),
        "cpus_per_gpu": ("millicores_per_gpu", shape.millicores),
    }
    return JobUpdate(**dict(fields[key] for key in given))


def _read_mechanism(spec: JobSpec, reader: _Reader) -> None:
    """Set how the script is asked to save itself, and check that it goes with the mechanism."""
    no_signal: tuple[str, float | None] = ("", None)
    spec.stop_signal, after = reader.read("signal", parse_stop_signal, no_signal)
    grace = reader.read("grace", parse_positive_duration, None)
    if grace is not None and after is not None:
        reader.complain("grace", "the signal has a time already (@SECONDS): give one of them")
    if spec.stop_signal:
        spec.stop_grace.CopyFrom(times.duration(after or grace or _STOP_GRACE_S))
    for key in ("grace", "requeue"):
        if reader.has(key) and not reader.has("signal"):
            reader.complain(key, "goes with the signal at which the script saves itself (--signal TERM)")
    if reader.read("requeue", parse_boolean, None) is False:
        reader.complain("requeue", "a job that saves itself at a signal is always requeued")
    if spec.mechanism == MECHANISM_SIGNAL and not reader.has("signal"):
        reader.complain("mechanism", "name the signal at which the script saves itself (--signal TERM)")
    if spec.mechanism in (MECHANISM_ADAPTER, MECHANISM_REPLAY) and spec.agent == JobSpec.AGENT_NONE:
        reader.complain("mechanism", "works through the agent, which is not injected (--agent none)")
    if spec.mechanism == MECHANISM_NONE and spec.is_move_required:
        reader.complain("must_move", "a job without a mechanism cannot be moved")
    if spec.mechanism == MECHANISM_IMAGE:
        if spec.nodes > 1:
            reader.complain("nodes", "an image is of the processes of one node")
        elif not spec.gpus_max:
            spec.nodes = 1


def _read_optional(spec: JobSpec, reader: _Reader) -> None:
    """Set the fields of `spec` whose absence has a meaning, as far as the description has them."""
    for key in ("preemptible", "movable"):
        if (value := reader.read(key, parse_boolean, None)) is not None:
            setattr(spec, key, value)
    if (converges := reader.read("converges", parse_convergence, None)) is not None:
        spec.convergence.least_decrease, spec.convergence.passes = converges
    if (time_limit := reader.read("time", parse_positive_duration, None)) is not None:
        spec.time_limit.CopyFrom(times.duration(time_limit))
    if (deadline := reader.read("deadline", parse_deadline, None)) is not None:
        spec.deadline.CopyFrom(times.timestamp(deadline))
    if (every := reader.read("checkpoint_every", parse_checkpoint_interval, None)) is not None:
        spec.checkpoint_interval.CopyFrom(times.duration(every))


def _bounded(text: str) -> str:
    """Shorten a message in the middle: values may be of any length, and the remedy is at the end."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def _unknown(key: str) -> str:
    if key == "array":
        return "a job has none: submit it as an array"
    return f"there is no such key; {meant(key, KEYS | {'array'})}"


class _Reader:
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
            self.complain(key, _bounded(str(error)))
            return default


def _roles(reader: _Reader) -> tuple[list[Role], tuple[int, int]]:
    """Return the roles and the range of GPUs of an elastic job, (0, 0) for others. Its roles are for the fewest."""
    if reader.has("roles"):
        for key in ("gpus", "gpus_per_task", "tasks", "cpus_per_gpu", "cpus_per_task", "memory", *DIMENSIONS):
            if reader.has(key):
                reader.complain(key, "does not go with roles: each role has its own")
        return _listed_roles(reader), (0, 0)
    # Read first and whole, so that one mistake does not hide another.
    gpus, most = reader.read("gpus", parse_gpus, (-1, 0))
    per_task = reader.read("gpus_per_task", whole_number(1, 64), 0)
    tasks = reader.read("tasks", whole_number(1, _MAX_TASKS), 0)
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
    if max(tasks, most // (shape_gpus or 1)) > _MAX_TASKS:
        reader.complain("gpus", f"{max(tasks, most // (shape_gpus or 1))} tasks are more than {_MAX_TASKS}")
        tasks = min(tasks, _MAX_TASKS)
    millicores = per_cpu_task or per_gpu * shape_gpus
    if gpus == 0 and not millicores:
        # Without devices there is no share to go by: a core each.
        millicores = 1_000
    shape = TaskShape(gpus=shape_gpus, millicores=millicores, memory_bytes=memory, **_bandwidth(reader))
    return [Role(name="worker", tasks=tasks, shape=shape)], ((gpus, most) if most else (0, 0))


def _bandwidth(reader: _Reader) -> dict[str, int]:
    """Return the bandwidth of one task by name, in megabytes per second."""
    return {name: reader.read(name, whole_number(0, _MAX_MB_PER_S), 0) for name in DIMENSIONS}


def _check_split(reader: _Reader, gpus: int, most: int, shape_gpus: int, tasks: int) -> None:
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


def _listed_roles(reader: _Reader) -> list[Role]:
    nothing: Sequence[Any] = ()
    listed = reader.read("roles", parse_list, nothing)
    if not listed:
        reader.complain("roles", "must list at least one role")
    roles: list[Role] = []
    seen: set[str] = set()
    for index, description in enumerate(listed[:100]):
        path = f"roles[{index}]"
        if not isinstance(description, Mapping):
            reader.complain(path, f"must be a mapping of {', '.join(sorted(_ROLE_KEYS))}")
            continue
        one = _Reader(description, {str(key): f"{path}.{key}" for key in (*description, *_ROLE_KEYS)})
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
        roles.append(Role(name=name, tasks=one.read("tasks", whole_number(1, _MAX_TASKS), 1), shape=shape))
        if name and name in seen:
            one.complain("name", f"{name!r} is taken by an earlier role")
        seen.add(name)
        reader.violations += one.violations
    if sum(role.tasks for role in roles) > _MAX_TASKS:
        reader.complain("roles", f"more than {_MAX_TASKS} tasks in all")
    return roles


def _locality(reader: _Reader) -> Locality:
    wish = reader.read("locality", parse_level, None)
    widest = reader.read("tolerance", parse_level, None)
    patience = reader.read("patience", parse_duration, None)
    if wish is not None and widest is not None and wish > widest:
        reader.complain("locality", f"{level_text(wish)} is wider than the tolerance {level_text(widest)}")
    if patience is not None and (wish is None or widest is None):
        reader.complain("patience", "goes with both a locality and a wider tolerance")
    if wish is not None and widest is None:
        # A wish without a tolerance is a demand.
        return Locality(widest=wish)
    locality = Locality(widest=widest or Level.LEVEL_UNSPECIFIED, wish=wish or Level.LEVEL_UNSPECIFIED)
    if wish is not None:
        locality.patience.CopyFrom(times.duration(_DEFAULT_PATIENCE_S if patience is None else patience))
    return locality


def _here(reader: _Reader) -> str:
    try:
        return parse_directory(os.getcwd())
    except FileNotFoundError:
        reader.complain("directory", "the present directory is gone: go to another, or name one")
    except ValueError as error:
        reader.complain("directory", str(error))
    return ""


def _merged_environment(reader: _Reader, captured: Mapping[str, str]) -> dict[str, str]:
    """Return the captured environment, overridden by the variables of the request."""
    nothing: Mapping[str, object] = {}
    given = reader.read("environment", parse_mapping, nothing)
    result: dict[str, str] = {}
    for name, text in {**captured, **given}.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
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


def load_job_file(path: Path) -> dict[str, Any]:
    """Return the description in a .yaml, .yml or .toml file, `directory` relative to that. Raises SpecInvalid."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecInvalid(f"cannot read the job file {path}: {os_reason(error)}") from error
    is_toml = path.suffix == ".toml"
    if not is_toml and path.suffix not in (".yaml", ".yml"):
        raise SpecInvalid(f"the job file {path} must end in .yaml, .yml or .toml")
    try:
        if is_toml:
            import tomllib

            description: Any = tomllib.loads(text)
        else:
            description = read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise SpecInvalid(f"the job file {path} is not {'TOML' if is_toml else 'YAML'}: {error}") from error
    if not isinstance(description, dict):
        raise SpecInvalid(f"the job file {path} must be a mapping, for example `command: [python, train.py]`")
    if wrong := [key for key in description if not isinstance(key, str)]:
        raise SpecInvalid(f"the job file {path}: the key {shortened(wrong[0])} is no text: write a key of a job")
    directory = description.get("directory", ".")
    if isinstance(directory, str) and "\0" not in directory:
        description["directory"] = os.path.realpath(path.resolve().parent / os.path.expanduser(directory))
    return description


def read_yaml(text: str) -> Any:
    """Return what a YAML text holds. Raises ValueError: why it is no YAML, and where."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Leaves 2:8 and 1:30:00 as they are written: YAML 1.1 takes them for numbers to the base of sixty. A key
        that is given twice is a mistake, of which YAML itself would keep the last."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            # Not where it is constructed: there `<<: *other` has brought in keys that are given again on purpose.
            node = super().compose_mapping_node(anchor)
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                seen.add(str(key.value))
            return node

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not (tag.endswith(":int") and pattern.match("2:8"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:int",
        re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)$"),
        list("-+0123456789"),
    )
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ValueError(f"{getattr(error, 'problem', None) or str(error).splitlines()[0]}{where}") from error
    except RecursionError as error:
        raise ValueError(f"brackets without end: {error}") from error
