"""Daemons on one machine, of one cluster or of several, share no name that they make there."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ganger.wire.endpoints import ensure_token, write_endpoint
from ganger_daemon import app
from ganger_daemon.app import Daemon, DaemonSettings
from ganger_daemon.cgroups.contract import Cgroups
from ganger_daemon.claimed_directories import DaemonError
from ganger_daemon.devices.virtual import VirtualSpec


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The cgroups that the daemons of a test requested, in order."""
    asked: list[str] = []

    def choose(root: str, **_: Any) -> Cgroups:
        asked.append(root)
        return Cgroups()

    monkeypatch.setattr(app, "choose_cgroups", choose)
    # as root it would be the machine's own /run
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    return asked


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Sockets have short names.
    with tempfile.TemporaryDirectory(prefix="gd", dir="/tmp") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield Path(short)


def daemon_of(cluster: Path, **settings: Any) -> Daemon:
    _, token_file = ensure_token(cluster / "master")
    write_endpoint(cluster / "master", "127.0.0.1:1", token_file)
    values: dict[str, Any] = {"state_directory": cluster / "n1", "master": str(cluster / "master"), "node": "n1"}
    return Daemon(DaemonSettings(**{**values, "virtual": VirtualSpec(1), "preload": False, **settings}))


def run_directory_of(daemon: Daemon) -> Path:
    async def story() -> None:
        await daemon.start()
        await daemon.stop()

    asyncio.run(story())
    return daemon.paths.run


def test_two_daemons_of_one_node_name_have_cgroups_and_run_directories_of_their_own(
    roots: list[str], runtime: Path, tmp_path: Path
) -> None:
    first, second = (run_directory_of(daemon_of(tmp_path / cluster)) for cluster in "ab")
    assert first.parent == second.parent == runtime / "ganger"
    assert first != second
    assert len(set(roots)) == 2


def test_a_daemon_that_starts_again_with_gangs_keeps_its_cgroup_and_its_run_directory(
    roots: list[str], runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of a gang that goes on, with its control pages where the daemon ran before
    (tmp_path / "n1" / "jobs" / str(uuid.uuid4()) / "1").mkdir(parents=True)
    before = run_directory_of(daemon_of(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert run_directory_of(daemon_of(tmp_path)) == before
    assert roots[0] == roots[1]


def test_two_daemons_do_not_use_one_run_directory(roots: list[str], runtime: Path, tmp_path: Path) -> None:
    async def story() -> None:
        first, second = (daemon_of(tmp_path / cluster, run_directory=runtime) for cluster in "ab")
        await first.start()
        try:
            with pytest.raises(DaemonError, match=f"uses {runtime}: stop it or choose another --run-dir"):
                await second.start()
        finally:
            await second.stop()
            await first.stop()

    asyncio.run(story())
