"""Parameter servers and workers: started as one gang, suspended, moved, resized and killed like other jobs, with the
losses and parameters of an undisturbed run, bit for bit. (120 s)"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually

pytestmark = [pytest.mark.system, pytest.mark.torch]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "parameter_server" / "train.py"
EPOCHS, STEPS, BATCH = 6, 6 * 29, 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("roles")
    with Cluster(place, nodes=2, virtual_gpus=2, topology="2") as running:
        yield running


class Line(NamedTuple):
    """What the first worker writes of a step: its loss, and digests of the parameters before and after it."""

    step: int
    loss: str
    before: str
    after: str


class Training:
    """One job of servers and workers, so many or a range of them."""

    def __init__(
        self,
        cluster: Cluster,
        label: str,
        *words: str,
        servers: int | str = 2,
        workers: int | str = 2,
        slow: bool = True,
    ) -> None:
        self.shell = Shell(cluster.master_directory)
        self.losses_file, self.weights_file = cluster.directory / f"{label}.losses", cluster.directory / f"{label}.sha"
        self.samples_file = cluster.directory / f"{label}.samples"
        self._go = cluster.directory / f"{label}.go"
        if not slow:
            self._go.touch()
        options = {"--losses": self.losses_file, "--weights": self.weights_file, "--slow-until": self._go}
        options["--samples"] = self.samples_file
        description = {
            "name": label,
            "command": [
                *(sys.executable, str(SCRIPT), "--epochs", str(EPOCHS), *words),
                *(str(word) for option in options.items() for word in option),
            ],
            "roles": [
                {"name": "ps", "tasks": servers, "cpus": 0.2, "memory": "1G"},
                {"name": "worker", "tasks": workers, "gpus": 1, "cpus": 0.2, "memory": "1G"},
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
    def lines(self) -> list[Line]:
        text = self.losses_file.read_text() if self.losses_file.exists() else ""
        return [Line(int(line.split()[0]), *line.split()[1:]) for line in text.split("\n")[:-1]]

    @property
    def losses(self) -> dict[int, str]:
        """Losses by step; of steps that were repeated after a crash the last."""
        return {line.step: line.loss for line in self.lines}

    @property
    def tasks(self) -> list[int]:
        """The servers and workers that it has on all nodes."""
        claims = self.show()["gang"]["claims"]
        return [sum(claim["tasks"][role] for claim in claims) for role in (0, 1)]

    def resize(self, **tasks: int) -> None:
        sizes = [f"{role}={number}" for role, number in tasks.items()]
        self.shell("resize", self.id, *sizes, "--wait", "--timeout", "120s")

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

    def check_samples(self) -> None:
        """Each sample of an epoch is taken once, by one worker in one step; of `STEPS` steps none is left out."""
        taken: dict[int, list[int]] = {}
        steps = Counter[int]()
        for line in self.samples_file.read_text().splitlines():
            epoch, step, numbers = line.split()
            taken.setdefault(int(epoch), []).extend(map(int, numbers.split(",")))
            steps[int(step)] += len(numbers.split(","))
        assert steps == dict.fromkeys(range(1, STEPS + 1), BATCH)
        for of_epoch in taken.values():
            assert len(set(of_epoch)) == len(of_epoch) == STEPS // EPOCHS * BATCH
        assert sorted(taken) == list(range(EPOCHS))


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
    # Each step was done once.
    assert [line.step for line in job.lines] == list(range(1, STEPS + 1))
    job.check_samples()


def test_one_server_becomes_three_and_one_again_and_no_bit_differs(
    cluster: Cluster, undisturbed: tuple[dict[int, str], str]
) -> None:
    job = Training(cluster, "servers", servers="1:3")
    job.wait_steps(5)
    for servers in (3, 1):
        job.resize(ps=servers)
        assert job.tasks == [servers, 2]
        job.wait_steps(5)
        # As any other job.
        job.shell("suspend", "--level", "offload", "--wait", job.id)
        job.shell("resume", job.id)
        job.wait_steps(5)
    job.hurry()
    # Two workers sum their gradients alike, whichever server takes the step.
    assert job.result() == undisturbed
    assert [line.step for line in job.lines] == list(range(1, STEPS + 1))
    assert int(job.show()["preemptions"]) == 0


@pytest.mark.parametrize("words", [(), ("--asynchronous",)], ids=["synchronous", "asynchronous"])
def test_one_worker_becomes_four_and_then_two_beside_other_servers_and_no_sample_is_lost_or_repeated(
    cluster: Cluster, words: tuple[str, ...]
) -> None:
    job = Training(cluster, f"workers{len(words)}", *words, servers="1:3", workers="1:4")
    job.wait_steps(5)
    assert "role ps has 1 to 3 tasks, not 4" in job.shell.try_("resize", job.id, "worker=4", "ps=4").err
    for servers, workers in ((3, 4), (1, 2)):
        job.resize(ps=servers, worker=workers)
        assert job.tasks == [servers, workers]
        job.wait_steps(5)
    job.shell("move", job.id, "--wait", "--to", other_node(job))
    job.wait_steps(5)
    job.hurry()
    job.result()
    job.check_samples()
    lines = job.lines
    assert [line.step for line in lines] == list(range(1, STEPS + 1))
    if not words:
        # The parameters of every step are those that the former one had left, over both resizes, too.
        assert [line.before for line in lines[1:]] == [line.after for line in lines[:-1]]
    assert float.fromhex(lines[-1].loss) < float.fromhex(lines[0].loss)


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_a_task_that_dies_after_a_resize_costs_steps_and_no_bit(
    cluster: Cluster, undisturbed: tuple[dict[int, str], str], role: str
) -> None:
    job = Training(cluster, f"resized-{role}", servers="1:3")
    job.wait_steps(5)
    job.resize(ps=3)
    pids = [int(pid) for pid in job.show()["gang"]["pids"]]
    # Most likely before the first checkpoint of three servers: then from that of one.
    os.kill(pids[2 if role == "ps" else 3], signal.SIGKILL)
    eventually(lambda: int(job.show()["failures"]) == 1, within_seconds=60, what="it fails", story=job.story)
    job.hurry()
    assert job.result() == undisturbed
    assert int(job.show()["failures"]) == 1


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
    assert [line.step for line in job.lines] == list(range(1, STEPS + 1))
    assert float.fromhex(losses[STEPS]) < float.fromhex(losses[1])
