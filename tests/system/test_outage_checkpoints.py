"""Checkpoints that a job writes while its master is dead: its node dies too, and no complete one is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.waiting import eventually
from system.harness import Run, checkpoints_of

pytestmark = [pytest.mark.system, pytest.mark.torch]

# A node can be declared lost a second after its last call.
ALIVE = {"GANGER_MASTER_SESSION_ALIVE": "1s"}


class Outage:
    """A job of which the master knows two checkpoints is left alone until it has written three more."""

    def __init__(self, directory: Path) -> None:
        self.cluster = Cluster(directory, nodes=2, virtual_gpus=1, topology="1x1", environment=ALIVE)

    def begin(self) -> Run:
        cluster = self.cluster
        run = Run.submit(cluster, "saved", "--checkpoint-every", "1s", steps=400)
        run.wait_step(1)
        self.uid = str(run.show()["uid"])
        self.node = str(run.show()["gang"]["claims"][0]["node"]).removeprefix("nodes/")
        eventually(
            lambda: len(self.on_storage()) >= 2 and run.show().get("checkpoint", {}).get("path") == self.newest(),
            what="the master knows of two checkpoints",
            story=run.story,
        )
        return run

    def on_storage(self) -> list[tuple[int, int]]:
        """(epoch, step) of the complete checkpoints, oldest first."""
        return checkpoints_of(self.cluster, self.uid)

    def newest(self) -> str:
        epoch, step = self.on_storage()[-1]
        return f"checkpoints/{step}-{epoch}"

    def write_more(self, run: Run, checkpoints: int) -> None:
        seen = set(self.on_storage())
        before = len(seen)

        def written() -> bool:
            seen.update(self.on_storage())
            return len(seen) >= before + checkpoints

        eventually(written, what="more checkpoints are written", within_seconds=60, story=run.story)

    def lose_node(self, run: Run) -> int:
        """The step of the newest checkpoint that it leaves."""
        self.cluster.destroy_node(self.node)
        newest = self.on_storage()[-1][1]
        self.cluster.start_master()
        eventually(
            lambda: run.shell.try_("lost", self.node, "--yes").code == 0,
            what=f"{self.node} is seen dead",
            within_seconds=60,
            story=run.story,
        )
        return newest


@pytest.mark.parametrize("are_known_gone", [pytest.param(False, marks=pytest.mark.chaos), True])
def test_a_job_goes_on_from_the_newest_checkpoint_written_while_its_master_was_dead(
    tmp_path: Path, are_known_gone: bool
) -> None:
    """`are_known_gone`: those of which the master knew are not on storage any more."""
    outage = Outage(tmp_path)
    with outage.cluster:
        run = outage.begin()
        known = set(outage.on_storage())
        outage.cluster.master.kill()
        outage.write_more(run, 3)
        assert known <= set(outage.on_storage()), "what the master knows of is kept"
        if are_known_gone:
            for epoch, step in known:
                shutil.rmtree(outage.cluster.storage / outage.uid / "checkpoints" / f"{step}-{epoch}")
        newest = outage.lose_node(run)
        done = len(run.lines(0))
        eventually(lambda: len(run.lines(0)) > done, what="it goes on elsewhere", within_seconds=60, story=run.story)
        assert run.lines(0)[done].step == newest + 1

        def are_superseded() -> bool:
            present = outage.on_storage()
            return len(present) == 2 and {epoch for epoch, _ in present}.isdisjoint({epoch for epoch, _ in known})

        eventually(are_superseded, what="the two newest are left", within_seconds=60, story=run.story)
        run.hurry()
        run.wait_state("SUCCEEDED")
        assert run.show().get("failures", 0) == 0
