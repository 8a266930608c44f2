"""A job sharded by FSDP2 and tensor parallelism is parked, moved, saved, and goes on with half of its ranks. (30 s)"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ganger.injob.page import Page
from ganger.injob.page_layout import Word
from kit.cluster import Cluster
from kit.shell import Shell
from system.harness import Run
from training.harness import Rank, Rendezvous, end_together

pytestmark = [pytest.mark.system, pytest.mark.torch, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "jobs" / "sharded.py"
EPOCHS, STEPS_OF_EPOCH = 12, 6
OPTIONS = ("--cpus-per-gpu", "1", "--memory", "512M", "--gpu-memory", "16M", "--checkpoint-every", "never")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", nodes=2, virtual_gpus=4, topology="4", virtual_memory="16G") as running:
        yield running


def test_a_sharded_job_is_bit_identical_across_park_and_move_and_goes_on_at_two_ranks_of_four(
    cluster: Cluster, tmp_path: Path
) -> None:
    alone = _alone(tmp_path)
    run = _submitted_with_four(cluster)
    shell, id = run.shell, run.id
    run.wait_step(3, within_seconds=180)

    shell("suspend", id, "--level", "offload")
    freed = _freed_shares(cluster, run)
    assert sorted(freed) == [0, 1, 2, 3], "every rank reports"
    assert min(freed.values()) >= 0.95, freed
    shell("resume", id)
    before = _node(run)
    run.wait_step(run.last_step() + 2)
    shell("move", id)
    assert _node(run) != before
    run.wait_step(run.last_step() + 2)
    shell("suspend", id, "--level", "checkpoint")
    saved = run.last_step()
    for rank in range(4):
        assert [line.step for line in run.lines(rank)] == list(range(1, saved + 1))
        assert {line.step: line.loss for line in run.lines(rank)} == {step: alone[step] for step in range(1, saved + 1)}

    assert "it starts with 2 GPUs" in shell("resize", id, "2")
    shell("resume", id)
    Path(f"{run.record}.go").touch()
    run.wait_state("SUCCEEDED", within_seconds=180)
    for rank in range(2):
        lines = run.lines(rank)
        assert [line.step for line in lines] == list(range(1, EPOCHS * STEPS_OF_EPOCH + 1))
        losses = {line.step: float.fromhex(line.loss) for line in lines}
        expected = {step: float.fromhex(loss) for step, loss in alone.items()}
        assert losses == pytest.approx(expected, rel=0, abs=1e-6)
    for rank in (2, 3):
        assert run.lines(rank)[-1].step == saved


def _alone(tmp_path: Path) -> dict[int, str]:
    """Return the losses by step of four ranks outside of Ganger."""
    record = tmp_path / "alone"
    store = Rendezvous()
    words = ("--record", record, "--epochs", EPOCHS)
    ranks = [
        Rank(tmp_path / "ranks", SCRIPT, words, rank=rank, world=4, rendezvous=store, managed=False)
        for rank in range(4)
    ]
    assert end_together(ranks) == [0] * 4, "".join(rank.output() for rank in ranks)
    lines = [line.split() for line in Path(f"{record}.0").read_text().splitlines()]
    return {int(step): loss for step, loss, _ in lines if step != "done"}


def _submitted_with_four(cluster: Cluster) -> Run:
    """Submit it to a cluster without room, choose its size, and make room: an elastic job starts with its least."""
    shell, record = Shell(cluster.master_directory), cluster.directory / "sharded.record"
    for node in cluster.daemons:
        shell("cordon", node, "--reason", "the size is chosen first")
    words = (sys.executable, str(SCRIPT), "--epochs", str(EPOCHS), "--record", str(record))
    id = shell.submit("--gpus", "2:4", *OPTIONS, "--", *words, "--slow-until", f"{record}.go")
    shell("resize", id, "4")
    for node in cluster.daemons:
        shell("uncordon", node)
    return Run(cluster, f"jobs/{id}", record, 4, EPOCHS * STEPS_OF_EPOCH)


def _node(run: Run) -> str:
    (claim,) = run.show()["gang"]["claims"]
    return str(claim["node"])


def _freed_shares(cluster: Cluster, run: Run) -> dict[int, float]:
    """Return the share of its device bytes that each rank of the newest attempt has freed."""
    found: dict[int, float] = {}
    for path in cluster.run_directory.glob(f"*/{run.show()['uid']}/*/rank-*.page"):
        page = Page.open(str(path), writable=False)
        try:
            rank = int(path.stem.removeprefix("rank-"))
            found[rank] = page.get(Word.OFFLOADED_BYTES) / page.get(Word.DEVICE_BYTES)
        finally:
            page.close()
    return found
