"""Checkpoints that a job writes while the network separates its node from the master: the node dies, none is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.machines import cut_off
from kit.waiting import eventually
from system.harness import checkpoints_of
from system.test_several_machines import CertifiedCluster, two_servers_apart

pytestmark = [pytest.mark.system, pytest.mark.torch]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[CertifiedCluster]:
    # Daemons call at least every 20 s then, and ranks step for 60 s or more after their node is cut off.
    with two_servers_apart(tmp_path, lost_after="80s") as running:
        yield running


# `make test` has the same story with a dead master: test_outage_checkpoints.
@pytest.mark.chaos
@pytest.mark.parametrize("are_known_gone", [False, True])
def test_a_job_goes_on_from_the_newest_checkpoint_that_its_node_wrote_while_cut_off_from_the_master(
    cluster: CertifiedCluster, are_known_gone: bool
) -> None:
    """`are_known_gone`: those of which the master knew are not on storage any more."""
    job = cluster.submit("ann", "saved", "--checkpoint-every", "1s", steps=400)

    def shown() -> dict[str, object]:
        return dict(cluster.asked("olga", "show", job.id))

    uid = str(shown()["uid"])
    eventually(
        lambda: len(checkpoints_of(cluster, uid)) >= 2 and "checkpoint" in shown(),
        what="the master knows of a checkpoint",
        within_seconds=60,
        story=cluster.story,
    )
    (node,) = cluster.nodes_of(job)
    cut_off(cluster.machines[node])
    present = set(checkpoints_of(cluster, uid))
    known = str(shown()["checkpoint"]["path"]).removeprefix("checkpoints/")  # type: ignore[index]
    known_step = int(known.partition("-")[0])

    def written() -> bool:
        present.update(checkpoints_of(cluster, uid))
        return sum(step > known_step for _, step in present) >= 3

    eventually(written, what="three more checkpoints are written", within_seconds=60, story=cluster.story)
    directory = cluster.storage / uid / "checkpoints"
    assert (directory / known).is_dir(), "what the master knows of is kept"
    cluster.destroy_node(node)
    newest = checkpoints_of(cluster, uid)[-1][1]
    assert newest > known_step
    assert str(shown()["checkpoint"]["path"]) == f"checkpoints/{known}", "no report of a newer one has arrived"  # type: ignore[index]
    if are_known_gone:
        for epoch, step in checkpoints_of(cluster, uid):
            if step <= known_step:
                shutil.rmtree(directory / f"{step}-{epoch}")
    done = len(job.lines(0))
    # Refused while the node may still be there.
    eventually(
        lambda: cluster.try_("olga", "lost", node, "--yes").returncode == 0,
        what=f"{node} is lost",
        within_seconds=60,
        every_seconds=0.5,
        story=cluster.story,
    )
    eventually(lambda: len(job.lines(0)) > done, what="it goes on elsewhere", within_seconds=60, story=cluster.story)
    assert job.lines(0)[done].step == newest + 1
    assert cluster.nodes_of(job) == [name for name in cluster.daemons if name != node]
    cluster.wait_done(job)
    assert shown().get("failures", 0) == 0
    assert "NO_CHECKPOINT" not in cluster.by("olga", "history", job.id)
    job.check(job, may_repeat=True)
