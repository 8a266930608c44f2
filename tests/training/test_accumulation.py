"""Gradients that are still being summed at a boundary are part of the state, whatever is done to the job there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ganger.injob.page_layout import Error, PageOrderKind, PageParkLevel, Word
from kit.images import verify_image
from training.harness import Rank, printed_in_parts, run_in_parts

pytestmark = pytest.mark.torch

# the head takes a step with every batch, which makes the boundaries; the body one for three batches
SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(1)
body, head = nn.Linear(64, 64), nn.Linear(64, 64)
model = nn.Sequential(body, nn.ReLU(), head)
quick = torch.optim.SGD(head.parameters(), lr=0.1)
slow = torch.optim.Adam(body.parameters(), lr=0.01)
data = TensorDataset(torch.randn(24, 64))
{start}
number = 0
for (x,) in loader:
    time.sleep(0.002)  # a request for a checkpoint is looked for every millisecond
    loss = model(x).square().mean()
    loss.backward()
    quick.step()
    quick.zero_grad()
    number = {number}
    if number % 3 == 0:
        slow.step()
        slow.zero_grad()
    print(number, loss.item().hex(), flush=True)
    {end}
print(body.weight.sum().item().hex(), flush=True)
"""
FORMS = {
    "attached": SCRIPT.format(
        start="import ganger\njob = ganger.attach(model=model, optimizer=[quick, slow])\n"
        "loader = job.dataloader(data, global_batch=2, shuffle=True)",
        number="job.step_count + 1",
        end="job.step(loss)",
    ),
    "plain": SCRIPT.format(
        start="loader = DataLoader(data, batch_size=2, shuffle=True)", number="number + 1", end="pass"
    ),
}
ARENA_BYTES = 8 << 20


@pytest.fixture(params=FORMS)
def script(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool]:
    path = tmp_path / "train.py"
    path.write_text(FORMS[request.param])
    return path, request.param == "plain"


@pytest.fixture
def undisturbed(tmp_path: Path, script: tuple[Path, bool]) -> str:
    rank = Rank(tmp_path / "undisturbed", script[0], managed=False)
    assert rank.end() == 0, rank.output()
    return rank.output()


def _stopped(directory: Path, script: tuple[Path, bool], step: int) -> Rank:
    """A rank that stands at `step`, between two of the body's steps, and hears the next order there."""
    path, agent = script
    rank = Rank(directory, path, agent=agent, arena_bytes=ARENA_BYTES, stop_at=step)
    rank.wait_word(Word.ERROR, Error.STORAGE_FAILED)
    return rank


@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_half_a_sum_survives_a_suspend_in_host_memory(
    tmp_path: Path, script: tuple[Path, bool], undisturbed: str, step: int
) -> None:
    rank = _stopped(tmp_path / "run", script, step)
    rank.order(3, PageOrderKind.STOP, PageParkLevel.OFFLOAD, stop=2)
    assert rank.reached(3) == step
    rank.order(4, PageOrderKind.RUN)
    assert rank.end() == 0, rank.output()
    assert rank.output() == undisturbed


def test_half_a_sum_survives_a_move(tmp_path: Path, script: tuple[Path, bool], undisturbed: str) -> None:
    source = _stopped(tmp_path / "source", script, 4)
    source.order(3, PageOrderKind.STOP, PageParkLevel.HAND_OVER, stop=2)
    assert source.reached(3) == 4
    assert source.arena_fd is not None
    restore = {"kind": "arena", "step": 4, "size": source.page.get(Word.ARENA_SIZE)}
    moved = Rank(tmp_path / "moved", script[0], agent=script[1], restore=restore, arena_fd=os.dup(source.arena_fd))
    moved.page.set(Word.ARENA_AVAILABLE, source.page.get(Word.ARENA_FILLED))
    assert moved.end() == 0, moved.output()
    source.kill()
    assert source.output() + moved.output() == undisturbed


def test_half_a_sum_survives_restarts_from_storage(tmp_path: Path, script: tuple[Path, bool], undisturbed: str) -> None:
    stops = [1, 2, 4, 6]
    run_in_parts(tmp_path, script[0], [], stops, agent=script[1])
    assert printed_in_parts(tmp_path, stops) == undisturbed


@pytest.mark.parametrize("arena_bytes", [0, ARENA_BYTES], ids=["no arena", "arena"])
def test_half_a_sum_survives_a_checkpoint_in_the_background(
    tmp_path: Path, script: tuple[Path, bool], undisturbed: str, arena_bytes: int
) -> None:
    directory = tmp_path / "run"
    (directory / "orders").mkdir(parents=True)
    (directory / "orders/checkpoint-5.json").write_text(f'{{"checkpoint": "{tmp_path}/saved"}}')
    rank = Rank(directory, script[0], agent=script[1], arena_bytes=arena_bytes, save_at=4)
    assert rank.end() == 0, rank.output()
    assert verify_image(tmp_path / "saved/rank-0.shard").step == 4
    assert rank.output() == undisturbed
