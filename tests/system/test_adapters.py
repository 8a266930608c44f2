"""Jobs with a trainer are suspended and moved between nodes as they are, and end as if they had run alone. (40 s)

They run where transformers, accelerate and lightning are installed (`make adapters`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.cluster import Cluster
from kit.packages import skip_without
from kit.shell import Shell
from kit.waiting import eventually
from training.harness import Rank, Rendezvous, end_together, preload

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.timeout(600)]
skip_without("accelerate", "transformers", "lightning")
preload("transformers.trainer", "lightning.pytorch")

JOBS = Path(__file__).parent / "jobs"
OPTIONS = ("--cpus-per-gpu", "1", "--memory", "1G", "--gpu-memory", "16M", "--checkpoint-every", "never")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    options = {"virtual_gpus": 2, "topology": "2", "virtual_memory": "8G"}
    with Cluster(tmp_path / "cluster", nodes=2, **options) as running:
        yield running


@pytest.mark.parametrize("script", ["hf_trainer.py", pytest.param("lightning_trainer.py", marks=pytest.mark.chaos)])
def test_two_ranks_of_a_trainer_move_to_another_node_and_end_as_if_they_had_run_alone(
    cluster: Cluster, tmp_path: Path, script: str
) -> None:
    alone = _alone(tmp_path / "alone", JOBS / script)
    shell, out, go = Shell(cluster.master_directory), tmp_path / "job", tmp_path / "go"
    out.mkdir()
    words = (sys.executable, str(JOBS / script), str(out), str(go))
    job = shell.submit("--gpus", "2", "--nodes", "1", "--mechanism", "adapter", *OPTIONS, "--", *words)
    _wait_steps(shell, job, 3)
    eventually(lambda: _capabilities(shell, job).get("can_move"), what="it offers a move")
    assert _capabilities(shell, job)["mechanism"] == "ADAPTER"

    shell("suspend", job, "--level", "offload")
    shell("resume", job)
    before = _node(shell, job)
    shell("move", job)
    assert _node(shell, job) != before
    _wait_steps(shell, job, _step(shell, job) + 2)
    go.touch()
    eventually(lambda: shell.json("show", job)["state"] == "SUCCEEDED", within_seconds=180, what="it has succeeded")

    assert _lines(shell("logs", job, "--rank", "0")) == alone
    assert (out / "weights").read_text() == (tmp_path / "alone/weights").read_text()
    assert shell.json("history", job)["totals"]["moves"] == 1


def _alone(directory: Path, script: Path) -> list[str]:
    """Return what two ranks outside of Ganger print."""
    store, here = Rendezvous(), [directory, directory]
    ranks = [Rank(directory, script, here, rank=rank, world=2, rendezvous=store, managed=False) for rank in range(2)]
    assert end_together(ranks) == [0, 0], "".join(rank.output() for rank in ranks)
    return _lines(ranks[0].output())


def _lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("step ")]


def _capabilities(shell: Shell, job: str) -> dict[str, Any]:
    return shell.json("show", job)["capabilities"] or {}


def _step(shell: Shell, job: str) -> int:
    return int((shell.json("show", job)["progress"] or {}).get("step", 0))


def _wait_steps(shell: Shell, job: str, step: int) -> None:
    def story() -> str:
        return shell("logs", job)

    eventually(lambda: _step(shell, job) >= step, within_seconds=180, what=f"step {step}", story=story)


def _node(shell: Shell, job: str) -> str:
    (claim,) = shell.json("show", job)["gang"]["claims"]
    return str(claim["node"])
