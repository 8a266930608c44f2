"""Planner and master are killed while a bigger size is on trial: it is judged all the same. (50 s)"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.test_planner import planners
from system.test_resize_kills import Training

pytestmark = [pytest.mark.system, pytest.mark.torch]

OPTIONS = ("--policy", "fifo-backfill+elastic", "--plan-every", "1s")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=1, virtual_gpus=2, topology="2", virtual_cores=2, master_options=OPTIONS) as running:
        yield running


def verdicts(job: Training) -> list[str]:
    kinds = [event["kind"] for event in job.shell.json("history")]
    return [kind for kind in kinds if kind in ("change_kept", "change_undone")]


# Among others, tests/planner_process/test_note and test_planner have what it remembers across its death.
@pytest.mark.chaos
def test_a_size_on_trial_when_planner_and_master_are_killed_is_judged_and_the_job_ends_right(cluster: Cluster) -> None:
    job = Training.submit(cluster, "elastic", "1:2", "--step-seconds", "0.3")
    eventually(lambda: job.devices() == 2, what="it grew", within_seconds=120, story=job.story, every_seconds=0.2)
    (planner,) = planners(cluster)
    os.kill(planner, signal.SIGKILL)
    eventually(lambda: {*planners(cluster)} - {planner}, what="another planner is there", story=job.story)
    cluster.master.kill()
    cluster.start_master()
    cluster.wait_ready()
    assert verdicts(job) == [], "it was not judged yet"
    eventually(lambda: verdicts(job), what="it is judged", within_seconds=120, story=job.story, every_seconds=0.5)
    job.ends()
