"""What a job logs is kept over a move, a failure and kills of daemon and master, each step once. (40 s)"""

from __future__ import annotations

import csv
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually

pytestmark = [pytest.mark.system, pytest.mark.torch]

SCRIPT = Path(__file__).parent / "jobs" / "epochs.py"
EPOCHS, STEPS = 100, 8


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=2, virtual_gpus=2, topology="2") as running:
        yield running


def node_of(shell: Shell, job: str) -> str:
    (node,) = {str(claim["node"]).removeprefix("nodes/") for claim in shell.json("show", job)["gang"]["claims"]}
    return node


def series(shell: Shell, job: str) -> dict[str, Any]:
    done = shell.try_("plot", job, "--json")
    if done.code != 0:
        return {"metrics": [], "epochs": []}
    found: dict[str, Any] = shell.json("plot", job)[job]
    return found


def steps_of(shell: Shell, job: str, name: str) -> list[int]:
    steps = [metric["steps"] for metric in series(shell, job)["metrics"] if metric["name"] == name]
    return [int(step) for step in steps[0]] if steps else []


def test_a_series_has_each_step_once_over_a_move_a_failure_and_kills(cluster: Cluster, tmp_path: Path) -> None:
    shell, go = Shell(cluster.master_directory), tmp_path / "go"
    options = ("--gpus", "2", "--memory", "1G", "--checkpoint-every", "1s", "--max-failures", "2")
    job = shell.submit(*options, "--", sys.executable, str(SCRIPT), str(EPOCHS), str(STEPS), str(go))

    def story() -> str:
        return f"{shell.try_('show', job).out}{shell.try_('logs', '--all', job).out}{steps_of(shell, job, 'place')}"

    def wait_steps(count: int) -> None:
        target = max([0, *steps_of(shell, job, "place")]) + count
        eventually(
            lambda: max([0, *steps_of(shell, job, "place")]) >= target,
            within_seconds=120,
            what=f"it logs step {target}",
            story=story,
        )

    wait_steps(10)
    before = node_of(shell, job)
    shell("move", job, "--wait")
    assert node_of(shell, job) != before
    wait_steps(4)
    cluster.daemons[node_of(shell, job)].kill()
    cluster.master.kill()
    cluster.start_master()
    for daemon in cluster.daemons.values():
        if not daemon.alive:
            daemon.start()
    cluster.wait_ready()
    wait_steps(4)
    os.kill(int(shell.json("show", job)["gang"]["pids"][0]), signal.SIGKILL)
    go.touch()
    eventually(lambda: shell.json("show", job)["state"] == "SUCCEEDED", within_seconds=120, what="it ends", story=story)
    assert int(shell.json("show", job)["failures"]) == 1

    rows = [row for row in csv.DictReader(io.StringIO(shell("export", job))) if row["metric"] == "place"]
    # What was logged in step n has the number of steps before it.
    assert [int(row["step"]) for row in rows] == list(range(EPOCHS * STEPS)), story()
    places = [epoch + batch / 100 for epoch in range(EPOCHS) for batch in range(STEPS)]
    assert [float(row["value"]) for row in rows] == places
    assert len(steps_of(shell, job, "accuracy")) == EPOCHS
    epochs = series(shell, job)["epochs"]
    assert [int(epoch.get("number", 0)) for epoch in epochs] == list(range(EPOCHS))
    assert {int(epoch["steps"]) for epoch in epochs} == {STEPS}
    assert all(epoch["mean_loss"] > 0 for epoch in epochs)
