"""A job that was brought back and is stopped again before it has made a step is still where it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ganger.injob.page_layout import PageOrderKind, PageParkLevel, PageState, Word
from training.harness import Rank, undisturbed, wait_until

pytestmark = pytest.mark.torch

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
noise = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(12, 4))
{start}
for epoch in {epochs}:
    for (x,) in loader:
        loss = model(x + torch.randn(4, generator=noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, loss.item().hex(), flush=True)
        {end}
"""
FORMS = {
    "attached": SCRIPT.format(
        start="import ganger\njob = ganger.attach(model=model, optimizer=optimizer)\n"
        "loader = job.dataloader(data, global_batch=2, shuffle=True)\njob.register('noise', noise)",
        epochs="job.epochs(2)",
        end="job.step(loss)",
    ),
    "plain": SCRIPT.format(
        start="loader = DataLoader(data, batch_size=2, shuffle=True)", epochs="range(2)", end="pass"
    ),
}
ARENA_BYTES = 8 << 20


@pytest.fixture(params=FORMS)
def script(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool]:
    path = tmp_path / "train.py"
    path.write_text(FORMS[request.param])
    return path, request.param == "plain"


def _ready(directory: Path, script: tuple[Path, bool], restore: dict[str, object]) -> Rank:
    rank = Rank(
        directory, script[0], agent=script[1], restore=restore, arena_bytes=ARENA_BYTES, order=PageOrderKind.WAIT
    )
    wait_until(lambda: rank.page.get(Word.STATE) == PageState.READY, "ready")
    return rank


@pytest.mark.parametrize("step", [4, 6])
def test_saved_to_storage_twice_without_a_step_between(tmp_path: Path, script: tuple[Path, bool], step: int) -> None:
    first = Rank(tmp_path / "first", script[0], agent=script[1], stop_at=step, checkpoint=tmp_path / "one")
    assert first.end() == 75, first.output()
    again = _ready(tmp_path / "again", script, {"kind": "checkpoint", "path": str(tmp_path / "one"), "step": step})
    again.stop(2, PageParkLevel.CHECKPOINT, checkpoint=str(tmp_path / "two"))
    assert again.end() == 75, again.output()
    assert again.page.get(Word.CHECKPOINT_STEP) == step
    last = _ready(tmp_path / "last", script, {"kind": "checkpoint", "path": str(tmp_path / "two"), "step": step})
    last.order(2, PageOrderKind.RUN)
    assert last.end() == 0, last.output()
    assert first.output() + again.output() + last.output() == undisturbed(tmp_path, script[0])


def test_suspended_and_moved_on_without_a_step_between(tmp_path: Path, script: tuple[Path, bool]) -> None:
    first = Rank(tmp_path / "first", script[0], agent=script[1], stop_at=4, checkpoint=tmp_path / "one")
    assert first.end() == 75, first.output()
    again = _ready(tmp_path / "again", script, {"kind": "checkpoint", "path": str(tmp_path / "one"), "step": 4})
    again.stop(2, PageParkLevel.OFFLOAD)
    assert again.reached(2) == 4
    again.order(3, PageOrderKind.STOP, PageParkLevel.HAND_OVER, stop=2)
    assert again.reached(3) == 4
    assert again.arena_fd is not None
    restore = {"kind": "arena", "step": 4, "size": again.page.get(Word.ARENA_SIZE)}
    moved = Rank(tmp_path / "moved", script[0], agent=script[1], restore=restore, arena_fd=os.dup(again.arena_fd))
    moved.page.set(Word.ARENA_AVAILABLE, again.page.get(Word.ARENA_FILLED))
    assert moved.end() == 0, moved.output()
    again.kill()
    assert first.output() + moved.output() == undisturbed(tmp_path, script[0])
