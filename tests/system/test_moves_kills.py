"""Daemons, master and planner are killed while jobs move for a gang: every job comes out bit for bit. (chaos)"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run
from system.test_moves import OPTIONS, node_of
from system.test_planner import planners

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.chaos]

_ROUNDS = 12
# Within a move: it is prepared, handed over, committed, and its source reaped.
_LONGEST_DELAY_S = 1.5


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=2, virtual_gpus=2, topology="2", master_options=OPTIONS) as running:
        yield running


def kill(cluster: Cluster, victim: str) -> None:
    """Kill a program and start it again; the master restarts its planner."""
    if victim == "planner":
        for pid in planners(cluster):
            os.kill(pid, signal.SIGKILL)
    elif victim == "master":
        cluster.master.kill()
        cluster.start_master()
    else:
        cluster.daemons[victim].kill()
        cluster.daemons[victim].start()


def has_begun(job: Run, gang: Run) -> bool:
    answer = job.shell.try_("history", "--json")
    return answer.code == 0 and '"move_begun"' in answer.out and f'"{gang.name}"' in answer.out


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_step_is_done_once_while_jobs_migrate_and_programs_are_killed(cluster: Cluster, seed: int) -> None:
    dice = random.Random(seed)
    references = {world: Run.submit(cluster, f"reference-{world}", "--memory", "1G", world=world) for world in (1, 2)}
    for job in references.values():
        job.hurry()
        job.wait_state("SUCCEEDED")
    for number in range(_ROUNDS):
        small = [Run.submit(cluster, f"small-{number}-{one}", "--memory", "1G") for one in range(4)]
        for job in small:
            job.wait_step(2)
        by_node: dict[str, list[Run]] = {}
        for job in small:
            by_node.setdefault(node_of(job), []).append(job)
        ended = [jobs[0] for jobs in by_node.values()]
        for job in ended:
            job.hurry()
            job.wait_state("SUCCEEDED")
        pair = Run.submit(cluster, f"pair-{number}", "--locality", "node", "--memory", "1G", world=2)
        eventually(lambda pair=pair: has_begun(pair, pair), what="a job migrates", within_seconds=60, story=pair.story)  # type: ignore[misc]
        # When it hits is what is drawn.
        time.sleep(dice.uniform(0.0, _LONGEST_DELAY_S))
        kill(cluster, dice.choice(["n0", "n1", "master", "planner"]))
        cluster.wait_ready()
        pair.wait_step(1, within_seconds=180)
        for job in (*small, pair):
            job.hurry()
        for job in (*small, pair):
            job.wait_state("SUCCEEDED", within_seconds=180)
            job.check(references[job.world])
