"""A load that rises from 0.2 to 0.9 and falls again flips the mode of a live cluster exactly twice, and under the
default policy its jobs go where the mode says. (20 s)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ganger.client import Client
from ganger.v1.resources_pb2 import LOAD_MODE_PACK, LOAD_MODE_SPREAD, LoadMode
from ganger_master.core.settings import DEFAULT_POLICY
from kit.cluster import NO_PRELOAD, Cluster
from kit.shell import Shell
from kit.waiting import eventually

pytestmark = pytest.mark.system

SPREAD, PACK = LOAD_MODE_SPREAD, LOAD_MODE_PACK
# Of a gang: one process that sleeps, whatever it holds.
GPUS = 2
SOCKETS, SOCKET = 4, 5


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    by_default = {"GANGER_MASTER_POLICY": DEFAULT_POLICY, "GANGER_MASTER_MOVES_PER_HOUR": "0"}
    with Cluster(
        tmp_path, virtual_gpus=10, topology="2x5", daemon_options=NO_PRELOAD, environment=by_default
    ) as running:
        yield running


def test_a_ramp_of_load_flips_the_mode_exactly_twice_and_says_why(cluster: Cluster) -> None:
    shell = Shell(cluster.master_directory)
    running: list[str] = []
    with Client(str(cluster.master_directory)) as client:

        def load_comes_to(gangs: int) -> tuple[int, LoadMode.ValueType]:
            """Devices that are held then, and the mode."""
            while len(running) < gangs:
                words = ("--gpus", str(GPUS), "--gpus-per-task", str(GPUS), "--cpus-per-task", "0.5", "--memory", "9M")
                running.append(shell.submit(*words, "--", "sleep", "3600"))
            while len(running) > gangs:
                shell("cancel", running.pop())
            eventually(lambda: client.get_cluster().devices_held == GPUS * gangs, what=f"{gangs} gangs hold devices")
            return GPUS * gangs, client.get_cluster().load_mode

        def place() -> tuple[str, int]:
            """Node and socket of the newest gang."""
            (piece,) = client.get_job(running[-1]).gang.claims
            return piece.node, (piece.device_mask.bit_length() - 1) // SOCKET

        apart = set[tuple[str, int]]()
        for gangs in range(1, SOCKETS + 1):
            load_comes_to(gangs)
            apart.add(place())
        seen = [load_comes_to(gangs) for gangs in (2, 5, 6, 7, 9, 7, 5, 4)]
        beside = set[str]()
        for gangs in (5, 6):
            load_comes_to(gangs)
            beside.add(place()[0])
        seen += [load_comes_to(gangs) for gangs in (3, 2)]
        flips = [event for event in client.list_events("cluster") if event.kind == "mode_changed"]

    rising = [(4, SPREAD), (10, SPREAD), (12, SPREAD), (14, PACK), (18, PACK)]
    falling = [(14, PACK), (10, PACK), (8, PACK), (6, SPREAD), (4, SPREAD)]
    assert seen == rising + falling
    assert len(apart) == SOCKETS, "under light load each is alone on its socket"
    assert len(beside) == 1, "under heavy load the other node keeps its room"
    assert [(event.cause, dict(event.figures)) for event in flips] == [
        ("load", {"mode": "PACK", "held": "14", "of": "20"}),
        ("load", {"mode": "SPREAD", "held": "6", "of": "20"}),
    ]
    assert "gangs spread apart" in shell("top", "--once")
    assert "gangs are packed, to keep holes for large ones" in shell("events", "cluster")
