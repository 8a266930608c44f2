"""What each rank runs, as found in the command line of `torchrun` (torch.distributed.run, torch.distributed.launch).

`accelerate launch` is taken apart in `accelerate_command`; `launch_command` has the request that follows.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn


@dataclass(frozen=True)
class RankCommand:
    """A launch command, taken apart.

    `program`: as its user calls it. `command`, `environment`: of each rank. `per_node`: ranks of a node; 0 for one on
    each GPU of the job. `nodes`: fewest and most. `replaced`: its flags for which Ganger has something of its own.
    """

    program: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    per_node: int = 1
    nodes: tuple[int, int] = (1, 1)
    is_on_cpu: bool = False
    max_restarts: int = 0
    replaced: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        return self.nodes[0] < self.nodes[1]


class FlagParser(argparse.ArgumentParser):
    """Parses the flags of another program. Only those that are given are in the result; each is known with hyphens and
    with underscores. Raises ValueError for others."""

    def __init__(self, program: str) -> None:
        super().__init__(program, add_help=False, argument_default=argparse.SUPPRESS)
        self.options: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")

    def flag(self, name: str, *short: str, is_switch: bool = False) -> None:
        """Add the flag `--name`, which has a value unless it is a switch."""
        long = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}"))
        action = "store_true" if is_switch else "store"
        self.add_argument(*short, *long, dest=name.replace("-", "_"), action=action)
        self.options[name.replace("-", "_")] = f"--{name}"

    def script(self) -> None:
        """Add what follows the flags."""
        self.add_argument("training_script")
        self.add_argument("training_script_args", nargs=argparse.REMAINDER)

    def given(self, words: Sequence[str]) -> dict[str, Any]:
        return vars(self.parse_args(list(words)))

    def named(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Return the flags of these keys, as users write them."""
        return tuple(self.options[key] for key in keys if key in self.options)


def python_beside(program: str, path: str, directory: str) -> str:
    """Return the Python that an installed program such as `torchrun` runs with: the one beside it, or the one that its
    first line names. "python" where neither is there. `path`: the variable PATH of the job."""
    found = os.path.join(directory, program) if os.sep in program else shutil.which(program, path=path or None)
    if not found:
        return "python"
    beside = os.path.join(os.path.dirname(found), "python")
    if os.access(beside, os.X_OK):
        is_first = os.sep not in program and shutil.which("python", path=path or None) == beside
        return "python" if is_first else beside
    try:
        with open(found, "rb") as file:
            first = file.readline(512).decode(errors="replace")
    except OSError:
        return "python"
    named = re.fullmatch(r"#!\s*(\S*python[0-9.]*)\s*", first)
    return named[1] if named else "python"


def python_words(python: str, script: str, arguments: Sequence[str], *, is_module: bool) -> tuple[str, ...]:
    """Return the command of a rank that runs a script or a module with unbuffered output, as torchrun does."""
    return (python, "-u", *(("-m",) if is_module else ()), script, *arguments)


def whole(text: object, flag: str, least: int) -> int:
    """Return a flag's value as a number. Raises ValueError."""
    try:
        number = int(str(text))
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{flag} {text}: must be a whole number, at least {least}")
    return number


# -- torchrun

# The store, the addresses, the logs, the signals and the cores of the ranks are Ganger's.
_REPLACED: Final = (
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "node-rank", "master-addr", "master-port"),
    *("local-addr", "monitor-interval", "start-method", "event-log-handler", "log-dir", "local-ranks-filter"),
    *("duplicate-stdout-filters", "duplicate-stderr-filters", "numa-binding", "signals-to-handle", "shutdown-timeout"),
)
_REPLACED_SHORT: Final = (("redirects", "-r"), ("tee", "-t"))
_REFUSED: Final = {
    "logs_specs": "log files are Ganger's own (`ganger logs --rank K`)",
    "virtual_local_rank": "each rank has its number on the node and sees its own GPU",
    "role": "all ranks have the role default",
}
_HONOURED: Final = frozenset(
    {"nnodes", "nproc_per_node", "max_restarts", "standalone", "module", "no_python", "run_path", "use_env"}
    | {"training_script", "training_script_args"}
)
_SWITCHES: Final = ("standalone", "no-python", "run-path", "virtual-local-rank", "use-env")
_BY_GPUS: Final = ("gpu", "auto")
# A shell becomes the script, so that the script is the rank: only there is the number of the rank known.
_WITH_LOCAL_RANK: Final = 's=$1; shift; exec "$0" -u "$s" "--local-rank=$LOCAL_RANK" "$@"'
_MODULE_WITH_LOCAL_RANK: Final = 's=$1; shift; exec "$0" -u -m "$s" "--local-rank=$LOCAL_RANK" "$@"'


def _parser(program: str) -> FlagParser:
    parser = FlagParser(program)
    for name in ("nnodes", "nproc-per-node", "max-restarts", "logs-specs", "role", *_REPLACED):
        parser.flag(name)
    for name, short in _REPLACED_SHORT:
        parser.flag(name, short)
    parser.flag("module", "-m", is_switch=True)
    for name in _SWITCHES:
        parser.flag(name, is_switch=True)
    parser.script()
    return parser


def from_torchrun(
    program: str, words: Sequence[str], python: str, environment: Mapping[str, str], *, is_old: bool = False
) -> RankCommand:
    """Return what each rank of `torchrun WORDS` runs. `is_old`: it is torch.distributed.launch, which gives the script
    the argument --local-rank. `environment`: of the job; PET_NNODES and the like are flags of torchrun, too.

    Raises ValueError for flags that are none, or that Ganger has no equal of."""
    parser = _parser(program)
    variables = {key: environment.get(f"PET_{key.upper()}") for key in parser.options}
    # "0" leaves a switch off
    switches = {"module", *(name.replace("-", "_") for name in _SWITCHES)}
    off = {key for key, value in variables.items() if value is None or (key in switches and value == "0")}
    given = {**{key: value for key, value in variables.items() if key not in off}, **parser.given(words)}
    if given.get("role") == "default":
        del given["role"]
    for key, why in _REFUSED.items():
        if key in given:
            raise ValueError(f"{program} {parser.options[key]}: Ganger has no equal of it: {why}")
    is_module, has_python = bool(given.get("module")), not given.get("no_python")
    if is_module and not has_python:
        raise ValueError(f"{program}: --no-python and --module do not go together")
    keys = [key for key in given if key not in _HONOURED]
    script, arguments = str(given["training_script"]), list(map(str, given["training_script_args"]))
    python = environment.get("PYTHON_EXEC") or python
    if is_old and not given.get("use_env"):
        if not has_python:
            raise ValueError(f"{program}: --no-python goes with --use-env")
        shell = _MODULE_WITH_LOCAL_RANK if is_module else _WITH_LOCAL_RANK
        command = ("sh", "-c", shell, python, script, *arguments)
    elif has_python:
        command = python_words(python, script, arguments, is_module=is_module)
    else:
        command = (script, *arguments)
    return RankCommand(
        program=program,
        command=command,
        per_node=_per_node(str(given.get("nproc_per_node", "1"))),
        nodes=(1, 1) if given.get("standalone") else _nodes(str(given.get("nnodes", "1"))),
        max_restarts=whole(given.get("max_restarts", 0), "--max-restarts", 0),
        replaced=parser.named(keys),
    )


def _per_node(text: str) -> int:
    if text in _BY_GPUS:
        return 0
    if not text.isdigit():
        raise ValueError(f"--nproc-per-node {text}: give a number, or gpu for one process on each GPU of the job")
    return whole(text, "--nproc-per-node", 1)


def _nodes(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    found = whole(least, "--nnodes", 1), whole(most if colon else least, "--nnodes", 1)
    if found[0] > found[1]:
        raise ValueError(f"--nnodes {text}: a range goes from fewer to more nodes")
    return found
