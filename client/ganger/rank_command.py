"""What each rank runs, as found in a command line that starts ranks by itself: `torchrun`, `accelerate launch`.

The parsers of the flags are in `torchrun_command` and `accelerate_command`, the request that follows from them in
`launch_command`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn


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

    def given(self, words: Sequence[str]) -> dict[str, str | bool | list[str]]:
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
        return beside if os.sep in program else _short(beside, path)
    try:
        with open(found, "rb") as file:
            first = file.readline(512).decode(errors="replace")
    except OSError:
        return "python"
    named = re.fullmatch(r"#!\s*(\S*python[0-9.]*)\s*", first)
    return named[1] if named else "python"


def _short(python: str, path: str) -> str:
    """Return "python" where PATH finds the same one by that name."""
    return "python" if shutil.which("python", path=path or None) == python else python


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
