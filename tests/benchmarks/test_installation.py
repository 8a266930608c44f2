"""`make install-check` runs the commands of the how-to page, and upgrades from a release that its history has."""

from __future__ import annotations

import shlex
import subprocess
import sys

import click
import pytest
from ganger.cli import main as cli

from benchmarks.installation.__main__ import _exchanged, page_commands
from benchmarks.installation.machines import CheckError
from benchmarks.installation.packages import ROOT, newest_release


@pytest.mark.parametrize(
    ("block", "count"), [("three commands", 3), ("upgrade", 3), ("remove", 3), ("remove by hand", 5)]
)
def test_each_command_of_the_page_is_one_that_the_command_line_takes(block: str, count: int) -> None:
    commands = page_commands(block)
    assert len(commands) == count
    for command in (*commands, *(_exchanged(each, "/srv/ganger.whl") for each in commands)):
        words = shlex.split(command)
        programs = [number for number, word in enumerate(words) if word == "ganger" or word.endswith("/bin/ganger")]
        program = programs[0] if programs else None
        if program is not None:
            takes(words[program + 1 :])


def takes(words: list[str]) -> None:
    """Raise click.UsageError for words that are no command of Ganger, or that it does not take."""
    command: click.Command = cli.ganger
    context = click.Context(command, info_name="ganger")
    while isinstance(command, click.Group):
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, parent=context, info_name=found.name)
    command.make_parser(context).parse_args(list(words))


def test_a_command_that_the_page_does_not_have_is_reported() -> None:
    with pytest.raises(CheckError, match="has no commands marked 'nothing'"):
        page_commands("nothing")


def test_the_previous_release_is_the_newest_that_the_changelog_dates() -> None:
    text = "# Changelog\n\n## 0.3.0 – unreleased\n\n## 0.2.0 – 2026-11-27\n\n## 0.1.0 – 2026-11-21\n"
    assert newest_release(text) == "0.2.0"
    assert newest_release((ROOT / "CHANGELOG.md").read_text())
    with pytest.raises(CheckError, match="names no released version"):
        newest_release("## 0.1.0 – unreleased\n")


def test_the_check_names_what_is_missing_on_a_machine() -> None:
    words = (sys.executable, "-m", "benchmarks.installation")
    done = subprocess.run(
        words, cwd=ROOT, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "it makes machines: run it as root" in done.stderr or "apt-get install debootstrap" in done.stderr
