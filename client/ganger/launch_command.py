"""Commands that start the ranks of a job by themselves, as ranks of ours: their flags become the job's request.

Under `torchrun` or `accelerate launch` the ranks would be children of one task: not stopped at a boundary, on one node
only. What is not understood (`bash run.sh`) stays as it is, and the job is one tree of processes.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ganger.rank_command import RankCommand, from_accelerate, from_torchrun, python_beside
from ganger.spec_values import parse_command, parse_gpus, whole_number
from ganger.text import counted
from ganger.v1.job_pb2 import JobSpec

# With one of these only a shell knows what the line means.
_SHELL_SIGNS: Final = re.compile(r"[;&|<>()$`\\*?\[\]{}~#!\n]")
_SHELLS: Final = ("sh", "bash", "zsh", "dash")
_VARIABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON: Final = re.compile(r"(?:.*/)?python[0-9.]*")
_TORCH_MODULES: Final = {"torch.distributed.run": False, "torch.distributed.launch": True}
_ACCELERATE_MODULES: Final = {"accelerate.commands.launch": 0, "accelerate.commands.accelerate_cli": 1, "accelerate": 1}
_WITH_VALUE: Final = ("-W", "-X")


def rank_command_of(command: Sequence[str], environment: Mapping[str, str], directory: str) -> RankCommand | None:
    """Return what each rank runs, None for a command that starts no ranks, or in a way that is not understood. Raises
    ValueError for flags that Ganger has no equal of."""
    words, variables = _plain_words(list(command))
    if not words:
        return None
    environment = {**environment, **variables}
    found = _by_program(words, environment, directory)
    if found is None or not variables:
        return found
    return RankCommand(**{**vars(found), "environment": {**variables, **found.environment}})


def starts_python(command: Sequence[str]) -> bool:
    """Return whether a command line starts a Python by name. Other programs have no agent."""
    return bool(command) and os.path.basename(command[0]).startswith("python")


def agent_note(spec: JobSpec) -> str:
    """Return what a role that runs no Python costs a job whose other roles do; '' for other jobs."""
    own = {program.role: list(program.command) for program in spec.role_programs if program.command}
    without = [role.name for role in spec.roles if not starts_python(own.get(role.name) or spec.command)]
    if spec.agent == JobSpec.AGENT_NONE or not 0 < len(without) < len(spec.roles):
        return ""
    named = f"role{'s' * (len(without) > 1)} {' and '.join(without)} run{'s' * (len(without) == 1)} no Python"
    return (
        f"{named}: the whole job is suspended wherever it is, not between two steps, and can be saved or moved only as"
        " process images"
    )


def _plain_words(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words of the program that starts, and the variables that are set for it: behind `env`, and behind
    `sh -c` where the line is one plain command."""
    if len(words) == 3 and os.path.basename(words[0]) in _SHELLS and re.fullmatch(r"-l?c", words[1]):
        try:
            words = [] if _SHELL_SIGNS.search(words[2]) else shlex.split(words[2])
        except ValueError:
            words = []
        words = words[1:] if words[:1] == ["exec"] else words
    elif words and os.path.basename(words[0]) == "env":
        words = words[1:]
    variables: dict[str, str] = {}
    while words and (set_ := _VARIABLE.fullmatch(words[0])):
        variables[set_[1]] = set_[2]
        words = words[1:]
    return words, variables


def _by_program(words: list[str], environment: Mapping[str, str], directory: str) -> RankCommand | None:
    program, rest = words[0], words[1:]
    name, path = os.path.basename(program), environment.get("PATH", "")
    if _PYTHON.fullmatch(program):
        return _by_python(program, rest, environment, directory)
    if name == "torchrun":
        return from_torchrun(name, rest, python_beside(program, path, directory), environment)
    if name == "accelerate-launch" or (name == "accelerate" and rest[:1] == ["launch"]):
        rest = rest if name == "accelerate-launch" else rest[1:]
        return from_accelerate(rest, python_beside(program, path, directory), environment, directory)
    return None


def _by_python(python: str, words: list[str], environment: Mapping[str, str], directory: str) -> RankCommand | None:
    """`python -m torch.distributed.run`, `python /opt/env/bin/torchrun` and the like."""
    at = 0
    while at < len(words) and words[at].startswith("-") and not words[at].startswith("-m"):
        if words[at].startswith("-c"):
            return None
        at += 2 if words[at] in _WITH_VALUE else 1
    if at >= len(words):
        return None
    word, rest = words[at], words[at + 1 :]
    if word.startswith("-m"):
        # "-m MODULE" or "-mMODULE"
        word, *rest = rest or [""] if word == "-m" else [word[2:], *rest]
    else:
        # A script: the programs that pip installs are some.
        name = os.path.basename(word)
        word = {"torchrun": "torch.distributed.run", "accelerate-launch": "accelerate.commands.launch"}.get(name, name)
    if word in _TORCH_MODULES:
        program = "torchrun" if word == "torch.distributed.run" else word
        return from_torchrun(program, rest, python, environment, is_old=_TORCH_MODULES[word])
    if word in _ACCELERATE_MODULES:
        skipped = _ACCELERATE_MODULES[word]
        if rest[:skipped] != ["launch"][:skipped]:
            return None
        return from_accelerate(rest[skipped:], python, environment, directory)
    return None


def replaced_flags(description: Mapping[str, Any]) -> str:
    """Return a sentence for the user about flags of the command that mean nothing here; empty if there are none."""
    try:
        found = _found(description, {})
    except ValueError:
        return ""
    if found is None or not found.replaced or _stays_whole(description, found):
        return ""
    verb = "is" if len(found.replaced) == 1 else "are"
    return f"{', '.join(found.replaced)} of {found.program} {verb} replaced by Ganger's own rendezvous, logs and cores"


def with_ranks(description: Mapping[str, Any], captured: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a job's description in which the ranks are Ganger's, and what is wrong with it, by key. `captured`: the
    environment that the job gets beside its own."""
    try:
        found = _found(description, captured)
    except ValueError as error:
        return dict(description), {"command": str(error)}
    if found is None or description.get("roles") is not None:
        return dict(description), {}
    try:
        changes = _request(found, description)
    except _MisfitError as error:
        return dict(description), {error.key: str(error)}
    result = {**description, **changes}
    if _stays_whole(description, found):
        return result, {}
    result["command"] = list(found.command)
    if found.program != "accelerate launch":
        # That one starts a single process without them.
        result["distributed"] = True
    if found.environment:
        given = description.get("environment")
        result["environment"] = {**(given if isinstance(given, Mapping) else {}), **found.environment}
    if found.max_restarts and description.get("max_failures") is None:
        result["max_failures"] = found.max_restarts
    return result, {}


def _stays_whole(description: Mapping[str, Any], found: RankCommand) -> bool:
    """Return whether the launch command runs as it is, as one task: without an agent nothing stops ranks together but a
    freeze of their node."""
    return description.get("agent") == "none" and found.nodes[1] == 1


class _MisfitError(ValueError):
    """The request of the job does not fit the flags of its command."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _request(found: RankCommand, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return GPUs, tasks and nodes that follow from the flags and from what the user wants. Raises _MisfitError."""
    try:
        gpus, most = (-1, 0) if description.get("gpus") is None else parse_gpus(description["gpus"])
        per_task = whole_number(1, 64)(description.get("gpus_per_task") or 1)
        tasks = whole_number(0, 10_000)(description.get("tasks") or 0)
        nodes = whole_number(0, 10_000)(description.get("nodes") or 0)
    except ValueError:
        return {}  # Reported where they are read
    if _stays_whole(description, found):
        return _request_whole(found, description, gpus)
    if found.is_elastic and (gpus < 0 or most):
        return _elastic_request(found, gpus, most, per_task)
    if most:
        raise _MisfitError("gpus", f"{_starts(found)}: a range of GPUs goes with a range of nodes (--nnodes 1:4)")
    ranks = _ranks(found, gpus, per_task)
    if tasks not in (0, ranks):
        raise _MisfitError("tasks", f"{_starts(found)}, each a task: leave out the tasks, or say {ranks}")
    per_node_known = found.per_node and not found.is_elastic
    if per_node_known and nodes not in (0, found.nodes[0]):
        raise _MisfitError("nodes", f"{_starts(found)}: leave out the nodes, or say {found.nodes[0]}")
    changes: dict[str, Any] = {"nodes": found.nodes[0]} if per_node_known else {}
    if gpus == 0 or (gpus < 0 and found.is_on_cpu):
        return changes | {"gpus": 0, "tasks": ranks}
    if gpus < 0:
        return changes | {"gpus": ranks * per_task, "gpus_per_task": per_task}
    if gpus % ranks:
        raise _MisfitError("gpus", f"{_starts(found)}, which cannot share {counted(gpus, 'GPU')}: say {ranks}")
    if description.get("gpus_per_task") is not None and per_task != gpus // ranks:
        raise _MisfitError("gpus_per_task", f"{_starts(found)} on {counted(gpus, 'GPU')}: {gpus // ranks} to a task")
    return changes | {"gpus_per_task": gpus // ranks}


def _ranks(found: RankCommand, gpus: int, per_task: int) -> int:
    """Return the number of ranks, where the GPUs are no range. Raises _MisfitError."""
    if not found.per_node:
        if gpus == 0:
            raise _MisfitError("gpus", f"{found.program} starts a process for each GPU: say how many, or give a number")
        return max(gpus, per_task) // per_task
    if not found.is_elastic:
        return found.per_node * found.nodes[0]
    nodes = gpus // (per_task * found.per_node)
    if not found.nodes[0] <= nodes <= found.nodes[1] or gpus % (per_task * found.per_node):
        raise _MisfitError("gpus", f"{_starts(found)}: not on {counted(gpus, 'GPU')}")
    return found.per_node * nodes


def _request_whole(found: RankCommand, description: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Return the request of a launch command that runs as one task."""
    if gpus >= 0 or not found.per_node or description.get("gpus_per_task") is not None:
        return {} if gpus <= 0 else {"gpus_per_task": gpus}
    return {"gpus": 0} if found.is_on_cpu else {"gpus": found.per_node, "gpus_per_task": found.per_node}


def _elastic_request(found: RankCommand, gpus: int, most: int, per_task: int) -> dict[str, Any]:
    unit = (found.per_node or 1) * per_task
    least, largest = found.nodes[0] * unit, found.nodes[1] * unit
    if found.per_node == 0 and gpus < 0:
        raise _MisfitError("gpus", f"{found.program} starts a process for each GPU: say how many, like 2:8")
    if gpus < 0:
        return {"gpus": f"{least}:{largest}", "gpus_per_task": per_task}
    if found.per_node and (gpus < least or most > largest):
        raise _MisfitError("gpus", f"{_starts(found)}: a range from {least} to {counted(largest, 'GPU')}")
    return {"gpus_per_task": per_task}


def _starts(found: RankCommand) -> str:
    least, most = found.nodes
    nodes = f"{least} to {counted(most, 'node')}" if found.is_elastic else counted(least, "node")
    count = counted(found.per_node, "process")
    return f"{found.program} starts {count if found.per_node else 'a process for each GPU'} on {nodes}"


def _found(description: Mapping[str, Any], captured: Mapping[str, str]) -> RankCommand | None:
    given, directory = description.get("environment"), str(description.get("directory") or "")
    own = {str(name): str(text) for name, text in given.items()} if isinstance(given, Mapping) else {}
    try:
        command = parse_command(description["command"])
        directory = directory or os.getcwd()
    except (ValueError, KeyError):
        return None  # Reported where it is read
    except OSError:
        directory = "/"
    return rank_command_of(command, {**captured, **own}, directory)
