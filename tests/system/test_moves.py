"""A gang that fits on no node has one emptied for it by a move, and every job comes out bit for bit. (15 s)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run

pytestmark = [pytest.mark.system, pytest.mark.torch]

OPTIONS = ("--policy", "fifo-backfill+first-fit+defrag")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=2, virtual_gpus=2, topology="2", master_options=OPTIONS) as running:
        yield running


def node_of(job: Run) -> str:
    return str(job.show()["gang"]["claims"][0]["node"])


def one_of_each_node_ends(jobs: list[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """End one of two jobs on each node; return the ended jobs and those that stay. Together the nodes have room for a
    pair."""
    for job in jobs:
        job.wait_step(3, within_seconds=180)
    by_node: dict[str, list[Run]] = {}
    for job in jobs:
        by_node.setdefault(node_of(job), []).append(job)
    assert sorted(map(len, by_node.values())) == [2, 2]
    ended, stays = zip(*by_node.values(), strict=True)
    for job in ended:
        job.hurry()
        job.wait_state("SUCCEEDED", within_seconds=180)
    return ended, stays


def test_a_gang_of_two_gets_a_node_by_one_migration_and_no_job_loses_a_step(cluster: Cluster) -> None:
    small = [Run.submit(cluster, f"small-{number}", "--memory", "1G") for number in range(4)]
    ended, stays = one_of_each_node_ends(small)

    pair = Run.submit(cluster, "pair", "--locality", "node", "--memory", "1G", world=2)
    pair.wait_step(1, within_seconds=180)
    assert len({node_of(job) for job in stays}) == 1
    (told,) = [event for event in pair.shell.json("history") if event["kind"] == "move_done"]
    assert told["subject"] in {job.name for job in stays}
    assert (told["figures"]["for"], told["figures"]["goal"]) == (pair.name, "HOLE")
    assert float(told["figures"]["pause_ms"]) > 0
    for job in (*stays, pair):
        job.hurry()
    for job in stays:
        job.wait_state("SUCCEEDED", within_seconds=180)
        job.check(ended[0])
    eventually(lambda: pair.state == "SUCCEEDED", what="the pair ends", within_seconds=180, story=pair.story)
