"""Virtual devices with a CPU limit: where it cannot be enforced, no daemon starts."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from ganger_daemon.app import Daemon, DaemonSettings
from ganger_daemon.claimed_directories import DaemonError, DaemonObstacle
from ganger_daemon.devices.virtual import VirtualSpec


def test_a_daemon_that_cannot_bound_its_devices_says_so_and_does_not_start(tmp_path: Path) -> None:
    # a path of pytest's is too long for a socket
    run = Path(f"/dev/shm/ganger-test-{os.getpid()}")
    spec = VirtualSpec(1, "", 1, 2**34, gpu_cores=0.2)
    daemon = Daemon(DaemonSettings(tmp_path / "state", str(tmp_path), "n1", run, spec, cgroups="none"))
    try:
        with pytest.raises(DaemonError, match=r"bound to 0\.2 cores each here: no CPU quota") as caught:
            asyncio.run(daemon.start())
    finally:
        asyncio.run(daemon.stop())
        shutil.rmtree(run)
    assert caught.value.obstacle is DaemonObstacle.SETTING
