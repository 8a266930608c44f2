"""A checkpoint of two ranks gone on with by one: it is told so, and takes up the same global batches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ganger.injob.page import Word
from training.harness import Rank, Rendezvous, end_together

pytestmark = pytest.mark.torch

SCRIPT = """
import os
import ganger, torch
from torch import distributed, nn
torch.set_num_threads(1)
torch.manual_seed(1)
world = int(os.environ["WORLD_SIZE"])
if world > 1:
    distributed.init_process_group("gloo")
net = nn.Linear(1, 1)
model = nn.parallel.DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
job = ganger.attach(model=net, optimizer=optimizer)

@job.on_resize
def scale(old, new):
    print("resized from", old, "to", new, flush=True)

loader = job.dataloader(torch.arange(24.0).unsqueeze(1), global_batch=4, shuffle=True)
for epoch in job.epochs(2):
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", job.step_count + 1, *sorted(int(x) for x in batch.flatten()), flush=True)
        job.step()
"""


def batches(*ranks: Rank) -> dict[int, set[int]]:
    """What all ranks together took in each step."""
    found: dict[int, set[int]] = {}
    for rank in ranks:
        for step, samples in re.findall(r"^step (\d+) (.*)$", rank.output(), re.MULTILINE):
            found.setdefault(int(step), set()).update(map(int, samples.split()))
    return found


def test_a_checkpoint_of_two_ranks_is_gone_on_with_by_one_which_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = Rank(tmp_path / "alone", script, managed=False)
    assert alone.end() == 0, alone.output()
    part, shards, store = tmp_path / "two", tmp_path / "checkpoint", Rendezvous()
    (part / "orders").mkdir(parents=True)
    (part / "orders/2.json").write_text(json.dumps({"checkpoint": str(shards)}))
    two = [Rank(part, script, rank=rank, world=2, rendezvous=store, stop_at=7) for rank in range(2)]
    assert end_together(two) == [75, 75], "".join(rank.output() for rank in two)
    step = two[0].page.get(Word.CHECKPOINT_STEP)
    one = Rank(tmp_path / "one", script, restore={"kind": "checkpoint", "path": str(shards), "step": step})
    assert one.end() == 0, one.output()
    assert "resized" not in "".join(rank.output() for rank in two)
    assert one.output().splitlines()[0] == "resized from 2 to 1"
    assert sorted(batches(*two)) == list(range(1, step + 1))
    assert batches(*two) | batches(one) == batches(alone), "the same samples in the same steps"
