"""Names from other systems: the error of each names what Ganger has in its place, which is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from ganger.cli.main import COMMANDS, ganger
from ganger.cli.slurm import COMMANDS as FOREIGN
from ganger.cli.slurm import OPTIONS, STATES
from ganger.spec import load_job_file, make_spec
from kit.canned import Call, CannedMaster

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-slurm.md"
# Words of other systems that begin with s, too.
PLAIN = ("status", "stop", "start")
Output = pytest.CaptureFixture[str]


def command_named(name: str) -> click.Command:
    command = ganger.get_command(click.Context(ganger), name)  # type: ignore[attr-defined]
    assert command is not None, name
    return command


def named_in(text: str, command: str) -> Iterator[tuple[str, str]]:
    """Yield the commands and the options ("" for a command alone) that a hint for users of `command` names."""
    for line in re.findall(r"`(.*?)`", text):
        for word in re.findall(r"ganger ([a-z]+)", line):
            yield word, ""
        yield from ((re.findall(r"ganger ([a-z]+)", line)[-1], option) for option in re.findall(r"--[a-z-]+", line))
    yield from ((command, option) for option in re.findall(r"--[a-z-]+", re.sub(r"`.*?`|'.*?'", "", text)))


HINTS = [
    *((text, "") for text in FOREIGN.values()),
    *((text, command) for command, (known, _) in OPTIONS.items() for text in known.values()),
]


@pytest.mark.parametrize(("text", "command"), HINTS)
def test_what_a_hint_names_is_there(text: str, command: str) -> None:
    for name, option in named_in(text, command):
        assert name in COMMANDS
        own = {word for parameter in command_named(name).params for word in parameter.opts}
        assert not option or option in own


def test_no_name_from_elsewhere_is_one_of_our_own() -> None:
    assert not FOREIGN.keys() & COMMANDS.keys()
    for command, (known, letters) in OPTIONS.items():
        own = {word for parameter in command_named(command).params for word in parameter.opts}
        assert not own & letters.keys()
        assert set(letters.values()) <= known.keys()
        assert known.keys() & own <= set(letters.values()), "Slurm's letters of our own options"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("squeue", "there is no command 'squeue': for that there is `ganger queue`"),
        ("scancel 3", "there is no command 'scancel': for that there is `ganger cancel`"),
        ("list", "there is no command 'list': for that there is `ganger queue`"),
        ("kill 3", "there is no command 'kill': for that there is `ganger cancel JOB`"),
        ("queu", "there is no command 'queu': did you mean `ganger queue`?"),
        (
            "submit --gres=gpu:2 x",
            "there is no option --gres: write --gpus N, all GPUs of the job, and --gpu-type TYPES",
        ),
        ("submit -c 4 x", "there is no option -c (Slurm's --cpus-per-task): write --cpus-per-task N"),
        ("submit -N2 x", "there is no option -N (Slurm's --nodes): write --nodes N"),
        ("submit --mem 4G x", "there is no option --mem: write --memory SIZE, of each task and not of a node"),
        ("submit -J a x", "there is no option -J (Slurm's --job-name): write --name TEXT"),
        ("submit --ntask 3 x", "there is no option --ntask: did you mean --tasks or --name?"),
        ("queue -j 3", "there is no option -j (Slurm's --jobs): write `ganger show JOB`"),
        ("cancel -u ann", "there is no option -u (Slurm's --user): write --user USER"),
        (
            "sacctmgr show",
            "there is no command 'sacctmgr': for that there is `ganger usage`; "
            "teams, quotas and partitions are settings of the master",
        ),
        (
            "queue -n digits",
            "Invalid value for '--limit' / '-n': 'digits' is not a valid integer range; Slurm's -n is --name here",
        ),
        ("queue -l", "Option '-l' requires an argument; for Slurm's -l write `ganger show JOB`, or --json"),
        ("queue --state PD", "Invalid value for '--state' / '-s': PD is a state of Slurm: write pending"),
        ("queue -s completed", "Invalid value for '--state' / '-s': completed is a state of Slurm: write succeeded"),
        ("nodes drain -x", "there is no option -x: `ganger nodes drain --help` lists them"),
    ],
)
def test_an_unknown_name_is_refused_with_ours(
    call: Call, master: CannedMaster, capsys: Output, line: str, told: str
) -> None:
    assert call(*line.split()) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"ganger: {told}"
    assert not master.requests


def test_the_page_for_users_of_slurm_has_every_name_of_slurm_that_an_error_explains() -> None:
    page = PAGE.read_text()
    named = {
        word
        for code in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
        for word in re.findall(r"[\w-]+", code)
    }
    slurms = {name for name in FOREIGN if name.startswith("s") and name not in PLAIN}
    options = {option for known, _ in OPTIONS.values() for option in known}
    assert slurms <= named
    assert options <= named


def test_commands_and_options_of_ours_on_that_page_are_there() -> None:
    for line in re.findall(r"`ganger ([a-z]+[^`|]*)`", PAGE.read_text()):
        name, *words = line.split(" -- ")[0].split()
        own = {word for parameter in command_named(name).params for word in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= own


def test_the_job_file_of_that_page_is_what_its_script_asks_slurm_for(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "digits.yaml").write_text(text)
    (tmp_path / "train.py").touch()
    made = make_spec(load_job_file(tmp_path / "digits.yaml"), environ={})
    (role,) = made.roles
    assert (made.nodes, role.tasks, role.shape.gpus, role.shape.millicores) == (2, 8, 1, 6_000)
    assert (role.shape.memory_bytes * 4, made.time_limit.seconds) == (200 << 30, 36 * 3_600)


@pytest.mark.parametrize(
    ("lines", "words", "told"),
    [
        ("#SBATCH -N 2\n#SBATCH --time=10\necho a\n", "bash job.sh", "2 #SBATCH lines of job.sh are ignored"),
        ("#!/bin/bash\n#SBATCH -N 2\n", "bash -x job.sh --lr 3", "1 #SBATCH line of job.sh is ignored"),
        ("#!/bin/bash\n#SBATCH -N 2\n", "./job.sh", "1 #SBATCH line of ./job.sh is ignored"),
        ("#!/bin/bash\n##SBATCH -N 2\n# SBATCH\necho '#SBATCH x'\n", "bash job.sh", ""),
        ("#SBATCH -N 2\n", "true other.sh", ""),
    ],
)
def test_directives_of_a_script_are_counted_and_reported(
    call: Call, tmp_path: Path, capsys: Output, lines: str, words: str, told: str
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(lines)
    script.chmod(0o755)
    assert call("submit", "--directory", str(tmp_path), *words.split()) == 0
    more = ": give them as options, which `ganger submit --help` lists"
    assert capsys.readouterr().err == (told and f"note: {told}{more}\n")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("-n 4 x", 0, "--name (-n) 4 is a label; Slurm's -n is --tasks here"),
        ("-C a100 x", 2, "-C is --directory; Slurm's -C is --gpu-type here"),
        ("-e err.txt x", 2, "-e is --env; what a job writes to stderr is in its log, `ganger logs JOB`"),
        ("-- srun hostname", 0, "the job runs Slurm's srun: leave it out: Ganger starts the tasks itself"),
        ("-- /usr/bin/sbatch job.sh", 0, "the job runs Slurm's sbatch: write `ganger submit -- bash SCRIPT`"),
    ],
)
def test_what_means_something_else_in_slurm_is_noted(
    call: Call, capsys: Output, words: str, code: int, told: str
) -> None:
    assert call("submit", *words.split()) == code
    assert capsys.readouterr().err.splitlines()[0] == f"note: {told}"


def test_each_state_that_is_named_for_one_of_slurm_is_one() -> None:
    choices = next(one.type for one in command_named("queue").params if one.name == "states")
    assert isinstance(choices, click.Choice)
    assert set(STATES.values()) <= set(choices.choices)
    assert not {name.lower() for name in STATES} & set(choices.choices)
