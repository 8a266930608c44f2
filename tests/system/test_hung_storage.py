"""Storage that stops to answer while jobs run and start: they go on as far as they can, and show what they wait for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run

pytestmark = [pytest.mark.system, pytest.mark.torch]


def test_jobs_on_storage_that_hangs_show_it_go_on_and_can_be_ended(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=1, virtual_gpus=2, topology="1x2") as cluster:
        running = Run.submit(cluster, "running", steps=100_000)
        running.wait_step(1)
        token = cluster.storage / ".ganger-token"
        kept = token.read_text()
        token.unlink()
        # A read of it does not come back, as of a file on a server that is away.
        os.mkfifo(token)
        starting = Run.submit(cluster, "starting", steps=100_000)
        for run in (running, starting):
            eventually(
                lambda run=run: "STORAGE_HUNG: storage has not answered" in run.shell("why", run.id),  # type: ignore[misc]
                what=f"why {run.id} names the storage",
                within_seconds=60,
                story=run.story,
            )
        assert f"STORAGE_HUNG, reported by jobs/{running.id}, jobs/{starting.id}" in running.shell("nodes")
        assert "STORAGE_HUNG" in running.shell("show", running.id)
        assert "STORAGE_HUNG" in running.shell("history", running.id)
        done = running.last_step()
        running.wait_step(done + 2)
        running.shell("cancel", starting.id)
        starting.wait_state("CANCELLED")
        fresh = cluster.storage / ".ganger-token.new"
        fresh.write_text(kept)
        # The read that hangs ends, and finds the file again.
        with open(os.open(token, os.O_RDWR), "w") as pipe:
            fresh.rename(token)
            pipe.write("\n")
        eventually(
            lambda: "STORAGE_HUNG" not in running.shell("why", running.id) + running.shell("nodes"),
            what="storage answers again",
            within_seconds=60,
            story=running.story,
        )
        running.shell("cancel", running.id)
        running.wait_state("CANCELLED")
