"""A job that was moved aside for a gang and is slower there goes back once the gang has ended, though the planner that
found it out was killed meanwhile. (chaos: 1 min)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import Cluster, Service
from kit.waiting import eventually
from system.harness import Run
from system.hasty import events, hasty_planner, story
from system.test_moves import OPTIONS, node_of, one_of_each_node_ends

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.chaos]

STEPS = 2048


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=2, virtual_gpus=2, topology="2", master_options=(*OPTIONS, "--no-planner")) as running:
        yield running


@pytest.fixture
def planner(cluster: Cluster) -> Iterator[Service]:
    with hasty_planner(cluster) as running:
        yield running


def test_a_job_that_is_slower_where_it_was_moved_for_a_gang_goes_back_when_the_gang_has_ended(
    cluster: Cluster, planner: Service
) -> None:
    small = [Run.submit(cluster, f"small-{n}", "--memory", "1G", steps=STEPS, job=("--homesick",)) for n in range(4)]
    ended, stays = one_of_each_node_ends(small)
    homes = {job.name: node_of(job) for job in stays}
    # Before it moves, it is known how fast it was.
    for job in stays:
        job.wait_step(job.last_step() + 40)

    pair = Run.submit(cluster, "pair", "--locality", "node", "--memory", "1G", world=2)
    pair.wait_step(1, within_seconds=180)
    (undone,) = eventually(
        lambda: events(pair, "change_undone"),
        what="it is found to be slower",
        within_seconds=120,
        story=lambda: story(cluster, pair),
        every_seconds=0.2,
    )
    (moved,) = [job for job in stays if job.name == undone["subject"]]
    home = homes[moved.name]
    assert node_of(moved) != home
    assert undone["figures"]["detail"] == f"it stays until its place on {home.removeprefix('nodes/')} is free again"

    planner.kill()
    pair.hurry()
    pair.wait_state("SUCCEEDED", within_seconds=180)
    planner.start()
    eventually(lambda: node_of(moved) == home, what="it goes back", within_seconds=120, story=moved.story)
    assert [event["figures"]["goal"] for event in events(moved, "move_begun")] == ["HOLE", "UNDO"]
    for job in stays:
        job.hurry()
    for job in stays:
        job.wait_state("SUCCEEDED", within_seconds=180)
        job.check(ended[0])
