"""A job as people describe it, by flags, a YAML or TOML file, or keyword arguments, as the JobSpec of the wire.

All that is wrong is found at once, each with its path ("roles[0].tasks", or "--gpus" if it came from a flag). Checks
that need the state of the cluster (could the gang ever fit?) are left to the master.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ganger.launch_command import with_ranks
from ganger.role_spec import (
    MOST_TASKS,
    VARIABLE_NAME,
    DescriptionReader,
    bounded,
    check_role_commands,
    read_environment,
    read_roles,
)
from ganger.spec_values import (
    command_hint,
    level_text,
    parse_agent,
    parse_boolean,
    parse_checkpoint_interval,
    parse_command,
    parse_convergence,
    parse_deadline,
    parse_dependencies,
    parse_device_types,
    parse_directory,
    parse_labels,
    parse_level,
    parse_mechanism,
    parse_name,
    parse_positive_duration,
    parse_schedule_at,
    parse_scheduler,
    parse_stop_signal,
    parse_weight,
    shortened,
    whole_number,
)
from ganger.text import meant, os_reason, parse_duration, parse_memory
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
from ganger.v1.resources_pb2 import Level, Locality
from ganger.wire import times
from ganger.wire.errors import SpecInvalid, Violation

Value = TypeVar("Value")
KEYS = frozenset(
    [
        *("name", "command", "directory", "environment", "gpus", "gpus_per_task", "tasks", "roles", "gpu_type"),
        *("nodes", "cpus_per_gpu", "cpus_per_task", "memory", "gpu_memory", "locality", "tolerance", "patience"),
        *("priority", "weight", "converges", "time", "deadline", "max_failures", "scheduler", "preemptible", "movable"),
        *("checkpoint_every", "labels", "agent", "distributed", "mechanism", "must_move", "close_connections"),
        *("signal", "grace", "requeue", "checkpoint_copies", "disk_mb_per_s", "net_mb_per_s", "partition"),
        *("schedule_at", "after"),
    ]
)
# One of locality, tolerance and patience replaces all of them.
UPDATE_KEYS = (
    *("name", "priority", "time", "gpu_type", "partition", "locality", "tolerance", "patience", "memory"),
    "cpus_per_gpu",
)
_NO_LIMIT = "never"
_DEFAULT_PATIENCE_S = 600.0
# As Slurm's --signal without a time.
_STOP_GRACE_S = 60.0
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
        if name in _CAPTURED or (name.startswith(_CAPTURED_PREFIXES) and VARIABLE_NAME.fullmatch(name))
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
    reader = DescriptionReader(description, origins or {})
    reader.violations += wrong
    for key, text in misfits.items():
        reader.complain(key, bounded(text))
    no_variables: dict[str, str] = {}
    for key in sorted(set(description) - KEYS):
        reader.complain(key, _unknown(key))
    roles = read_roles(reader)
    common = roles.common_command
    spec = JobSpec(
        display_name=reader.read("name", parse_name, ""),
        command=reader.read("command", parse_command, common, required="" if common else "say what to run"),
        working_directory=reader.read("directory", parse_directory, "") if reader.has("directory") else _here(reader),
        environment=read_environment(reader, variables),
        roles=roles.roles,
        role_programs=roles.programs,
        gpus_min=roles.gpus_min,
        gpus_max=roles.gpus_max,
        device_type=reader.read("gpu_type", parse_device_types, ""),
        partition=reader.read("partition", parse_name, ""),
        locality=_locality(reader),
        nodes=reader.read("nodes", whole_number(0, MOST_TASKS), 0),
        priority=reader.read("priority", whole_number(-1_000, 1_000), 0),
        weight=reader.read("weight", parse_weight, 0.0),
        gpu_memory_bytes=reader.read("gpu_memory", parse_memory, 0),
        checkpoint_copies=reader.read("checkpoint_copies", whole_number(1, 2), 0),
        max_failures=reader.read("max_failures", whole_number(0, 1_000), 0),
        scheduler=reader.read("scheduler", parse_scheduler, ""),
        labels=reader.read("labels", parse_labels, no_variables),
        agent=reader.read("agent", parse_agent, JobSpec.AGENT_AUTOMATIC),
        distributed=reader.read("distributed", parse_boolean, None) or False,
        mechanism=reader.read("mechanism", parse_mechanism, MECHANISM_UNSPECIFIED),
        is_move_required=reader.read("must_move", parse_boolean, None) or False,
        closes_connections=reader.read("close_connections", parse_boolean, None) or False,
        is_scheduled_at_epochs=reader.read("schedule_at", parse_schedule_at, False),
    )
    if reader.has("command") and (hint := command_hint(spec.command, spec.working_directory)):
        reader.complain("command", hint)
    check_role_commands(spec, reader)
    if spec.nodes > (tasks := sum(role.tasks for role in roles.roles)) > 0:
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


def _read_mechanism(spec: JobSpec, reader: DescriptionReader) -> None:
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


def _read_optional(spec: JobSpec, reader: DescriptionReader) -> None:
    """Set the fields of `spec` whose absence has a meaning, as far as the description has them."""
    for key in ("preemptible", "movable"):
        if (value := reader.read(key, parse_boolean, None)) is not None:
            setattr(spec, key, value)
    if (converges := reader.read("converges", parse_convergence, None)) is not None:
        spec.convergence.least_decrease, spec.convergence.passes = converges
    if (dependencies := reader.read("after", parse_dependencies, None)) is not None:
        spec.dependencies.extend(dependencies)
    if (time_limit := reader.read("time", parse_positive_duration, None)) is not None:
        spec.time_limit.CopyFrom(times.duration(time_limit))
    if (deadline := reader.read("deadline", parse_deadline, None)) is not None:
        spec.deadline.CopyFrom(times.timestamp(deadline))
    if (every := reader.read("checkpoint_every", parse_checkpoint_interval, None)) is not None:
        spec.checkpoint_interval.CopyFrom(times.duration(every))


def _unknown(key: str) -> str:
    if key == "array":
        return "a job has none: submit it as an array"
    return f"there is no such key; {meant(key, KEYS | {'array'})}"


def _locality(reader: DescriptionReader) -> Locality:
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


def _here(reader: DescriptionReader) -> str:
    try:
        return parse_directory(os.getcwd())
    except FileNotFoundError:
        reader.complain("directory", "the present directory is gone: go to another, or name one")
    except ValueError as error:
        reader.complain("directory", str(error))
    return ""


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
