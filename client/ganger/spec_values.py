"""Values of a job description: each function parses one and raises ValueError with what to write instead.

A value comes from a flag (a text), from a file or from Python. `command_hint` finds commands that no node could
execute.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from ganger.text import parse_cores, parse_duration
from ganger.v1.job_pb2 import Dependency, JobSpec, Mechanism
from ganger.v1.resources_pb2 import Level
from ganger.wire import times

_LEAST_WEIGHT, _MOST_WEIGHT = 0.01, 100
_MOST_PASSES = 1_000
_MAX_COMMAND_BYTES = 64 * 1024
# What a shell takes for the end of a command, its way to another, or its files; a newline among them.
_SHELL_SIGNS = "\n;&|<>"
_JOB_FILES: Final = (".yaml", ".yml", ".toml")
_BATCH_SCRIPTS: Final = (".sbatch", ".slurm")
# Interpreters, and their options without a value.
_INTERPRETERS: Final = (
    (re.compile(r"python[0-9.]*"), re.compile(r"-[bBdEiIOPqsSuvx]+")),
    (re.compile(r"(ba|da|z)?sh"), re.compile(r"-[aefluvx]+")),
)
# Of a directory in which a file is not found.
_NAMES_MOST: Final = 1_000
_MECHANISMS: Final = ("image", "adapter", "replay", "signal", "none")
_STOP_SIGNAL = re.compile(r"(?:[BR]+:)?(?:SIG)?(?P<name>[A-Z0-9]+)(?:@(?P<seconds>[1-9]\d{0,6}))?")
_NOT_CAUGHT: Final = ("KILL", "STOP")
_CONDITIONS: Final = {
    "ok": Dependency.CONDITION_SUCCEEDED,
    "notok": Dependency.CONDITION_FAILED,
    "any": Dependency.CONDITION_ENDED,
    "each": Dependency.CONDITION_EACH,
    # As Slurm's aftercorr.
    "corr": Dependency.CONDITION_EACH,
}
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,17}")
# Of "jobs/7" and "arrays/7", whose numbers are unique.
_KIND: Final = re.compile(r"\b(jobs|arrays)/")
_TIME_OF_DAY: Final = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_SCHEDULER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


# The wire's levels and not those of ganger.cluster: the closer, the smaller, here too, and a submission loads less.
def parse_level(value: object) -> Level.ValueType:
    levels = {level_text(number): number for number in Level.values() if number != Level.LEVEL_UNSPECIFIED}
    found = levels.get(str(value).lower())
    if found is None:
        raise ValueError(f"{value!r} is not a level; there are {', '.join(levels)}")
    return found


def level_text(level: Level.ValueType) -> str:
    return Level.Name(level).removeprefix("LEVEL_").lower()


def parse_name(value: object) -> str:
    name = parse_text(value)
    if len(name) > 63:
        raise ValueError(f"must be at most 63 characters, not {len(name)}")
    if not name.isprintable():
        raise ValueError(f"{name!r} has characters that cannot be printed")
    return name


def parse_device_types(value: object) -> str:
    """Return device types in order of preference, separated by commas; empty: any."""
    text = parse_name(value)
    types = [one.strip() for one in text.split(",")] if text else []
    if not all(types):
        raise ValueError(f"{shortened(text)} names an empty type: separate types by single commas, as a100,h100")
    if len(set(types)) < len(types):
        raise ValueError(f"{shortened(text)} names a type twice")
    return ",".join(types)


def parse_text(value: object) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"must be a text, not {value!r}")
    text = str(value)
    # Neither the system nor the wire could carry these; bytes that were no UTF-8 are surrogates in Python.
    if "\0" in text:
        raise ValueError(f"{shortened(text)} contains a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shortened(text)} is not UTF-8") from None
    return text


def shortened(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return repr(shown) if isinstance(value, str) else shown


def _words(text: str) -> list[str]:
    """Split a line as a shell does. ValueError for anything but one program, such as a pipe or a redirection."""
    line = re.sub(r"\s*\n\s*\Z", "", text.replace("\\\n", " ").lstrip())
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_SHELL_SIGNS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words = list(lexer)
    for word in words:
        if word and not word.strip(_SHELL_SIGNS):
            what = "a second line" if "\n" in word else repr(word)
            raise ValueError(f"has {what}, and no shell runs it: quote it, or write for example [sh, -c, '... && ...']")
    return words


def parse_command(value: object) -> list[str]:
    if isinstance(value, str):
        try:
            shlex.split(parse_text(value))
        except ValueError as error:
            raise ValueError(f"{value!r} cannot be split into words ({error}): write it as a list") from None
        command = _words(value)
    else:
        command = [parse_text(word) for word in parse_list(value)]
    if not command or not command[0]:
        raise ValueError("must name a program to run")
    if len(command) > 1_000 or sum(len(os.fsencode(word)) for word in command) > _MAX_COMMAND_BYTES:
        raise ValueError(f"must be at most 1,000 words and {_MAX_COMMAND_BYTES} bytes: put the rest into a file")
    return command


def command_hint(command: Sequence[str], directory: str) -> str:
    """Return what to write instead of a command that no node could execute; empty for other commands."""
    if not command:
        return ""
    return _program_hint(command, directory) or _missing_script(command, directory)


def _program_hint(command: Sequence[str], directory: str) -> str:
    word = command[0]
    path = Path(directory, word)
    if _is_program(word, directory):
        return ""
    # Unlike the methods of Path these do not raise where a word is longer than a name can be.
    if os.path.isdir(path):
        return f"{word} is a directory: name the program that the job is to run"
    if not os.path.isfile(path):
        first, *more = word.split() or [""]
        is_line = any(sign in word for sign in _SHELL_SIGNS) or (more and _is_program(first, directory))
        if len(command) == 1 and is_line:
            return f"{word!r} is one word, and no shell runs it: write it as several, or --wrap {shlex.quote(word)}"
        return _missing_file(command, path) if not os.path.exists(path) else ""
    if path.suffix in _JOB_FILES:
        return f"{word} is a job file, not a program: submit it with --file {word}"
    if os.access(path, os.X_OK):
        # As in a shell, a name without a slash is looked for in PATH only.
        return f"{word} is not in PATH: write {shlex.join([f'./{word}', *command[1:]])}"
    runner = {".py": "python", ".sh": "bash", ".bash": "bash", ".sbatch": "bash", ".slurm": "bash"}.get(path.suffix)
    if runner is None:
        return f"{word} is not a program that can be executed: write `chmod +x {word}`, or name its interpreter first"
    line = shlex.join([runner, *command])
    slurm = ", and give what its #SBATCH lines ask for as flags" if path.suffix in _BATCH_SCRIPTS else ""
    return f"{word} is not a program that can be executed: write {line}{slurm}"


def _missing_file(command: Sequence[str], path: Path) -> str:
    """Return what to write instead of a missing file whose name is that of a job file or a batch script, or whose path
    begins in the working directory, which is the same on all nodes; or nothing."""
    # A suffix may be mistyped as well as a name.
    word, *more = command
    import difflib

    is_script = not more and difflib.get_close_matches(path.suffix, (*_JOB_FILES, *_BATCH_SCRIPTS), 1, 0.8)
    # A member of an array puts its value into braces.
    if not is_script and ("/" not in word or word.startswith("/") or "{" in word):
        return ""
    instead = _alike(path)
    if not is_script:
        return f"there is no file {path}{instead or ': correct its name, or --directory'}"
    return f"there is no file {path}{instead}; a job file is submitted with --file, a script with its interpreter"


def _alike(path: Path) -> str:
    """Return the end of a sentence that names the file of the same directory with the most similar name, if any is."""
    import difflib

    try:
        present = [entry.name for entry in itertools.islice(path.parent.iterdir(), _NAMES_MOST)]
    except OSError:
        present = []
    alike = difflib.get_close_matches(path.name, present, 1)
    return f"; {alike[0]} is there" if alike else ""


def _missing_script(command: Sequence[str], directory: str) -> str:
    """Return what is wrong with a command whose interpreter gets a script that is not there; or nothing.

    A relative path begins in the working directory, which is the same on all nodes; an absolute one may be of a node.
    """
    flags = next((flags for name, flags in _INTERPRETERS if name.fullmatch(os.path.basename(command[0]))), None)
    if flags is None:
        return ""
    script = next((word for word in command[1:] if not flags.fullmatch(word)), "-")
    # Other options may have a value, or stand for a script. A member of an array puts its value into braces.
    if script.startswith(("-", "/")) or "{" in script:
        return ""
    path = Path(directory, script)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        fix = "correct its name, or --directory; if only nodes have it, give its absolute path"
        return f"there is no file {path}{_alike(path)}: {fix}"
    except OSError:
        pass
    return ""


def _is_program(word: str, directory: str) -> bool:
    """Return whether this machine could execute it."""
    if "/" not in word:
        return bool(word and shutil.which(word))
    return os.access(Path(directory, word), os.X_OK)


def parse_directory(value: object) -> str:
    # Unlike the methods of Path these do not raise for a name that is too long, or `~` of a user that there is not.
    path = Path(os.path.expanduser(parse_text(value))).absolute()
    if not os.path.isdir(path):
        raise ValueError(f"{path} is not a directory here")
    return str(path)


def parse_mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping of names to texts")
    return value


def parse_labels(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > 100:
        raise ValueError("must be a mapping of at most 100 names to texts")
    if "" in value:
        raise ValueError("a label has no name: write NAME=VALUE")
    return {parse_name(name): parse_name(text) for name, text in value.items()}


def parse_gpus(value: object) -> tuple[int, int]:
    """ "4" is (4, 0), "2:8" is (2, 8)."""
    return number_or_range(0, 65_536, "GPUs")(value)


def number_or_range(smallest: int, largest: int, what: str) -> Callable[[object], tuple[int, int]]:
    """Return a function that reads "4" as (4, 0), and a range from 1 on, "2:8", as (2, 8)."""

    def parse(value: object) -> tuple[int, int]:
        least, colon, most = str(value).partition(":")
        if not colon:
            return whole_number(smallest, largest)(value), 0
        try:
            found = whole_number(1, largest)(least), whole_number(1, largest)(most)
        except ValueError:
            raise ValueError(f"must be a whole number, or a range like 2:8, not {value!r}") from None
        if found[0] >= found[1]:
            raise ValueError(f"a range goes from fewer to more {what}, like 2:8, not {value!r}")
        return found

    return parse


def whole_number(smallest: int, largest: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        text = str(value).strip()
        number = int(text) if not isinstance(value, bool) and re.fullmatch(r"[+-]?\d{1,18}", text) else None
        if number is None or not smallest <= number <= largest:
            raise ValueError(f"must be a whole number from {smallest} to {largest}, not {value!r}")
        return number

    return parse


def parse_weight(value: object) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        number = math.nan
    if not _LEAST_WEIGHT <= number <= _MOST_WEIGHT:
        raise ValueError(f"must be a number from {_LEAST_WEIGHT} to {_MOST_WEIGHT}, not {value!r}")
    return number


def parse_convergence(value: object) -> tuple[float, int]:
    """A part of the largest loss, and for how many passes over the data it falls by less."""
    part, _, passes = str(value).partition(",")
    try:
        found = float(part), int(passes or "1")
    except ValueError:
        found = math.nan, 0
    if isinstance(value, bool) or not (0 < found[0] < 1 and 1 <= found[1] <= _MOST_PASSES):
        raise ValueError(f"{value!r} must be PART or PART,PASSES, with 0 < PART < 1 and 1 to {_MOST_PASSES} passes")
    return found


def parse_cores_or_auto(value: Any) -> int:
    """Millicores; zero for "auto": a share of the node, tuned by measurement."""
    return 0 if value == "auto" else parse_cores(value)


def parse_positive_duration(value: Any) -> float:
    seconds = parse_duration(value)
    if seconds <= 0:
        raise ValueError("must be longer than nothing")
    return seconds


def parse_deadline(value: Any) -> float:
    """Return the Unix seconds of a time, or of a duration from now. YAML and TOML read times by themselves.

    As in Slurm "18:00" is a time of day, today or, if that has passed, tomorrow; never a duration. Raises ValueError.
    """
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, datetime.min.time())
    if clock := _TIME_OF_DAY.fullmatch(str(value).strip()):
        value = _next_at(clock)
    if not isinstance(value, datetime):
        try:
            return time.time() + parse_positive_duration(value)
        except ValueError:
            pass
        try:
            value = datetime.fromisoformat(str(value).strip())
        except ValueError:
            example = "write for example 2026-12-24T18:00, 18:00 or 6h"
            raise ValueError(f"{value!r} is neither a time nor a duration: {example}") from None
    try:
        # Without a zone it is that of this machine.
        seconds: float = value.timestamp()
    except (OverflowError, OSError, ValueError):
        raise ValueError(f"{value} is out of range") from None
    if value.tzinfo is None and times.local_datetime(times.timestamp(seconds)).replace(tzinfo=None) != value:
        why = "clocks are put forward over it; write another time, or its zone"
        raise ValueError(f"{value} does not exist here: {why}")
    if seconds <= time.time():
        raise ValueError(f"{value} has passed")
    return seconds


def _next_at(clock: re.Match[str]) -> datetime:
    """Return the next time, without a zone, at which the clocks here show this time of day. Raises ValueError."""
    hour, minute, second = (int(part or 0) for part in clock.groups())
    now = datetime.now().astimezone().replace(tzinfo=None)
    try:
        today = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
    except ValueError:
        raise ValueError(f"{clock[0]!r} is no time of day; a duration is written 90m or 2h30m") from None
    return today if today > now else today + timedelta(days=1)


def parse_checkpoint_interval(value: Any) -> float:
    return -1.0 if value in ("never", False) else parse_positive_duration(value)


def parse_scheduler(value: object) -> str:
    if not _SCHEDULER.fullmatch(parse_text(value)):
        raise ValueError(f"{value!r} is not module:Class")
    return parse_text(value)


def parse_schedule_at(value: object) -> bool:
    """Return whether the job is scheduled at ends of its epochs."""
    if value not in ("step", "epoch"):
        raise ValueError(f"{value!r} is neither step nor epoch")
    return value == "epoch"


def parse_dependencies(value: object) -> list[Dependency]:
    """Return the dependencies of "7", "jobs/7", "ok:7:8,any:9" or a list of such texts. Raises ValueError."""
    texts = value if isinstance(value, list | tuple) else [value]
    found = []
    for text in [part for one in texts for part in str(one).split(",")]:
        words = _KIND.sub("", text.strip()).split(":")
        condition = "ok" if words[0].isdigit() else words.pop(0).removeprefix("after")
        if condition not in _CONDITIONS or not words or not all(_NUMBER.fullmatch(word) for word in words):
            kinds = ", ".join(_CONDITIONS)
            raise ValueError(
                f"{text.strip()!r} is no dependency: write a number, or one of {kinds} with it: ok:7,any:8:9"
            )
        found += [Dependency(condition=_CONDITIONS[condition], number=int(word)) for word in words]
    return found


def dependencies_text(dependencies: Iterable[Dependency]) -> str:
    """Return dependencies as they are written: "ok:7,any:9"."""
    names = {condition: name for name, condition in reversed(_CONDITIONS.items())}
    return ",".join(f"{names.get(one.condition, '?')}:{one.number}" for one in dependencies)


def parse_boolean(value: object) -> bool | None:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return value


def parse_agent(value: object) -> JobSpec.Agent.ValueType:
    agents = {"automatic": JobSpec.AGENT_AUTOMATIC, "none": JobSpec.AGENT_NONE}
    if not isinstance(value, str) or value not in agents:
        raise ValueError(f"must be automatic or none, not {value!r}")
    return agents[value]


def parse_mechanism(value: object) -> Mechanism.ValueType:
    if not isinstance(value, str) or value not in _MECHANISMS:
        raise ValueError(f"{value!r} is not a mechanism; there are {', '.join(_MECHANISMS)}")
    return Mechanism.Value(f"MECHANISM_{value.upper()}")


def parse_stop_signal(value: object) -> tuple[str, float | None]:
    """Return the name of a signal without SIG, and the seconds after "@" or None. As Slurm: "B:USR1@300", "10"."""
    found = _STOP_SIGNAL.fullmatch("" if isinstance(value, bool) else str(value).strip().upper())
    name = found["name"] if found else ""
    if name.isdigit():
        name = next((one.name.removeprefix("SIG") for one in signal.Signals if one == int(name)), "")
    if found is None or f"SIG{name}" not in signal.Signals.__members__ or name in _NOT_CAUGHT:
        raise ValueError(f"{value!r} is not a signal that a script can handle: write for example TERM or USR1@300")
    return name, float(found["seconds"]) if found["seconds"] else None


def parse_list(value: object) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"must be a list, not {value!r}")
    return value
