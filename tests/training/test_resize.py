"""A job goes on with other numbers of ranks, from checkpoints and from arenas: each sample once, to the same result."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from ganger.injob.page_layout import Capability, Error, PageOrderKind, PageParkLevel, Word
from ganger.training.state import TrainingObjects
from ganger.training.state_parts import size_offer
from training.harness import Rank, Rendezvous, end_together, wait_until

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
net = nn.Linear(1, 1).double()
model = nn.parallel.DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
job = ganger.attach(model=net, optimizer=optimizer)

@job.on_resize
def scale(old, new):
    print("resized from", old, "to", new, flush=True)

loader = job.dataloader(torch.arange(24.0).double().unsqueeze(1), global_batch=6, shuffle=True)
for epoch in job.epochs(3):
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        noise = torch.rand(()).item()
        print("step", job.step_count + 1, noise, *sorted(int(x) for x in batch.flatten()), flush=True)
        job.step()
print("weight", net.weight.item(), flush=True)
"""
ARENA_BYTES = 8 << 20


def batches(*ranks: Rank) -> dict[int, list[int]]:
    """What all ranks together took in each step."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        for step, samples in re.findall(r"^step (\d+) \S+ (.*)$", rank.output(), re.MULTILINE):
            found[int(step)] = sorted([*found.get(int(step), []), *map(int, samples.split())])
    return found


def noise(rank: Rank) -> list[str]:
    return re.findall(r"^step \d+ (\S+)", rank.output(), re.MULTILINE)


def weight(rank: Rank) -> float:
    return float(re.findall(r"^weight (.*)$", rank.output(), re.MULTILINE)[0])


def test_worlds_of_two_one_three_and_two_do_the_steps_of_one_that_never_changed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = Rank(tmp_path / "alone", script, managed=False)
    assert alone.end() == 0, alone.output()
    expected = batches(alone)

    # Two ranks save; one goes on from the shard of the first of them, and saves.
    first, shards = tmp_path / "two", tmp_path / "of two"
    two = _saving(first, script, 2, shards, stop_at=2)
    one_shard = tmp_path / "of one"
    restore = {"kind": "checkpoint", "path": str(shards), "step": 3}
    (one,) = _saving(tmp_path / "one", script, 1, one_shard, stop_at=5, restores=[restore])
    assert one.output().splitlines()[0] == "resized from 2 to 1"

    # Three go on from that one shard; they rest in their arenas.
    restore = {"kind": "checkpoint", "path": str(one_shard), "step": 5, "rank": 0}
    store = Rendezvous()
    three = [
        Rank(tmp_path / "three", script, rank=rank, world=3, rendezvous=store, restore=restore,
             arena_bytes=ARENA_BYTES, stop_at=6)
        for rank in range(3)
    ]  # fmt: skip
    for rank in three:
        # Told to save, but not where: it rests where it is, and hears the next order there.
        rank.wait_word(Word.ERROR, Error.STORAGE_FAILED)
        rank.order(3, PageOrderKind.STOP, PageParkLevel.OFFLOAD, stop=2)
    step = {rank.reached(3) for rank in three}.pop()
    assert {rank.page.get(Word.RESIZE_DIVIDES) for rank in three} == {6}
    # Four steps a pass: it is in the second of three.
    assert {(rank.page.progress().training_epoch, rank.page.progress().training_epochs) for rank in three} == {(1, 3)}
    assert all(rank.page.get(Word.CAPABILITIES) & Capability.RESIZE for rank in three)

    # Two take over from the arenas of the first two; parked ranks never step again.
    restore = {"kind": "arena", "step": step, "size": 0}
    last = [
        Rank(tmp_path / "last", script, rank=rank, world=2, rendezvous=store2, restore=restore,
             arena_bytes=ARENA_BYTES, order=PageOrderKind.WAIT)
        for store2 in [Rendezvous()] for rank in range(2)
    ]  # fmt: skip
    for source, destination in zip(three, last, strict=False):
        _carry(source, destination)
    for rank in last:
        assert rank.reached(1) == step
        rank.order(2, PageOrderKind.RUN)
    assert end_together(last) == [0, 0], "".join(rank.output() for rank in last)
    for rank in three:
        rank.kill()

    assert batches(*two, one, *three, *last) == expected, "the same samples in the same steps"
    assert weight(last[0]) == weight(last[1]) == pytest.approx(weight(alone), rel=1e-12)
    # Earlier ranks continue their random streams; new ranks draw streams of their own.
    assert noise(two[0]) + noise(one) + noise(three[0]) + noise(last[0]) == noise(alone)
    drawn = [*noise(alone)[5:step], *noise(three[1]), *noise(three[2])]
    assert len(set(drawn)) == len(drawn)


def _saving(
    directory: Path,
    script: Path,
    world: int,
    shards: Path,
    stop_at: int,
    restores: list[dict[str, object]] | None = None,
) -> list[Rank]:
    (directory / "orders").mkdir(parents=True)
    (directory / "orders/2.json").write_text(json.dumps({"checkpoint": str(shards)}))
    store = Rendezvous() if world > 1 else None
    ranks = [
        Rank(directory, script, rank=rank, world=world, rendezvous=store, stop_at=stop_at,
             restore=restores[rank] if restores else None)
        for rank in range(world)
    ]  # fmt: skip
    assert end_together(ranks) == [75] * world, "".join(rank.output() for rank in ranks)
    # Alone a rank stops where it stands, of several each may have begun the next step.
    assert {rank.page.get(Word.CHECKPOINT_STEP) for rank in ranks} == {stop_at + (world > 1)}
    return ranks


def _carry(source: Rank, destination: Rank) -> None:
    assert source.arena_fd is not None
    assert destination.arena_fd is not None
    size = source.page.get(Word.ARENA_SIZE)
    os.pwrite(destination.arena_fd, os.pread(source.arena_fd, size, 0), 0)
    destination.page.set(Word.ARENA_AVAILABLE, size)
    wait_until(lambda: destination.page.get(Word.RESTORED_STEP) > 0, "restored")


def test_a_model_that_is_sharded_over_the_ranks_is_said_not_to_be_replicated() -> None:
    class FullyShardedDataParallel(torch.nn.Module):
        pass

    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    plain = torch.nn.Linear(1, 1)
    assert size_offer(TrainingObjects(models={"model": plain})) == (Capability.RESIZE, "")
    sharded = torch.nn.Sequential(plain, FullyShardedDataParallel())
    assert "model.1 is sharded" in size_offer(TrainingObjects(models={"model": sharded}))[1]
    optimizer = ZeroRedundancyOptimizer(plain.parameters(), lr=0.1)
    assert "zero is sharded" in size_offer(TrainingObjects(optimizers={"zero": optimizer}))[1]
