"""A job as people describe it, by flags, a YAML or TOML file, or keyword arguments, as the JobSpec of the wire.

All that is wrong is found at once, each with its path ("roles[0].tasks", or "--gpus" if it came from a flag). What only
the master can know (whether the gang could ever fit) is not judged here.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from ganger.units import parse_cores, parse_duration, parse_memory
from ganger.v1.job_pb2 import JobSpec
from ganger.v1.resources_pb2 import Level, Locality, Role, TaskShape
from ganger.wire import times
from ganger.wire.errors import SpecInvalid, Violation

Value = TypeVar("Value")

KEYS = frozenset(
    [
        "name",
        "command",
        "directory",
        "environment",
        "gpus",
        "gpus_per_task",
        "tasks",
        "roles",
        "gpu_type",
        "nodes",
        "cpus_per_gpu",
        "cpus_per_task",
        "memory",
        "gpu_memory",
        "locality",
        "tolerance",
        "patience",
        "priority",
        "weight",
        "converges",
        "time",
        "deadline",
        "max_failures",
        "scheduler",
        "preemptible",
        "movable",
        "checkpoint_every",
        "labels",
        "agent",
        "distributed",
    ]
)
_EVERY_KEY = ", ".join(sorted(KEYS | {"array"}))
_ROLE_KEYS = frozenset({"name", "tasks", "gpus", "cpus", "memory"})
_DEFAULT_PATIENCE_S = 600.0
_MAX_TASKS = 10_000
_LEAST_WEIGHT, _MOST_WEIGHT = 0.01, 100
_MOST_PASSES = 1_000
# Signs of what is said of one key.
_LONGEST = 300
_MAX_COMMAND_BYTES = 64 * 1024
_MAX_ENVIRONMENT_BYTES = 256 * 1024
# What Linux gives to a program in one string, without "=" and the NUL at the end.
_MAX_VARIABLE_BYTES = 128 * 1024 - 2
# What a shell takes for the end of a command, its way to another, or its files; a newline among them.
_SHELL_SIGNS = "\n;&|<>"
_JOB_FILES: Final = (".yaml", ".yml", ".toml")
_BATCH_SCRIPTS: Final = (".sbatch", ".slurm")
# Of a directory in which a file is not found.
_NAMES_MOST: Final = 1_000
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SCHEDULER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

# What a training script needs of the submitting shell. Neither secrets nor thread counts: those the scheduler sets.
_CAPTURED = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "CONDA_DEFAULT_ENV",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONUNBUFFERED",
        "PYTHONHASHSEED",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "CUDA_HOME",
        "CUDA_PATH",
        "XDG_CACHE_HOME",
        "XDG_DATA_HOME",
        "TORCH_HOME",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    ]
)
_CAPTURED_PREFIXES = ("LC_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_")


def load_job_file(path: Path) -> dict[str, Any]:
    """The description in a .yaml, .yml or .toml file. A relative `directory` in it is relative to the file.
    Raises SpecInvalid."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecInvalid(f"cannot read the job file {path}: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix == ".toml":
        description = _parse_toml(path, text)
    elif path.suffix in (".yaml", ".yml"):
        description = _parse_yaml(path, text)
    else:
        raise SpecInvalid(f"the job file {path} must end in .yaml, .yml or .toml")
    if not isinstance(description, dict):
        raise SpecInvalid(f"the job file {path} must be a mapping, for example `command: [python, train.py]`")
    if wrong := [key for key in description if not isinstance(key, str)]:
        raise SpecInvalid(f"the job file {path}: the key {_short(wrong[0])} is no text: no key of a job is like that")
    directory = description.get("directory", ".")
    if isinstance(directory, str) and "\0" not in directory:
        description["directory"] = str((path.resolve().parent / Path(directory).expanduser()).resolve())
    return description


def captured_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the submitting shell's environment goes with a job: an allow-list."""
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
    reader = _Reader(description, origins or {})
    reader.violations += wrong
    no_variables: dict[str, str] = {}
    no_words: list[str] = []
    for key in sorted(set(description) - KEYS):
        reader.complain(key, _unknown(key))
    roles, (gpus_min, gpus_max) = _roles(reader)
    spec = JobSpec(
        display_name=reader.read("name", _name, ""),
        command=reader.read("command", _command, no_words, required="say what to run"),
        working_directory=reader.read("directory", _directory, "") if reader.has("directory") else _here(reader),
        environment=_merged_environment(reader, os.environ if environ is None else environ),
        roles=roles,
        gpus_min=gpus_min,
        gpus_max=gpus_max,
        device_type=reader.read("gpu_type", _name, ""),
        locality=_locality(reader),
        nodes=reader.read("nodes", _whole(0, _MAX_TASKS), 0),
        priority=reader.read("priority", _whole(-1_000, 1_000), 0),
        weight=reader.read("weight", _weight, 0.0),
        gpu_memory_bytes=reader.read("gpu_memory", parse_memory, 0),
        max_failures=reader.read("max_failures", _whole(0, 1_000), 0),
        scheduler=reader.read("scheduler", _scheduler, ""),
        labels=reader.read("labels", _labels, no_variables),
        agent=reader.read("agent", _agent, JobSpec.AGENT_AUTOMATIC),
        distributed=reader.read("distributed", _truth, None) or False,
    )
    if hint := _hint(spec.command, spec.working_directory):
        reader.complain("command", hint)
    if spec.nodes > (tasks := sum(role.tasks for role in roles)) > 0:
        reader.complain("nodes", f"{spec.nodes} nodes are more than there are tasks ({tasks}): each has one at least")
    preemptible = reader.read("preemptible", _truth, None)
    if preemptible is not None:
        spec.preemptible = preemptible
    movable = reader.read("movable", _truth, None)
    if movable is not None:
        spec.movable = movable
    converges = reader.read("converges", _convergence, None)
    if converges is not None:
        spec.convergence.least_decrease, spec.convergence.passes = converges
    time_limit = reader.read("time", _positive_duration, None)
    if time_limit is not None:
        spec.time_limit.CopyFrom(times.duration(time_limit))
    deadline = reader.read("deadline", _deadline, None)
    if deadline is not None:
        spec.deadline.CopyFrom(times.timestamp(deadline))
    every = reader.read("checkpoint_every", _checkpoint_interval, None)
    if every is not None:
        spec.checkpoint_interval.CopyFrom(times.duration(every))
    if reader.violations:
        raise SpecInvalid("the job cannot be submitted as described", violations=reader.violations)
    return spec


def _bounded(text: str) -> str:
    """What was given may be anything, of any length; at the end of a sentence is what to do."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def _unknown(key: str) -> str:
    from difflib import get_close_matches

    if key == "array":
        return "a job has none: submit it as an array"
    near = get_close_matches(key, KEYS, 1)
    return f"there is no such key; is it {near[0]}?" if near else f"there is no such key; there are {_EVERY_KEY}"


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
    """And between which numbers of GPUs it may have any, if it is elastic: then it asks for the fewest."""
    if reader.has("roles"):
        for key in ("gpus", "gpus_per_task", "tasks", "cpus_per_gpu", "cpus_per_task", "memory"):
            if reader.has(key):
                reader.complain(key, "does not go with roles: each role has its own")
        return _listed_roles(reader), (0, 0)
    # Read first and whole, so that one mistake does not hide another.
    gpus, most = reader.read("gpus", _gpus, (-1, 0))
    per_task = reader.read("gpus_per_task", _whole(1, 64), 0)
    tasks = reader.read("tasks", _whole(1, _MAX_TASKS), 0)
    per_gpu = reader.read("cpus_per_gpu", _cores_or_auto, 0)
    per_cpu_task = reader.read("cpus_per_task", _cores_or_auto, 0)
    memory = reader.read("memory", parse_memory, 0)
    if gpus < 0:
        gpus = (tasks or 1) * (per_task or 1)
    shape_gpus = 0
    if gpus == 0:
        if per_task:
            reader.complain("gpus_per_task", "does not go with 0 GPUs")
        if per_gpu:
            reader.complain(
                "cpus_per_gpu", "does not go with 0 GPUs: give the cores of a task instead (--cpus-per-task)"
            )
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
    shape = TaskShape(gpus=shape_gpus, millicores=millicores, memory_bytes=memory)
    return [Role(name="worker", tasks=tasks, shape=shape)], ((gpus, most) if most else (0, 0))


def _check_split(reader: _Reader, gpus: int, most: int, shape_gpus: int, tasks: int) -> None:
    """Check that `gpus` (up to `most` of an elastic job) make whole tasks of `shape_gpus`; `tasks`: as given, or 0."""
    if gpus % shape_gpus:
        reader.complain("gpus_per_task", f"{gpus} GPUs cannot be shared out by {shape_gpus} to a task")
    elif tasks and tasks != gpus // shape_gpus:
        reader.complain("tasks", f"{gpus} GPUs, {shape_gpus} to a task, make {gpus // shape_gpus} tasks, not {tasks}")
    if most and reader.has("tasks"):
        reader.complain("tasks", "does not go with a range of GPUs: say how many a task has (--gpus-per-task)")
    if most % shape_gpus:
        reader.complain("gpus", f"{most} GPUs cannot be shared out by {shape_gpus} to a task")
    if most and reader.has("nodes"):
        reader.complain("nodes", "does not go with a range of GPUs: where it grows is found out as it runs")


def _listed_roles(reader: _Reader) -> list[Role]:
    nothing: Sequence[Any] = ()
    listed = reader.read("roles", _sequence, nothing)
    if not listed:
        reader.complain("roles", "must list at least one role")
    roles: list[Role] = []
    seen: set[str] = set()
    for index, description in enumerate(listed[:100]):
        path = f"roles[{index}]"
        if not isinstance(description, Mapping):
            reader.complain(path, "must be a mapping of name, tasks, gpus, cpus, memory")
            continue
        one = _Reader(description, {str(key): f"{path}.{key}" for key in (*description, *_ROLE_KEYS)})
        for key in sorted(str(key) for key in set(description) - _ROLE_KEYS):
            one.complain(key, f"there is no such key; there are {', '.join(sorted(_ROLE_KEYS))}")
        name = one.read(
            "name", _text, "worker" if len(listed) == 1 else "", required="" if len(listed) == 1 else "name it"
        )
        gpus = one.read("gpus", _whole(0, 64), 0)
        shape = TaskShape(
            gpus=gpus,
            millicores=one.read("cpus", _cores_or_auto, 0 if gpus else 1_000),
            memory_bytes=one.read("memory", parse_memory, 0),
        )
        roles.append(Role(name=name, tasks=one.read("tasks", _whole(1, _MAX_TASKS), 1), shape=shape))
        if name and name in seen:
            one.complain("name", f"{name!r} is taken by an earlier role")
        seen.add(name)
        reader.violations += one.violations
    if sum(role.tasks for role in roles) > _MAX_TASKS:
        reader.complain("roles", f"more than {_MAX_TASKS} tasks in all")
    return roles


def _locality(reader: _Reader) -> Locality:
    wish = reader.read("locality", _level, None)
    widest = reader.read("tolerance", _level, None)
    patience = reader.read("patience", parse_duration, None)
    if wish is not None and widest is not None and wish > widest:
        reader.complain("locality", f"{_level_text(wish)} is wider than the tolerance {_level_text(widest)}")
    if patience is not None and (wish is None or widest is None):
        reader.complain("patience", "goes with both a locality and a wider tolerance")
    if wish is not None and widest is None:
        # A wish without a tolerance is a demand.
        return Locality(widest=wish)
    locality = Locality(widest=widest or Level.LEVEL_UNSPECIFIED, wish=wish or Level.LEVEL_UNSPECIFIED)
    if wish is not None:
        locality.patience.CopyFrom(times.duration(_DEFAULT_PATIENCE_S if patience is None else patience))
    return locality


# The wire's levels and not those of ganger.cluster: the closer, the smaller, here too, and a submission loads less.
def _level(value: object) -> Level.ValueType:
    levels = {_level_text(number): number for number in Level.values() if number != Level.LEVEL_UNSPECIFIED}
    found = levels.get(str(value).lower())
    if found is None:
        raise ValueError(f"{value!r} is not a level; there are {', '.join(levels)}")
    return found


def _level_text(level: Level.ValueType) -> str:
    return Level.Name(level).removeprefix("LEVEL_").lower()


def _name(value: object) -> str:
    name = _text(value)
    if len(name) > 63:
        raise ValueError(f"must be at most 63 characters, not {len(name)}")
    if not name.isprintable():
        raise ValueError(f"{name!r} has characters that cannot be printed")
    return name


def _text(value: object) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"must be a text, not {value!r}")
    text = str(value)
    # Neither the system nor the wire could carry these; bytes that were no UTF-8 are surrogates in Python.
    if "\0" in text:
        raise ValueError(f"{_short(text)} contains a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{_short(text)} is not UTF-8") from None
    return text


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return repr(shown) if isinstance(value, str) else shown


def _words(text: str) -> list[str]:
    """As a shell would split it. What would make a shell do more than to run one program is no word."""
    line = re.sub(r"\s*\n\s*\Z", "", text.replace("\\\n", " ").lstrip())
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_SHELL_SIGNS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words = list(lexer)
    for word in words:
        if word and not word.strip(_SHELL_SIGNS):
            what = "a second line" if "\n" in word else repr(word)
            raise ValueError(f"has {what}, and no shell runs it: quote it, or write for example [sh, -c, '... && ...']")
    return words


def _command(value: object) -> list[str]:
    if isinstance(value, str):
        try:
            shlex.split(_text(value))
        except ValueError as error:
            raise ValueError(f"{value!r} cannot be split into words ({error}): write it as a list") from None
        command = _words(value)
    else:
        command = [_text(word) for word in _sequence(value)]
    if not command or not command[0]:
        raise ValueError("must name a program to run")
    if len(command) > 1_000 or sum(len(os.fsencode(word)) for word in command) > _MAX_COMMAND_BYTES:
        raise ValueError(f"must be at most 1,000 words and {_MAX_COMMAND_BYTES} bytes: put the rest into a file")
    return command


def _hint(command: Sequence[str], directory: str) -> str:
    """Return what to write instead of a command that no node could execute; empty for other commands."""
    if not command:
        return ""
    word = command[0]
    path = Path(directory, word)
    if _is_program(word, directory):
        return ""
    # Unlike the methods of Path these do not raise where a word is longer than a name can be.
    if not os.path.isfile(path):
        first, *more = word.split() or [""]
        if len(command) == 1 and (
            any(sign in word for sign in _SHELL_SIGNS) or (more and _is_program(first, directory))
        ):
            return f"{word!r} is one word, and no shell runs it: write it as several, or --wrap {shlex.quote(word)}"
        return _missing_file(path) if len(command) == 1 and not os.path.exists(path) else ""
    if path.suffix in _JOB_FILES:
        return f"{word} is a job file, not a program: submit it with --file {word}"
    if os.access(path, os.X_OK):
        # As in a shell, a name without a slash is looked for in PATH only.
        return f"{word} is not in PATH: write {shlex.join([f'./{word}', *command[1:]])}"
    runner = {".py": "python", ".sh": "bash", ".bash": "bash", ".sbatch": "bash", ".slurm": "bash"}.get(path.suffix)
    if runner is None:
        return ""
    line = shlex.join([runner, *command])
    slurm = ", and give what its #SBATCH lines ask for as flags" if path.suffix in _BATCH_SCRIPTS else ""
    return f"{word} is not a program that can be executed: write {line}{slurm}"


def _missing_file(path: Path) -> str:
    """Return what to write instead of a missing file whose name is that of a job file or a batch script, or nothing."""
    import difflib

    # A suffix may be mistyped as well as a name.
    if not difflib.get_close_matches(path.suffix, (*_JOB_FILES, *_BATCH_SCRIPTS), 1, 0.8):
        return ""
    try:
        present = [entry.name for entry in itertools.islice(path.parent.iterdir(), _NAMES_MOST)]
    except OSError:
        present = []
    alike = difflib.get_close_matches(path.name, present, 1)
    instead = f"; {alike[0]} is there" if alike else ""
    return f"there is no file {path}{instead}; a job file is submitted with --file, a script with its interpreter"


def _is_program(word: str, directory: str) -> bool:
    """Whether this machine could execute it."""
    if "/" not in word:
        return bool(word and shutil.which(word))
    return os.access(Path(directory, word), os.X_OK)


def _directory(value: object) -> str:
    path = Path(_text(value)).expanduser().absolute()
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory here")
    return str(path)


def _here(reader: _Reader) -> str:
    try:
        return _directory(os.getcwd())
    except FileNotFoundError:
        reader.complain("directory", "the present directory is gone: go to another, or name one")
    except ValueError as error:
        reader.complain("directory", str(error))
    return ""


def _merged_environment(reader: _Reader, environ: Mapping[str, str]) -> dict[str, str]:
    """What is captured, under what is given."""
    nothing: Mapping[str, object] = {}
    given = reader.read("environment", _mapping, nothing)
    result: dict[str, str] = {}
    for name, text in {**captured_environment(environ), **given}.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            reader.complain("environment", f"{name!r} is not the name of an environment variable")
        elif name.startswith("GANGER_"):
            reader.complain("environment", f"{name} is Ganger's own: names starting with GANGER_ are set by it")
        else:
            try:
                result[name] = _text(text)
            except ValueError as error:
                reader.complain("environment", f"{name}: {error}")
                continue
            if len(os.fsencode(name)) + len(os.fsencode(result[name])) > _MAX_VARIABLE_BYTES:
                what = f"{name}: must be at most {_MAX_VARIABLE_BYTES} bytes, for no program can be started with more"
                reader.complain("environment", f"{what}: put it into a file")
    if sum(len(os.fsencode(name)) + len(os.fsencode(text)) for name, text in result.items()) > _MAX_ENVIRONMENT_BYTES:
        reader.complain("environment", f"must be at most {_MAX_ENVIRONMENT_BYTES} bytes in all")
    return result


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping of names to texts")
    return value


def _labels(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > 100:
        raise ValueError("must be a mapping of at most 100 names to texts")
    if "" in value:
        raise ValueError("a label has no name: write NAME=VALUE")
    return {_name(name): _name(text) for name, text in value.items()}


def _gpus(value: object) -> tuple[int, int]:
    """ "4" is (4, 0), "2:8" is (2, 8)."""
    least, colon, most = str(value).partition(":")
    if not colon:
        return _whole(0, 65_536)(value), 0
    try:
        found = _whole(1, 65_536)(least), _whole(1, 65_536)(most)
    except ValueError:
        raise ValueError(f"must be a whole number, or a range like 2:8, not {value!r}") from None
    if found[0] >= found[1]:
        raise ValueError(f"a range goes from fewer to more GPUs, like 2:8, not {value!r}")
    return found


def _whole(smallest: int, largest: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        text = str(value).strip()
        number = int(text) if not isinstance(value, bool) and re.fullmatch(r"[+-]?\d{1,18}", text) else None
        if number is None or not smallest <= number <= largest:
            raise ValueError(f"must be a whole number from {smallest} to {largest}, not {value!r}")
        return number

    return parse


def _weight(value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        number = math.nan
    if not _LEAST_WEIGHT <= number <= _MOST_WEIGHT:
        raise ValueError(f"must be a number from {_LEAST_WEIGHT} to {_MOST_WEIGHT}, not {value!r}")
    return number


def _convergence(value: object) -> tuple[float, int]:
    """A part of the largest loss, and for how many passes over the data it falls by less."""
    part, _, passes = str(value).partition(",")
    try:
        found = float(part), int(passes or "1")
    except ValueError:
        found = math.nan, 0
    if isinstance(value, bool) or not (0 < found[0] < 1 and 1 <= found[1] <= _MOST_PASSES):
        raise ValueError(f"{value!r} must be PART or PART,PASSES, with 0 < PART < 1 and 1 to {_MOST_PASSES} passes")
    return found


def _cores_or_auto(value: Any) -> int:
    """Millicores; zero for "auto": a share of the node, tuned by measurement."""
    return 0 if value == "auto" else parse_cores(value)


def _positive_duration(value: Any) -> float:
    seconds = parse_duration(value)
    if seconds <= 0:
        raise ValueError("must be longer than nothing")
    return seconds


def _deadline(value: Any) -> float:
    """Unix seconds of a time, or of a duration from now. YAML and TOML read times by themselves."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, datetime.min.time())
    if not isinstance(value, datetime):
        try:
            return time.time() + _positive_duration(value)
        except ValueError:
            pass
        try:
            value = datetime.fromisoformat(str(value).strip())
        except ValueError:
            raise ValueError(
                f"{value!r} is neither a time nor a duration: write for example 2026-12-24T18:00 or 6h"
            ) from None
    try:
        # Without a zone it is that of this machine.
        seconds: float = value.timestamp()
    except (OverflowError, OSError, ValueError):
        raise ValueError(f"{value} is out of range") from None
    if value.tzinfo is None and times.local_datetime(times.timestamp(seconds)).replace(tzinfo=None) != value:
        raise ValueError(
            f"{value} does not exist here: clocks are put forward over it; write another time, or its zone"
        )
    if seconds <= time.time():
        raise ValueError(f"{value} has passed")
    return seconds


def _checkpoint_interval(value: Any) -> float:
    return -1.0 if value in ("never", False) else _positive_duration(value)


def _scheduler(value: object) -> str:
    if not _SCHEDULER.fullmatch(_text(value)):
        raise ValueError(f"{value!r} is not module:Class")
    return _text(value)


def _truth(value: object) -> bool | None:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return value


def _agent(value: object) -> JobSpec.Agent.ValueType:
    agents = {"automatic": JobSpec.AGENT_AUTOMATIC, "none": JobSpec.AGENT_NONE}
    if not isinstance(value, str) or value not in agents:
        raise ValueError(f"must be automatic or none, not {value!r}")
    return agents[value]


def _sequence(value: object) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"must be a list, not {value!r}")
    return value


def _parse_toml(path: Path, text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecInvalid(f"the job file {path} is not TOML: {error}") from error


def _parse_yaml(path: Path, text: str) -> Any:
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
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SpecInvalid(f"the job file {path} is not YAML: {why}{where}") from error
    except (ValueError, RecursionError) as error:
        # A date that is none, a number of thousands of digits, brackets without end.
        raise SpecInvalid(f"the job file {path} cannot be read: {error}") from error
