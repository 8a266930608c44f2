"""A server burns with all it holds: its jobs go on elsewhere from the checkpoint on storage, bit for bit the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from kit.cluster import Cluster
from kit.shell import Shell
from kit.waiting import eventually
from training.harness import EXAMPLES, Rank, losses

pytestmark = [pytest.mark.system, pytest.mark.torch]


@dataclass(frozen=True)
class Example:
    """A script with arguments that make it last long enough to be disturbed three times."""

    script: Path
    arguments: tuple[str, ...]
    steps: int

    @property
    def name(self) -> str:
        return f"{self.script.parent.name}-{self.script.stem}"


JOBS = (
    # 24 steps an epoch, read by two worker processes
    Example(EXAMPLES / "digits_cnn/attached.py", ("--epochs", "15", "--workers", "2"), 360),
    # 59 steps an epoch, tied weights, a schedule that depends on its own length
    Example(EXAMPLES / "char_transformer/plain.py", ("--epochs", "6", "--width", "16"), 354),
)
# Of `make test`: alone it need not last until another has come as far. test_outage_checkpoints has an attached job.
SHORT = Example(EXAMPLES / "char_transformer/plain.py", ("--epochs", "4", "--width", "16"), 236)


def outputs(directory: Path, example: Example) -> tuple[str, ...]:
    directory.mkdir(exist_ok=True)
    return (
        *("--losses", str(directory / f"{example.name}.losses")),
        *("--weights", str(directory / f"{example.name}.weights")),
    )


def alone(directory: Path, jobs: Sequence[Example]) -> Path:
    """What the scripts come to by themselves, without Ganger."""
    directory.mkdir()
    ranks = [
        Rank(
            directory / example.name, example.script, [*example.arguments, *outputs(directory, example)], managed=False
        )
        for example in jobs
    ]
    assert not any(rank.end() for rank in ranks), "".join(rank.output() for rank in ranks)
    return directory


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    # A node can be declared lost a second after its last call.
    options = {"virtual_gpus": 2, "topology": "1x2", "environment": {"GANGER_MASTER_SESSION_ALIVE": "1s"}}
    with Cluster(tmp_path / "cluster", nodes=3, **options) as running:
        yield running


def node_of(shell: Shell, job: str) -> str:
    return str(shell.json("show", job)["gang"]["claims"][0]["node"]).removeprefix("nodes/")


@pytest.mark.parametrize("examples", [pytest.param(JOBS, marks=pytest.mark.chaos, id="both"), [SHORT]])
def test_jobs_go_on_from_storage_when_their_node_and_its_memory_are_gone(
    cluster: Cluster, tmp_path: Path, examples: Sequence[Example]
) -> None:
    shell, expected_in = Shell(cluster.master_directory), alone(tmp_path / "alone", examples)

    def story() -> str:
        return "".join(shell("history", job) for job in jobs) + cluster.story()

    def steps(example: Example) -> list[int]:
        path = tmp_path / f"{example.name}.losses"
        # the last line may be half written
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [int(line.split()[0]) for line in lines]

    def until_further(by: int) -> None:
        goal = {example: len(steps(example)) + by for example in examples}
        eventually(
            lambda: all(len(steps(example)) >= goal[example] for example in examples),
            what=f"each has made {by} more steps",
            within_seconds=60,
            story=story,
        )

    def burns(node: str) -> None:
        cluster.destroy_node(node)
        # refused while the node may still be there
        eventually(lambda: shell.try_("lost", node, "--yes").code == 0, what=f"{node} is seen dead", story=story)

    for node in ("n1", "n2"):
        shell("cordon", node, "--reason", "all jobs on one node")
    jobs = [
        # one core each: as many threads as the script has alone, else the bits differ
        shell.submit("--name", example.name, "--checkpoint-every", "never", "--cpus-per-gpu", "1", "--",
                     sys.executable, str(example.script), *example.arguments, *outputs(tmp_path, example))
        for example in examples
    ]  # fmt: skip
    until_further(5)
    assert [node_of(shell, job) for job in jobs] == ["n0"] * len(jobs)

    # at rest on storage: nothing was lost, so nothing is done twice
    for job in jobs:
        shell("suspend", job, "--level", "checkpoint")
    saved = {example: max(steps(example)) for example in examples}
    burns("n0")
    shell("uncordon", "n1")
    for job in jobs:
        shell("resume", job, "--no-wait")
    until_further(5)
    assert [node_of(shell, job) for job in jobs] == ["n1"] * len(jobs)
    for example in examples:
        done = steps(example)
        assert done == list(range(1, len(done) + 1)), f"{example.name} was saved at {saved[example]}"

    # at work: what came after the last checkpoint is done again, and comes out the same
    for job in jobs:
        shell("suspend", job, "--level", "checkpoint")
    saved = {example: max(steps(example)) for example in examples}
    for job in jobs:
        shell("resume", job, "--no-wait")
    until_further(5)
    burns("n1")
    shell("uncordon", "n2")
    until_further(5)
    assert [node_of(shell, job) for job in jobs] == ["n2"] * len(jobs)
    shell("wait", *jobs, "--timeout", "2m")
    for example in examples:
        done = steps(example)
        went_back = [after for before, after in pairwise(done) if after != before + 1]
        assert went_back == [saved[example] + 1], f"{example.name}: {went_back}"
        assert set(done) == set(range(1, example.steps + 1))
        text = (tmp_path / f"{example.name}.losses").read_text()
        expected = losses(expected_in / f"{example.name}.losses")
        # each line, not only the last of a step
        assert all(expected[int(step)] == loss for step, loss in (line.split() for line in text.splitlines()))
        weights = f"{example.name}.weights"
        assert (tmp_path / weights).read_text() == (expected_in / weights).read_text()
