"""The command line answers at once: what it must not import, and how a mistyped command is met."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import click
import pytest
from ganger.cli.main import COMMANDS, ganger, main, run
from ganger.console import ExitCode

HEAVY = ("grpc", "google.protobuf", "rich", "yaml", "numpy", "sqlalchemy", "asyncio", "ganger.client")


def imported(code: str) -> list[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return list(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["submit", "--help"], ["suspend", "--help"], ["up", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    modules = imported(f"from ganger.cli.main import run\nrun({arguments!r})")
    assert "click" in modules
    assert [name for name in HEAVY if name in modules] == []


def test_importing_ganger_imports_nothing() -> None:
    assert [name for name in (*HEAVY, "click", "torch") if name in imported("import ganger")] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_the_table_says(name: str) -> None:
    command = ganger.get_command(click.Context(ganger), name)
    assert command is not None
    assert command.help
    assert COMMANDS[name][2][:9] in command.get_short_help_str(200)


def test_help_names_commands_of_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Run the master." in text
    assert "Exit codes" in text
    assert re.findall(r"^  [a-z]+$", text, re.MULTILINE) == [], "every command says what it does"


def test_a_mistyped_command_is_met_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quue"]) == 2
    assert "did you mean `ganger queue`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["planner", "run"],
        ["scheduler", "host"],
        ["scheduler", "run", "ganger.scheduling:JobScheduler", "--job", "jobs/1"],
    ],
)
def test_a_program_beside_a_master_that_was_never_there_ends_at_once_and_says_what_to_do(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([*command, "--state-dir", "/nonexistent"], ["--master", "/nonexistent", *command]):
        assert run(arguments) == ExitCode.UNREACHABLE
        problem = "no master has written /nonexistent/endpoint.json: is it running, and is this its --state-dir?"
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "_GANGER_COMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["quue"]])
def test_closed_outputs_are_no_error_of_ours(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == (0 if arguments == ["--help"] else 2)
    for stream in (sys.stdout, sys.stderr):
        stream.close()


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--list"]])
def test_a_reader_that_has_had_enough_is_no_failure(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ganger.cli.main", *arguments]
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, timeout=60)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")
