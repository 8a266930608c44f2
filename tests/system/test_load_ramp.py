"""A load that rises from 0.2 to 0.9 and falls again flips the mode of a live cluster exactly twice. (15 s)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ganger.client import Client
from ganger.v1.resources_pb2 import LOAD_MODE_PACK, LOAD_MODE_SPREAD, LoadMode
from kit.cluster import NO_PRELOAD, Cluster
from kit.shell import Shell
from kit.waiting import eventually

pytestmark = pytest.mark.system

SPREAD, PACK = LOAD_MODE_SPREAD, LOAD_MODE_PACK
# Of a gang: one process that sleeps, whatever it holds.
GPUS = 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, virtual_gpus=10, topology="2x5", daemon_options=NO_PRELOAD) as running:
        yield running


def test_a_ramp_of_load_flips_the_mode_exactly_twice_and_says_why(cluster: Cluster) -> None:
    shell = Shell(cluster.master_directory)
    running: list[str] = []
    seen: list[tuple[int, LoadMode.ValueType]] = []
    with Client(str(cluster.master_directory)) as client:

        def load_comes_to(gangs: int) -> None:
            while len(running) < gangs:
                words = ("--gpus", str(GPUS), "--gpus-per-task", str(GPUS), "--cpus-per-task", "0.5", "--memory", "9M")
                running.append(shell.submit(*words, "--", "sleep", "3600"))
            while len(running) > gangs:
                shell("cancel", running.pop())
            eventually(lambda: client.get_cluster().devices_held == GPUS * gangs, what=f"{gangs} gangs hold devices")
            seen.append((GPUS * gangs, client.get_cluster().load_mode))

        for gangs in (2, 5, 6, 7, 9, 7, 5, 4, 3, 2):
            load_comes_to(gangs)
        flips = [event for event in client.list_events("cluster") if event.kind == "mode_changed"]

    rising = [(4, SPREAD), (10, SPREAD), (12, SPREAD), (14, PACK), (18, PACK)]
    falling = [(14, PACK), (10, PACK), (8, PACK), (6, SPREAD), (4, SPREAD)]
    assert seen == rising + falling
    assert [(event.cause, dict(event.figures)) for event in flips] == [
        ("load", {"mode": "PACK", "held": "14", "of": "20"}),
        ("load", {"mode": "SPREAD", "held": "6", "of": "20"}),
    ]
    assert "gangs spread apart" in shell("top", "--once")
    assert "gangs are packed, to keep holes for large ones" in shell("events", "cluster")
