"""Every command of the tutorial works as printed, in order, on the cluster that it starts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.waiting import eventually

pytestmark = [pytest.mark.system, pytest.mark.torch]

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorials" / "first-cluster.md").read_text()


def commands() -> list[tuple[str, str]]:
    """Return each command of the tutorial and the remark behind it."""
    blocks = re.findall(r"```console\n(.*?)```", TUTORIAL, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [(text.strip(), remark.strip()) for text, _, remark in (line[2:].partition(" # ") for line in lines)]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A home of its own, in which `ganger` and `python` are those that run the tests."""
    names = ("GANGER_MASTER", "GANGER_TOKEN", "XDG_RUNTIME_DIR")
    found = {name: text for name, text in os.environ.items() if name not in names}
    found |= {"XDG_STATE_HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    yield found
    subprocess.run(["ganger", "down"], env=found, capture_output=True, check=False, timeout=100)


def test_every_command_of_the_tutorial_works_in_order(environment: dict[str, str]) -> None:
    def run(text: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(text)
        return subprocess.run(
            words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
        )

    first, *tour = commands()
    assert first[0] == ". .venv/bin/activate"
    assert sum(text.startswith("ganger submit") for text, _ in tour) == 5
    assert any("--nodes 2" in text for text, _ in tour if text.startswith("ganger submit"))
    for text, remark in tour:
        if "logs" in text:
            # A log that is followed ends after its job.
            text = text.replace(" -f ", " ")
            eventually(lambda text=text: run(text).stdout, within_seconds=60, what="the job has printed something")
            continue
        done = run(text)
        expected = 4 if remark == "refused" else 0
        assert done.returncode == expected, f"{text}\n{done.stdout}\n{done.stderr}\n{run('ganger history').stdout}"
        assert "Traceback" not in done.stderr
        if text.startswith("ganger why"):
            assert "because GPUS" in done.stdout


@pytest.mark.parametrize(
    "page", ["README.md", "examples/README.md", "docs/reference/cli.md", "docs/how-to/job-schedulers.md"]
)
def test_what_a_page_points_at_is_there(page: str) -> None:
    path = ROOT / page
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / target).exists(), target
    for script in re.findall(r"\bexamples/[\w/]+\.py", text):
        assert (ROOT / script).exists(), script


def test_every_command_of_the_documentation_is_one() -> None:
    from ganger.cli.main import COMMANDS, _added

    known = {*COMMANDS, *_added()}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"]
    for page in pages:
        for name in re.findall(r"(?:^\$ |^|`)ganger ([a-z]+)(?=[ `\n])", page.read_text(), re.MULTILINE):
            assert name in known, f"{page.name}: ganger {name}"


def test_the_table_of_commands_has_each_command_once() -> None:
    from ganger.cli.main import COMMANDS, _added

    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    table = page.partition("\n## Commands\n")[2].partition("\n## ")[0]
    named = [
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    ]
    assert sorted(named) == sorted({*COMMANDS, *_added()})


def test_every_key_of_a_job_is_documented() -> None:
    from ganger.spec import KEYS

    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert [key for key in sorted(KEYS) if f"`{key}" not in text] == []
