"""Names of jobs that daemons left: a daemon that starts removes those of dead daemons, and no others."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ganger.injob.launcher.namespaces import make_links
from ganger_daemon.gang.gang_unit import sweep_names
from ganger_daemon.node.daemon_files import LOCK


@pytest.fixture
def links(tmp_path: Path) -> Path:
    (tmp_path / "links").mkdir()
    return tmp_path / "links"


def named(links: Path, run: Path, name: str, *, is_there: bool = True) -> Path:
    """Make the names of a gang of the daemon with this run directory."""
    target = run / name / "1"
    if is_there:
        target.mkdir(parents=True)
    make_links(str(links / name), {"run": str(target), "job": str(run / "job")})
    return links / name


def test_names_of_a_daemons_own_gangs_go_with_the_gang(tmp_path: Path, links: Path) -> None:
    over = named(links, tmp_path / "own", "over", is_there=False)
    there = named(links, tmp_path / "own", "there")
    sweep_names(tmp_path / "own", links)
    assert (over.exists(), there.exists()) == (False, True)


def test_names_of_a_dead_daemon_go(tmp_path: Path, links: Path) -> None:
    removed = named(links, tmp_path / "removed", "removed", is_there=False)
    left = named(links, tmp_path / "left", "left")
    (tmp_path / "left" / LOCK).touch()
    sweep_names(tmp_path / "own", links)
    assert not removed.exists()
    assert not left.exists()


def test_names_of_a_daemon_that_lives_stay(tmp_path: Path, links: Path) -> None:
    there = named(links, tmp_path / "other", "there")
    over = named(links, tmp_path / "other", "over", is_there=False)
    with (tmp_path / "other" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep_names(tmp_path / "own", links)
    assert there.exists()
    assert over.exists()


@pytest.mark.parametrize("knows", ["variable", "mapping"])
def test_names_that_a_process_knows_outlive_its_daemon(tmp_path: Path, links: Path, knows: str) -> None:
    names = named(links, tmp_path / "other", "job")
    page = tmp_path / "other" / "job" / "1" / "rank-0.page"
    page.write_bytes(bytes(4096))
    maps = (
        f"import mmap; file = open({str(page)!r}, 'r+b'); kept = mmap.mmap(file.fileno(), 0)\n"
        if knows == "mapping"
        else ""
    )
    environment = dict(os.environ) if maps else {**os.environ, "GANGER_PAGE": f"{names}/run/rank-0.page"}
    command = [sys.executable, "-c", f"{maps}print(flush=True); input()"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sweep_names(tmp_path / "own", links)
        assert names.exists()
        process.kill()
    sweep_names(tmp_path / "own", links)
    assert not names.exists()
