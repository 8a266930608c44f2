"""A node on which jobs take turns is drained, with nowhere to go and with another node: what is said of each is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually
from system.harness import Run
from system.test_turns import OPTIONS, WANTS, finish, takes_turns

pytestmark = [pytest.mark.system, pytest.mark.torch]


def node_of(run: Run) -> str:
    (claim,) = run.show()["gang"]["claims"]
    return str(claim["node"]).removeprefix("nodes/")


def is_empty(shell: Shell, name: str) -> bool:
    (node,) = [one for one in shell.json("nodes")["nodes"] if one["name"] == f"nodes/{name}"]
    return int(node["view_entry"].get("free_mask", 0)) == 1


def test_time_sliced_jobs_of_a_drained_node_are_saved_if_no_node_has_room_and_else_moved(tmp_path: Path) -> None:
    with Cluster(
        tmp_path, nodes=2, virtual_gpus=1, topology="1", virtual_cores=2, virtual_memory="32G", master_options=OPTIONS
    ) as cluster:
        first = Run.submit(cluster, "first", *WANTS, steps=320)
        first.wait_step(3)
        shell, here = first.shell, node_of(first)
        (there,) = {"n0", "n1"} - {here}
        shell("cordon", there, "--reason", "a new fan")
        second = Run.submit(cluster, "second", *WANTS, steps=320)
        second.wait_step(1, within_seconds=120)
        assert takes_turns(second), second.story()
        eventually(lambda: second.show()["gang"]["phase"] == "RUNNING", what="it runs", within_seconds=60)

        node, *jobs = shell("drain", here, "--reason", "a new disk").splitlines()
        assert node == f"node {here} is draining: a new disk"
        for run, said in zip((second, first), jobs, strict=True):
            # The planner may have looked already, and what it ordered not be on disk yet.
            expected = r"( saved on storage( if no job can make room|$)|, and goes on elsewhere$)"
            assert re.match(rf"  job {run.id}: .*{expected}", said), said
        for run in (first, second):
            run.wait_state("PENDING", within_seconds=120)
        eventually(lambda: is_empty(shell, here), what=f"{here} is empty", within_seconds=60, story=cluster.story)
        for run in (first, second):
            why = f"because its node {here} is drained (a new disk)"
            assert f"to stop at checkpoint by planner, {why}" in shell("history", run.id)

        shell("uncordon", there)
        for run in (first, second):
            run.wait_step(run.last_step() + 2, within_seconds=120)
            assert node_of(run) == there

        shell("uncordon", here)
        told = shell("drain", there, "--reason", "a new fan")
        eventually(lambda: is_empty(shell, there), what=f"{there} is empty", within_seconds=60, story=cluster.story)
        assert re.search(rf"job \d+: moves to {here}", told), told
        for run in (first, second):
            run.wait_step(run.last_step() + 2, within_seconds=120)
            assert node_of(run) == here
            assert "moved" in shell("history", run.id), run.story()
        finish(first, second)
