"""Storage that is full while a job trains: checkpoints are skipped, this shows, and they are written again later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.disks import fill, small_disk
from kit.waiting import eventually
from system.harness import Run, checkpoints_of

pytestmark = [pytest.mark.system, pytest.mark.torch]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_job_trains_on_while_storage_is_full_shows_that_its_checkpoints_are_skipped_and_writes_them_again(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path, nodes=1, virtual_gpus=1, topology="1")
    cluster.storage.mkdir()
    with small_disk(cluster.storage, "4m") as filler, cluster:
        run = Run.submit(cluster, "full", "--checkpoint-every", "1s", steps=100_000)
        uid = str(run.show()["uid"])
        eventually(lambda: checkpoints_of(cluster, uid), what="a checkpoint", within_seconds=60, story=run.story)

        def is_full() -> bool:
            # Again and again: what is pruned meanwhile makes room.
            fill(filler)
            return "STORAGE_FULL" in run.shell("show", run.id)

        eventually(is_full, what="checkpoints are skipped", within_seconds=60, story=run.story)
        for command in ("why", "history"):
            eventually(
                lambda command=command: "STORAGE_FULL" in run.shell(command, run.id),  # type: ignore[misc]
                what=f"{command} says that checkpoints are skipped",
                within_seconds=60,
                every_seconds=0.2,
                story=run.story,
            )
        eventually(
            lambda: f"STORAGE_FULL, reported by jobs/{run.id}" in run.shell("nodes"),
            what="nodes shows that checkpoints are skipped",
            within_seconds=60,
            every_seconds=0.2,
            story=run.story,
        )
        kept = checkpoints_of(cluster, uid)
        assert kept, "the newest complete checkpoint is kept"
        # Long enough for checkpoints that are due.
        run.wait_step(run.last_step() + 30)
        assert checkpoints_of(cluster, uid)[-1] == kept[-1]
        filler.unlink()
        eventually(
            lambda: checkpoints_of(cluster, uid)[-1] > kept[-1],
            what="checkpoints are written again",
            within_seconds=30,
            story=run.story,
        )
        for command in ("show", "why"):
            eventually(
                lambda command=command: "STORAGE_FULL" not in run.shell(command, run.id),  # type: ignore[misc]
                what=f"{command} says no more that they are skipped",
                within_seconds=60,
                every_seconds=0.2,
                story=run.story,
            )
        # One is there while a checkpoint is being written.
        eventually(
            lambda: not list((cluster.storage / uid / "checkpoints").glob("*.tmp*")),
            what="no unfinished checkpoint is left",
            within_seconds=30,
            story=run.story,
        )
        run.shell("cancel", run.id)
        run.wait_state("CANCELLED")
        steps = [line.step for line in run.lines(0)]
        assert steps == list(range(1, len(steps) + 1)), "a step was lost or done twice"
