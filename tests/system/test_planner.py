"""Jobs with more attained service are preempted for new ones, and nothing is lost under kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run

pytestmark = [pytest.mark.system, pytest.mark.torch]

OPTIONS = ("--policy", "las", "--plan-every", "3s")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=2, virtual_gpus=1, topology="1", master_options=OPTIONS) as running:
        yield running


def planners(cluster: Cluster) -> list[int]:
    """Pids of the master's planners: there is never more than one."""
    assert cluster.master.process is not None
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            words = (path.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == cluster.master.process.pid and b"ganger_master.planner_process.cli" in words:
            found.append(int(path.parent.name))
    assert len(found) <= 1, found
    return found


def trains_instead(job: Run, other: Run) -> bool:
    return job.last_step() > 0 and job.state == "HOLDING" and other.state == "PENDING"


def test_a_newcomer_gets_its_turn_and_both_end_right_though_planner_and_master_are_killed(cluster: Cluster) -> None:
    reference = Run.submit(cluster, "reference", world=2)
    reference.hurry()
    reference.wait_state("SUCCEEDED")
    old = Run.submit(cluster, "old", world=2)
    old.wait_step(10)

    first = Run.submit(cluster, "first", world=2)
    told = [""]

    def is_stopped_for_it() -> bool:
        told[0] = old.shell("why", old.id)
        return trains_instead(first, old) and "place 1 in the queue" in told[0]

    eventually(is_stopped_for_it, what="the first newcomer trains", within_seconds=60, story=old.story)
    assert old.show()["checkpoint"]["step"] > 0
    assert "because GPUS: not enough free devices" in told[0]
    assert "RANKED: first in the queue, it starts once the planner of policy las finds it a place" in told[0]

    (planner,) = planners(cluster)
    os.kill(planner, signal.SIGKILL)
    first.hurry()
    first.wait_state("SUCCEEDED")
    step = old.last_step()
    old.wait_step(step + 1)
    assert planners(cluster) != [planner]

    second = Run.submit(cluster, "second", world=2)
    cluster.master.kill()
    cluster.start_master()
    eventually(lambda: trains_instead(second, old), what="the second one trains", within_seconds=60, story=old.story)
    for job in (second, old):
        job.hurry()
    for job in (second, old):
        job.wait_state("SUCCEEDED")
    for job in (old, first, second):
        job.check(reference)
