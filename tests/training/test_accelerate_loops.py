"""A loop of the script's own around an `Accelerator` is run again up to its place, as other loops are."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.packages import skip_without
from training.harness import Rank, end_together, gang, run_gang_in_parts

skip_without("accelerate")
pytestmark = pytest.mark.torch

HEAD = """
import os, sys, torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps={accumulation})
data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
loader = DataLoader(data, batch_size=3, shuffle=True)
checks = DataLoader(data, batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.95 ** n)
model, optimizer, loader, checks, schedule = accelerator.prepare(model, optimizer, loader, checks, schedule)
done = 0
for epoch in range(3):
    model.train()
    for step, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        done += 1
        print(epoch, step, done, loss.item().hex(), schedule.get_last_lr(), flush=True)
    model.eval()
    total = 0
    with torch.no_grad():
        for x, y in checks:
            total += accelerator.gather_for_metrics((model(x) - y).square().mean()).mean().item()
    print("epoch", epoch, total.hex(), flush=True)
"""


@pytest.mark.parametrize(("accumulation", "stops"), [(1, [2, 7]), (2, [1, 4])])
def test_a_loop_around_an_accelerator_goes_on_at_its_step_on_all_ranks(
    tmp_path: Path, accumulation: int, stops: list[int]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD.replace("{accumulation}", str(accumulation)))
    alone = gang(tmp_path / "alone", script, [], managed=False)
    assert end_together(alone) == [0, 0], alone[0].output()

    # four batches a pass and rank; two ranks stop a step later, in a pass or between two
    parts = run_gang_in_parts(tmp_path, script, [], stops)

    for rank in range(2):
        assert "".join(lines(ranks[rank]) for ranks in parts) == lines(alone[rank])


def lines(rank: Rank) -> str:
    return "".join(line for line in rank.log.read_text().splitlines(True) if line[:1].isdigit() or line[:1] == "e")
