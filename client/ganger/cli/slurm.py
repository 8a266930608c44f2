"""Names that users type out of habit, from Slurm and other systems, and what Ganger has in their place.

The page docs/how-to/from-slurm.md has the same tables for readers. Loaded only where a name is unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import click

from ganger.text import counted

# An unknown command -> what to type.
COMMANDS: Final[Mapping[str, str]] = {
    "sbatch": "`ganger submit`",
    "srun": "`ganger submit --follow`",
    "salloc": "`ganger submit`: GPUs are given to a command, and not to a shell",
    "squeue": "`ganger queue`",
    "sinfo": "`ganger nodes` or `ganger partitions`",
    "scancel": "`ganger cancel`",
    "sacct": "`ganger queue --all`, and `ganger history JOB`",
    "sacctmgr": "`ganger usage`; teams, quotas and partitions are settings of the master",
    "sbcast": "nothing: files are at the same paths on all nodes",
    "scontrol": "`ganger show`, `update`, `suspend`, `resume`, `nodes`, `drain`, `partitions` or `reserve`",
    "scrontab": "nothing: give the submission to `cron`",
    "sdiag": "`ganger doctor`, and the metrics of the master",
    "sstat": "`ganger show JOB`",
    "sprio": "`ganger why JOB`",
    "sshare": "`ganger usage`",
    "sreport": "`ganger report`, and `ganger usage`",
    "sattach": "`ganger logs -f JOB`",
    "smap": "`ganger top`",
    "list": "`ganger queue`",
    "ls": "`ganger queue`",
    "ps": "`ganger queue`",
    "jobs": "`ganger queue`",
    "status": "`ganger queue` or `ganger show JOB`",
    "get": "`ganger queue` or `ganger nodes`",
    "info": "`ganger show JOB` or `ganger nodes`",
    "describe": "`ganger show JOB`",
    "kill": "`ganger cancel JOB`",
    "delete": "`ganger cancel JOB`",
    "rm": "`ganger cancel JOB`, and for a node `ganger nodes remove`",
    "stop": "`ganger suspend JOB` or `ganger cancel JOB`; for the cluster of `ganger up` `ganger down`",
    "pause": "`ganger suspend JOB`",
    "hold": "`ganger suspend JOB`",
    "continue": "`ganger resume JOB`",
    "release": "`ganger resume JOB`",
    "requeue": "`ganger suspend JOB --level checkpoint` and `ganger resume JOB`",
    "run": "`ganger submit`",
    "start": "`ganger submit` for a job, `ganger up` for a cluster",
    "log": "`ganger logs JOB`",
    "tail": "`ganger logs -f JOB`",
    "attach": "`ganger logs -f JOB`",
    "modify": "`ganger update JOB`",
    "users": "`ganger usage`",
}

_SUBMIT: Final[Mapping[str, str]] = {
    "--account": "users belong to teams, which the master's settings name",
    "--begin": "give the submission to `at` or `cron`",
    "--chdir": "write --directory PATH",
    "--comment": "write --label NAME=VALUE",
    "--constraint": "write --gpu-type TYPES",
    "--cpus-per-task": "write --cpus-per-task N",
    "--dependency": "write --after ok:JOB (afterok), notok:, any: or each: (aftercorr)",
    "--error": "`ganger logs JOB` prints what it wrote, stdout and stderr together",
    "--exclude": "an operator cordons nodes",
    "--exclusive": "request all GPUs of a node (--gpus 8 --nodes 1); with --not-preemptible it shares none of them",
    "--export": "write --env NAME[=VALUE]; what a training script needs is passed on anyway",
    "--gpus-per-node": "write --gpus N, all GPUs of the job, and --nodes N",
    "--gres": "write --gpus N, all GPUs of the job, and --gpu-type TYPES",
    "--hold": "`ganger suspend JOB` holds it once it is submitted",
    "--input": "redirect it in a line, --wrap 'program < file'",
    "--job-name": "write --name TEXT",
    "--mail-type": "`ganger wait JOB` ends when the job does",
    "--mail-user": "`ganger wait JOB` ends when the job does",
    "--mem": "write --memory SIZE, of each task and not of a node",
    "--mem-per-cpu": "write --memory SIZE, of each task",
    "--mem-per-gpu": "write --memory SIZE, of each task",
    "--nice": "write --priority N, where more goes first",
    "--nodelist": "--gpu-type chooses nodes by their GPUs, and `ganger move JOB --to NODE` moves it",
    "--nodes": "write --nodes N",
    "--no-requeue": "its own failures do not restart it, unless --max-failures is given",
    "--ntasks": "write --tasks N, or --gpus N: one task for each GPU",
    "--ntasks-per-node": "write --tasks N, of the whole job, and --nodes N",
    "--output": "`ganger logs JOB` prints what it wrote",
    "--parsable": "write --json; without it stdout ends with the number of the job",
    "--pty": "jobs have no terminal; `ganger submit --follow` prints what one writes",
    "--qos": "write --priority N",
    "--reservation": "leave it out: jobs of a reservation's users go to its nodes by themselves (`ganger reserve`)",
    "--switches": "write --locality LEVEL",
    "--test-only": "write --dry-run",
    "--wait": "write --follow, or `ganger wait JOB`",
}
_QUEUE: Final[Mapping[str, str]] = {
    "--Format": "write --json",
    "--format": "write --json",
    "--iterate": "write `ganger top`",
    "--jobs": "write `ganger show JOB`",
    "--long": "write `ganger show JOB`, or --json",
    "--me": 'write --user "$USER"',
    "--nodelist": "write `ganger nodes show NODE`",
    "--start": "write `ganger why JOB`",
    "--states": "write --state STATE",
}
_CANCEL: Final[Mapping[str, str]] = {
    "--name": "write --name TEXT",
    "--signal": "a job gets SIGTERM, and SIGKILL ten seconds later",
    "--state": "`ganger queue --state STATE` lists jobs to cancel",
    "--user": "write --user USER",
}
# Command -> its foreign options by their long names, and the long names of letters.
OPTIONS: Final[Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]]] = {
    "submit": (
        _SUBMIT,
        {
            "-A": "--account",
            "-D": "--chdir",
            "-H": "--hold",
            "-J": "--job-name",
            "-N": "--nodes",
            "-W": "--wait",
            "-b": "--begin",
            "-c": "--cpus-per-task",
            "-d": "--dependency",
            "-i": "--input",
            "-o": "--output",
            "-q": "--qos",
            "-w": "--nodelist",
            "-x": "--exclude",
        },
    ),
    "queue": (
        _QUEUE,
        {
            "-O": "--Format",
            "-i": "--iterate",
            "-j": "--jobs",
            "-o": "--format",
            "-t": "--states",
            "-w": "--nodelist",
        },
    ),
    "cancel": (
        _CANCEL,
        {"-n": "--name", "-s": "--signal", "-t": "--state", "-u": "--user"},
    ),
}


# Command -> letters that mean something else than in Slurm, which the error of a wrong value explains.
LETTERS: Final[Mapping[str, Mapping[str, str]]] = {
    "queue": {"-l": "for Slurm's -l write `ganger show JOB`, or --json", "-n": "Slurm's -n is --name here"},
}
# A state by Slurm's short and long name -> the state of `ganger queue`.
STATES: Final[Mapping[str, str]] = {
    name: state
    for state, names in {
        "pending": ("PD", "PR", "NF", "RQ", "PREEMPTED", "NODE_FAIL", "REQUEUED"),
        "starting": ("CF", "CONFIGURING"),
        "running": ("R",),
        "stopping": ("CG", "COMPLETING"),
        "suspended": ("S",),
        "succeeded": ("CD", "COMPLETED"),
        "failed": ("F", "TO", "OOM", "TIMEOUT", "OUT_OF_MEMORY"),
        "cancelled": ("CA",),
    }.items()
    for name in names
}
# A program of Slurm that a job shall run -> what to write.
_PROGRAMS: Final[Mapping[str, str]] = {
    "sbatch": "write `ganger submit -- bash SCRIPT`",
    "srun": "leave it out: Ganger starts the tasks itself",
    "salloc": "leave it out: the job has its GPUs when it starts",
}


def foreign_program(command: Sequence[str]) -> str:
    """Return a sentence about a job that runs a program of Slurm; empty for other jobs."""
    word = os.path.basename(command[0]) if command else ""
    return f"the job runs Slurm's {word}: {_PROGRAMS[word]}" if word in _PROGRAMS else ""


def letter_notes(directory: str | None, variables: Iterable[str]) -> Iterator[str]:
    """Yield sentences about values of `submit -C` and `-e` that are none here, and are in Slurm.

    directory: as given to -C. variables: as given to -e.
    """
    if directory and "/" not in directory and not os.path.isdir(directory):
        yield "-C is --directory; Slurm's -C is --gpu-type here"
    if any("=" not in text and re.search(r"[./%]", text) for text in variables):
        yield "-e is --env; what a job writes to stderr is in its log, `ganger logs JOB`"


def with_letter_hint(command: str, error: click.UsageError) -> click.UsageError:
    """Return the error of an option of this command, with a hint if its letter means something else in Slurm."""
    if isinstance(error, click.BadParameter):
        names = error.param.opts if error.param is not None else []
    else:
        names = [error.option_name] if isinstance(error, click.BadOptionUsage) else []
    hint = next((text for letter, text in LETTERS.get(command, {}).items() if letter in names), "")
    return click.UsageError(f"{error.format_message().rstrip('.')}; {hint}", error.ctx) if hint else error


# As in Slurm, a directive begins its line; a script is one of the first words.
_DIRECTIVE: Final = re.compile(rb"^#SBATCH\s", re.MULTILINE)
_WORDS: Final = 8
_MOST_BYTES: Final = 64 * 1024


def ignored_directives(command: Sequence[str], directory: str) -> str:
    """Return a sentence about the #SBATCH lines of the script that a command runs; empty if there are none.

    command: its words. directory: the job's working directory.
    """
    for word in command[:_WORDS]:
        path = os.path.join(directory, word)
        try:
            # Unlike the methods of Path it raises nothing for a word that is longer than a name can be.
            if not os.path.isfile(path):
                continue
            with open(path, "rb") as file:
                count = len(_DIRECTIVE.findall(file.read(_MOST_BYTES)))
        except OSError:
            continue
        if count:
            verb = "is" if count == 1 else "are"
            lines = counted(count, "#SBATCH line")
            return f"{lines} of {word} {verb} ignored: give them as options, which `ganger submit --help` lists"
    return ""


def unknown_option(command: str, option: str, near: Iterable[str]) -> str:
    """Return the error of an option that a command has not, with what to write in its place.

    command: its name, "submit", or "". option: as typed, "-J" or "--mem". near: own options of similar names, the
    nearest first.
    """
    known, letters = OPTIONS.get(command, ({}, {}))
    name = letters.get(option, option)
    called = option if name == option else f"{option} (Slurm's {name})"
    names = list(near)
    hint = f"did you mean {' or '.join(names)}?" if names else f"`{f'ganger {command}'.strip()} --help` lists them"
    return f"there is no option {called}: {known.get(name, hint)}"
