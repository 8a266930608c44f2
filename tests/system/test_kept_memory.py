"""One GPU and no memory named: a job that rests at OFFLOAD leaves the next one the memory that it does not use."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.cluster import Cluster
from system.harness import Run

pytestmark = [pytest.mark.system, pytest.mark.torch]


def test_a_gpu_that_a_suspend_freed_can_be_used_and_the_resume_waits_for_its_memory(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=1, virtual_gpus=1, topology="1x1", virtual_memory="16G") as cluster:
        first = Run.submit(cluster, "first", steps=400)
        first.wait_step(2)
        claim = first.show()["gang"]["claims"][0]
        assert int(claim["memory_bytes"]) > 8 << 30, "more than half of the node's memory"
        first.shell("suspend", first.id, "--level", "offload")
        second = Run.submit(cluster, "second", steps=400)
        second.wait_step(2)
        first.shell("resume", first.id, "--no-wait")
        first.wait_state("PENDING")
        done = first.last_step()
        second.wait_step(second.last_step() + 2)
        assert first.last_step() == done
        second.hurry()
        second.wait_state("SUCCEEDED")
        first.wait_step(done + 2)
        first.hurry()
        first.wait_state("SUCCEEDED")
        assert [line.step for line in first.lines(0)] == list(range(1, 401))
