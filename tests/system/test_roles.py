"""Parameter servers and workers: started as one gang, suspended, moved and killed like other jobs, with the losses and
parameters of an undisturbed run, bit for bit. (60 s)"""

from __future__ import annotations

import json
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

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "parameter_server" / "train.py"
EPOCHS, STEPS = 6, 6 * 29


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("roles")
    with Cluster(place, nodes=2, virtual_gpus=2, topology="2") as running:
        yield running


class Training:
    """One job of two servers and two workers."""

    def __init__(self, cluster: Cluster, label: str, *words: str, servers: int = 2, slow: bool = True) -> None:
        self.shell = Shell(cluster.master_directory)
        self.losses_file, self.weights_file = cluster.directory / f"{label}.losses", cluster.directory / f"{label}.sha"
        self._go = cluster.directory / f"{label}.go"
        if not slow:
            self._go.touch()
        options = {"--losses": self.losses_file, "--weights": self.weights_file, "--slow-until": self._go}
        description = {
            "name": label,
            "command": [
                *(sys.executable, str(SCRIPT), "--epochs", str(EPOCHS), *words),
                *(str(word) for option in options.items() for word in option),
            ],
            "roles": [
                {"name": "ps", "tasks": servers, "cpus": 0.2, "memory": "1G"},
                {"name": "worker", "tasks": 2, "gpus": 1, "cpus": 0.2, "memory": "1G"},
            ],
            "max_failures": 2,
            "checkpoint_every": "1s",
        }
        file = cluster.directory / f"{label}.yaml"
        file.write_text(json.dumps(description))
        self.id = self.shell.submit("--file", str(file))

    def show(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.shell.json("show", self.id)
        return shown

    @property
    def lines(self) -> list[tuple[int, str]]:
        text = self.losses_file.read_text() if self.losses_file.exists() else ""
        return [(int(line.split()[0]), line.split()[1]) for line in text.split("\n")[:-1]]

    @property
    def losses(self) -> dict[int, str]:
        """Losses by step; of steps that were repeated after a crash the last."""
        return dict(self.lines)

    def wait_steps(self, more: int) -> None:
        begun = len(self.lines)
        eventually(lambda: len(self.lines) >= begun + more, within_seconds=120, what="it steps", story=self.story)

    def wait_state(self, state: str) -> None:
        eventually(lambda: self.show()["state"] == state, within_seconds=120, what=state, story=self.story)

    def hurry(self) -> None:
        self._go.touch()

    def story(self) -> str:
        return self.shell.try_("show", self.id).out + self.shell.try_("logs", "--all", self.id).out

    def result(self) -> tuple[dict[int, str], str]:
        self.wait_state("SUCCEEDED")
        return self.losses, self.weights_file.read_text()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> tuple[dict[int, str], str]:
    result = Training(cluster, "undisturbed", slow=False).result()
    assert sorted(result[0]) == list(range(1, STEPS + 1))
    return result


def test_servers_and_workers_are_suspended_and_moved_and_no_bit_differs(
    cluster: Cluster, undisturbed: tuple[dict[int, str], str]
) -> None:
    job = Training(cluster, "disturbed")
    job.wait_steps(5)
    for level in ("pause", "offload", "checkpoint"):
        job.shell("suspend", "--level", level, "--wait", job.id)
        job.shell("resume", job.id)
        job.wait_steps(5)
    job.shell("move", job.id, "--wait", "--to", other_node(job))
    job.wait_steps(5)
    job.hurry()
    assert job.result() == undisturbed
    # No sample is lost and none is repeated: each step was done once.
    assert [step for step, _ in job.lines] == list(range(1, STEPS + 1))


def other_node(job: Training) -> str:
    nodes = {str(claim["node"]).removeprefix("nodes/") for claim in job.show()["gang"]["claims"]}
    (other,) = {"n0", "n1"} - nodes
    return other


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_a_task_of_a_role_that_is_killed_costs_steps_and_no_bit(
    cluster: Cluster, undisturbed: tuple[dict[int, str], str], role: str
) -> None:
    job = Training(cluster, f"killed-{role}")
    job.wait_steps(30)
    pids = [int(pid) for pid in job.show()["gang"]["pids"]]
    os.kill(pids[1 if role == "ps" else 3], signal.SIGKILL)
    job.hurry()
    assert job.result() == undisturbed
    assert int(job.show()["failures"]) == 1


def test_asynchronous_servers_are_suspended_and_moved_and_each_worker_makes_each_step_once(cluster: Cluster) -> None:
    job = Training(cluster, "asynchronous", "--asynchronous")
    job.wait_steps(5)
    for level in ("offload", "checkpoint"):
        job.shell("suspend", "--level", level, "--wait", job.id)
        job.shell("resume", job.id)
        job.wait_steps(5)
    job.hurry()
    losses, _ = job.result()
    assert [step for step, _ in job.lines] == list(range(1, STEPS + 1))
    assert float.fromhex(losses[STEPS]) < float.fromhex(losses[1])
