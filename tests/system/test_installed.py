"""The wheel holds what an installation needs: with what it declares, and nothing else, its commands run."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from kit.up import NO_PRELOAD, Up
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
SERVER = "`pip install 'ganger[server]'`"


class Installation:
    """An environment with the wheel and the packages that it requires, linked from this one; no pip, no index."""

    def __init__(self, directory: Path, wheel: Path, *extras: str) -> None:
        venv.create(directory, symlinks=True)
        self.python = directory / "bin" / "python"
        (site,) = (directory / "lib").glob("python*/site-packages")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
        (made,) = metadata.distributions(name="ganger", path=[str(site)])
        for name in _required(made, frozenset(extras)):
            for top in {Path(str(file)).parts[0] for file in metadata.distribution(name).files or ()} - {".."}:
                link, target = site / top, Path(str(metadata.distribution(name).locate_file(top)))
                # Packages of a namespace, such as google, are in several distributions.
                if target.exists() and not link.exists():
                    link.symlink_to(target)

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = (str(self.python), "-m", "ganger.cli.main", *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=self.python.parent)


def _required(distribution: metadata.Distribution, extras: frozenset[str]) -> set[str]:
    """Return the names of all packages that a distribution requires, directly or not."""
    found: set[str] = set()
    waiting = [(distribution, extras)]
    while waiting:
        present, wanted = waiting.pop()
        for text in present.requires or ():
            needed = Requirement(text)
            marker, name = needed.marker, canonicalize_name(needed.name)
            is_wanted = marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted or {""})
            if is_wanted and name not in found and name != "ganger":
                found.add(name)
                waiting.append((metadata.distribution(name), frozenset(needed.extras)))
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)), cwd=ROOT, check=True, timeout=120,
        capture_output=True,
    )  # fmt: skip
    (made,) = out.glob("ganger-*.whl")
    return made


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up") / "c", "--virtual-gpus", "2", settings=NO_PRELOAD) as up:
        yield up


def test_a_login_node_has_the_command_line_and_no_server(wheel: Path, tmp_path: Path, up: Up) -> None:
    client = Installation(tmp_path / "client", wheel)
    assert "sqlalchemy" not in {path.name for path in (tmp_path / "client").glob("lib/python*/site-packages/*")}
    address = ("--master", str(up.directory))
    submitted = client(*address, "submit", "--gpus", "1", "--", "true")
    assert submitted.returncode == 0, submitted
    job = submitted.stdout.split()[-1]
    for words in (("wait", job), ("show", job), ("why", job), ("history", job), ("queue", "--all"), ("nodes",)):
        done = client(*address, *words)
        assert (done.returncode, done.stderr) == (0, ""), (words, done)
    assert client("scheduler", "--help").returncode == 0
    state = f"--state-dir {tmp_path / 'state'}"
    for command in (f"master {state}", f"daemon {state} --master {tmp_path}", f"up {state}", f"planner run {state}"):
        done = client(*command.split())
        assert (done.returncode, SERVER in done.stderr, "Traceback" in done.stderr) == (2, True, False), (command, done)


def test_a_server_has_what_it_needs_to_run_a_job(wheel: Path, tmp_path: Path) -> None:
    server = Installation(tmp_path / "server", wheel, "server")
    state = str(tmp_path / "c")
    started = server("up", "--detach", "--state-dir", state, "--virtual-gpus", "2")
    try:
        assert started.returncode == 0, started
        done = server("--master", state, "submit", "--gpus", "1", "--follow", "--", "echo", "here")
        assert (done.returncode, "here" in done.stdout) == (0, True), done
    finally:
        assert server("down", "--state-dir", state, "--cancel-jobs").returncode == 0
