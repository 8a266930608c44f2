"""A daemon does not start with a certificate that is not its node's, nor where one is needed and there is none."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ganger.wire.endpoints import ensure_token, write_endpoint
from ganger_daemon.app import Daemon, DaemonSettings
from ganger_daemon.claimed_directories import DaemonError, DaemonObstacle
from ganger_daemon.devices.virtual import VirtualSpec
from kit.certified import Authority


def refusal(tmp_path: Path, **settings: Any) -> str:
    # Sockets have short names.
    with tempfile.TemporaryDirectory(prefix="gd", dir="/tmp") as short:
        return refused_in(tmp_path, Path(short), **settings)


def refused_in(tmp_path: Path, short: Path, obstacle: DaemonObstacle = DaemonObstacle.SETTING, **settings: Any) -> str:
    values: dict[str, Any] = {
        "state_directory": tmp_path / "d",
        "run_directory": short,
        "master": "127.0.0.1:1",
        "node": "n1",
        "virtual": VirtualSpec(1),
        "cgroups": "none",
        "preload": False,
    }

    async def start() -> str:
        daemon = Daemon(DaemonSettings(**{**values, **settings}))
        with pytest.raises(DaemonError) as refused:
            await daemon.start()
        await daemon.stop()
        assert refused.value.obstacle is obstacle
        return str(refused.value)

    return asyncio.run(start())


def test_a_daemon_needs_the_certificate_of_its_own_node(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    said = refusal(tmp_path, obstacle=DaemonObstacle.RIGHTS, tls=authority.issue("daemon", "n2"))
    assert "is of nodes/n2, this daemon is nodes/n1: give it --node n2, or the certificate of n1" in said
    said = refusal(tmp_path, obstacle=DaemonObstacle.RIGHTS, tls=authority.issue("master", "n1"))
    assert "one of role daemon is needed" in said


def test_other_machines_reach_no_daemon_without_a_certificate(tmp_path: Path) -> None:
    assert "refuse to listen on 198.18.0.1 without certificates" in refusal(tmp_path, listen_host="198.18.0.1")


def test_a_daemon_with_a_certificate_is_told_the_masters_address(tmp_path: Path) -> None:
    _, token_file = ensure_token(tmp_path / "master")
    write_endpoint(tmp_path / "master", "127.0.0.1:1", token_file)
    own = Authority(tmp_path).issue("daemon", "n1")
    said = refusal(tmp_path, tls=own, master=str(tmp_path / "master"), accounts="own")
    assert "needs the address others reach the master at" in said
