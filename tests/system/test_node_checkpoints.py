"""Nodes that do not see the master's storage keep checkpoints on their own disks: jobs go on elsewhere from what is
fetched there, bit for bit, also once the node that saved is gone and another one has a copy. (60 s)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run

pytestmark = [pytest.mark.system, pytest.mark.torch]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    options = ("--storage", str(elsewhere))
    with Cluster(tmp_path, nodes=3, virtual_gpus=2, topology="2", daemon_options=options, lost_after="8s") as running:
        yield running


def nodes_of(job: Run) -> set[str]:
    return {str(claim["node"]).removeprefix("nodes/") for claim in job.show()["gang"]["claims"]}


def disk(cluster: Cluster, node: str) -> Path:
    return cluster.directory / node / "checkpoints"


def kept_on(cluster: Cluster) -> set[str]:
    return {node for node in cluster.daemons if list(disk(cluster, node).glob("*/checkpoints/*[0-9]/MANIFEST.json"))}


def test_a_suspended_job_goes_on_from_a_checkpoint_on_another_node_s_disk(cluster: Cluster) -> None:
    alone = Run.submit(cluster, "alone", world=2)
    alone.hurry()
    alone.wait_state("SUCCEEDED", within_seconds=180)
    job = Run.submit(cluster, "pair", world=2)
    job.wait_step(3, within_seconds=180)
    (first,) = nodes_of(job)
    assert job.show()["capabilities"]["can_checkpoint"]
    job.shell("suspend", "--level", "checkpoint", "--wait", job.id)
    assert kept_on(cluster) == {first}
    assert job.show()["checkpoint"]["nodes"] == [f"nodes/{first}"]
    job.shell("nodes", "cordon", first, "--reason", "test")
    job.shell("resume", job.id)
    job.wait_step(job.last_step() + 3, within_seconds=180)
    (second,) = nodes_of(job)
    assert second != first
    # What was fetched is a further copy.
    eventually(
        lambda: set(job.show()["checkpoint"]["nodes"]) == {f"nodes/{first}", f"nodes/{second}"},
        within_seconds=60,
        what="both nodes count as having it",
        story=job.story,
    )
    job.hurry()
    job.wait_state("SUCCEEDED", within_seconds=180)
    job.check(alone)


def test_a_gang_over_two_nodes_saves_on_the_disk_of_its_leader(cluster: Cluster) -> None:
    job = Run.submit(cluster, "wide", "--nodes", "2", world=4)
    job.wait_step(3, within_seconds=180)
    job.shell("suspend", "--level", "checkpoint", "--wait", job.id)
    (home,) = kept_on(cluster)
    (manifest,) = disk(cluster, home).glob("*/checkpoints/*[0-9]/MANIFEST.json")
    assert sorted(path.name for path in manifest.parent.glob("*.shard")) == [f"rank-{n}.shard" for n in range(4)]
    # The other node keeps its shards until the next checkpoint, for a daemon that is restarted meanwhile.
    assert not list(disk(cluster, home).glob("*/checkpoints/*.tmp"))
    job.shell("nodes", "cordon", home, "--reason", "test")
    job.shell("resume", job.id)
    job.wait_step(job.last_step() + 1, within_seconds=180)
    # The new leader fetches all of it, the other node the shards of its ranks.
    (leader,) = kept_on(cluster) - {home}
    (other,) = nodes_of(job) - {leader}
    (part,) = disk(cluster, other).glob("*/checkpoints/*.tmp/MANIFEST.json")
    assert len(list(part.parent.glob("*.shard"))) == 2
    job.shell("nodes", "uncordon", home)
    job.hurry()
    job.wait_state("SUCCEEDED", within_seconds=180)
    alone = Run.submit(cluster, "wide-alone", "--nodes", "2", world=4)
    alone.hurry()
    alone.wait_state("SUCCEEDED", within_seconds=180)
    job.check(alone)


def test_a_copy_on_another_node_replaces_the_one_that_is_lost(cluster: Cluster) -> None:
    job = Run.submit(cluster, "copied", "--checkpoint-copies", "2", world=2)
    job.wait_step(3, within_seconds=180)
    job.shell("suspend", "--level", "checkpoint", "--wait", job.id)
    holders = kept_on(cluster)
    assert {str(name).removeprefix("nodes/") for name in job.show()["checkpoint"]["nodes"]} == holders
    assert len(holders) == 2
    home = str(job.show()["checkpoint"]["nodes"][0]).removeprefix("nodes/")
    cluster.destroy_node(home)
    eventually(
        lambda: {node["name"]: node for node in job.shell.json("nodes")["nodes"]}[f"nodes/{home}"]["state"] != "READY",
        within_seconds=60,
        what="its node counts as silent",
    )
    job.shell("resume", job.id)
    job.hurry()
    job.wait_state("SUCCEEDED", within_seconds=180)
    alone = Run.submit(cluster, "copied-alone", world=2)
    alone.hurry()
    alone.wait_state("SUCCEEDED", within_seconds=180)
    job.check(alone)


def test_a_job_whose_only_copy_is_away_says_so_and_begins_again_once_the_node_is_removed(cluster: Cluster) -> None:
    job = Run.submit(cluster, "single", world=2)
    job.wait_step(3, within_seconds=180)
    job.shell("suspend", "--level", "checkpoint", "--wait", job.id)
    (home,) = kept_on(cluster)
    cluster.destroy_node(home)
    eventually(
        lambda: {node["name"]: node for node in job.shell.json("nodes")["nodes"]}[f"nodes/{home}"]["state"] != "READY",
        within_seconds=60,
        what="its node counts as silent",
    )
    job.shell("resume", job.id)
    eventually(
        lambda: "CHECKPOINT_AWAY" in job.shell("why", job.id), within_seconds=60, what="why says it", story=job.story
    )
    assert home in job.shell("why", job.id)
    job.shell("nodes", "lost", home, "--yes")
    job.shell("nodes", "remove", home)
    job.hurry()
    job.wait_state("SUCCEEDED", within_seconds=180)
    assert [line.step for line in job.lines(0)].count(1) == 2
