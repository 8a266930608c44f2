"""Sharded jobs (FSDP2, tensor parallel, both, FSDP1) are parked, saved, moved and resharded as others are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ganger.injob.page_layout import EXIT_NO_STATE, Capability, Error, PageOrderKind, PageParkLevel, Word
from training.harness import Rank, Rendezvous, end_together, wait_until

pytestmark = pytest.mark.torch

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import ganger
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(1)
world = dist.get_world_size()
model = nn.Sequential(nn.Linear(128, {hidden}), nn.Tanh(), nn.Linear({hidden}, 128), nn.LayerNorm(128))
{shard}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
job = ganger.attach(model=model, optimizer=optimizer)
torch.manual_seed(2)
loader = job.dataloader(torch.randn(48, 128), global_batch={batch}, shuffle=True, mesh=mesh["dp"])
for epoch in job.epochs({epochs}):
    for x in loader:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad({zero})
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        print("step", job.step_count + 1, (mean / mesh["dp"].size()).item().hex(), flush=True)
        with torch.no_grad():
            {evaluate}
        job.step()
total = sum(p.full_tensor().double().sum().item() if hasattr(p, "full_tensor") else p.double().sum().item()
            for p in model.parameters())
print("weights", total.hex(), flush=True)
dist.destroy_process_group()
"""
FSDP2 = """
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
fully_shard(model[0], mesh=mesh); fully_shard(model, mesh=mesh)
"""
TENSOR_PARALLEL = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
parallelize_module(model, mesh["tp"], {'0': ColwiseParallel(), '2': RowwiseParallel()})
"""
BOTH = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
parallelize_module(model, mesh["tp"], {'0': ColwiseParallel(), '2': RowwiseParallel()})
fully_shard(model[0], mesh=mesh["dp"]); fully_shard(model, mesh=mesh["dp"])
"""
FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params={orig})
"""
BF16 = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model[0] = checkpoint_wrapper(model[0])
fully_shard(model[0], mesh=mesh, mp_policy=policy); fully_shard(model, mesh=mesh, mp_policy=policy)
"""
COMPILED = FSDP2 + "model = torch.compile(model, backend='aot_eager')"
KEEPING = {"evaluate": "model(x)", "zero": "set_to_none=False"}
WAYS = {
    "FSDP2 with parameters gathered by an evaluation and gradients that are kept": FSDP2,
    "FSDP2 with mixed precision and activation checkpoints": BF16,
    "FSDP2, compiled": COMPILED,
    "FSDP2": FSDP2,
    "tensor parallel": TENSOR_PARALLEL,
    "FSDP2 over tensor parallel": BOTH,
    "FSDP1": FSDP1.replace("{orig}", "False"),
    "FSDP1 with the original parameters": FSDP1.replace("{orig}", "True"),
}


def _script(tmp_path: Path, shard: str, **options: object) -> Path:
    path = tmp_path / "train.py"
    usual = {"epochs": 8, "batch": 8, "hidden": 514, "evaluate": "pass", "zero": ""}
    path.write_text(SCRIPT.format(shard=shard, **{**usual, **options}))
    return path


def _gang(directory: Path, script: Path, world: int, **options: object) -> list[Rank]:
    store = Rendezvous()
    return [Rank(directory, script, rank=rank, world=world, rendezvous=store, **options) for rank in range(world)]


def _text(ranks: list[Rank]) -> str:
    return "".join(rank.output() for rank in ranks)


def _losses(*parts: Rank) -> dict[int, float]:
    found = [line for part in parts for line in re.findall(r"^step (\d+) (\S+)$", part.output(), re.MULTILINE)]
    return {int(step): float.fromhex(loss) for step, loss in found}


def _weights(rank: Rank) -> str:
    return re.findall(r"^weights (\S+)$", rank.output(), re.MULTILINE)[0]


# Plain FSDP2 is in other tests of this module.
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.chaos) if way == "FSDP2" else way for way in WAYS])
def test_a_sharded_job_that_was_parked_and_restarted_ends_as_one_that_was_not(tmp_path: Path, way: str) -> None:
    world = 4 if way == "FSDP2 over tensor parallel" else 2
    script = _script(tmp_path, WAYS[way], **(KEEPING if "evaluation" in way else {}))
    alone = _gang(tmp_path / "alone", script, world, managed=False)
    assert end_together(alone) == [0] * world, _text(alone)

    _check_parked_and_restarted(tmp_path, script, alone)


def _check_parked_and_restarted(tmp_path: Path, script: Path, alone: list[Rank], *, agent: bool = False) -> None:
    world = len(alone)
    shards = tmp_path / "shards"
    first = _gang(tmp_path / "first", script, world, arena_bytes=8 << 20, agent=agent)
    for rank in first:
        rank.at_step(3)
        rank.stop(2, PageParkLevel.OFFLOAD)
    for rank in first:
        rank.reached(2)
        freed, used = rank.page.get(Word.OFFLOADED_BYTES), rank.page.get(Word.DEVICE_BYTES)
        assert freed >= 0.95 * used > 0, f"rank {rank.rank}: {freed} of {used}"
    for rank in first:
        rank.order(3, PageOrderKind.RUN)
    for rank in first:
        rank.at_step(10)
        rank.stop(4, PageParkLevel.CHECKPOINT, checkpoint=str(shards))
    assert end_together(first) == [75] * world, _text(first)
    step = {rank.page.get(Word.CHECKPOINT_STEP) for rank in first}.pop()
    restore = {"kind": "checkpoint", "path": str(shards), "step": step}
    last = _gang(tmp_path / "last", script, world, restore=restore, agent=agent)
    assert end_together(last) == [0] * world, _text(last)
    for before, after, reference in zip(first, last, alone, strict=True):
        assert _losses(before, after) == _losses(reference)
        assert _weights(after) == _weights(reference)


UNMODIFIED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(1)
world = dist.get_world_size()
model = nn.Sequential(nn.Linear(128, 514), nn.Tanh(), nn.Linear(514, 128))
{shard}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(48, 128)), batch_size=4, shuffle=True)
step = 0
for epoch in range(4):
    for (x,) in loader:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print("step", step, loss.item().hex(), flush=True)
total = sum(p.full_tensor().double().sum().item() for p in model.parameters())
print("weights", total.hex(), flush=True)
dist.destroy_process_group()
"""


def test_an_unmodified_sharded_job_that_was_parked_and_restarted_ends_as_one_that_was_not(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNMODIFIED.format(shard=FSDP2))
    alone = _gang(tmp_path / "alone", script, 2, managed=False)
    assert end_together(alone) == [0, 0], _text(alone)
    _check_parked_and_restarted(tmp_path, script, alone, agent=True)


def test_the_memory_of_a_parked_rank_s_shards_goes_back_to_the_system(tmp_path: Path) -> None:
    script = _script(tmp_path, FSDP2, hidden=16384, epochs=100)
    ranks = _gang(tmp_path / "run", script, 2, arena_bytes=64 << 20)
    for rank in ranks:
        rank.at_step(3)
        rank.stop(2, PageParkLevel.PAUSE)
    for rank in ranks:
        rank.reached(2)
    before = [_own_memory(rank) for rank in ranks]
    for rank in ranks:
        rank.order(3, PageOrderKind.STOP, PageParkLevel.OFFLOAD, stop=2)
    for rank, had in zip(ranks, before, strict=True):
        rank.reached(3)
        used = rank.page.get(Word.DEVICE_BYTES)
        # half of the parameters and of both moments of Adam
        assert used > 3 * 4 * 2 * 128 * 16384 // 2
        assert had - _own_memory(rank) >= 0.95 * used
    for rank in ranks:
        rank.kill()


def _own_memory(rank: Rank) -> int:
    """Return the bytes of memory that the rank shares with no process and no file; the arena is not among them."""
    status = Path(f"/proc/{rank.process.pid}/status").read_text()
    return int(re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)[0]) << 10


def _offered(rank: Rank) -> int:
    return rank.page.get(Word.CAPABILITIES) & (Capability.RESIZE | Capability.RESHARD)


# A rank that is alone has no part of anything.
SEVERAL = """
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
if world > 1:
    fully_shard(model[0], mesh=mesh); fully_shard(model, mesh=mesh)
"""
# Replicas of shards: every rank has samples of its own.
HYBRID = """
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
fully_shard(model[0], mesh=grid); fully_shard(model, mesh=grid)
"""
RESIZED = {
    "FSDP2 with replicas, fewer": (HYBRID, 4, 2),
    "FSDP2, to one rank without": (SEVERAL, 2, 1),
    "FSDP2, from one rank without": (SEVERAL, 1, 2),
    "FSDP2, fewer": (FSDP2, 4, 2),
    "FSDP2, more, in uneven parts": (FSDP2, 2, 3),
    "FSDP2 over tensor parallel, fewer": (BOTH, 4, 2),
    "FSDP2 over tensor parallel, more": (BOTH, 2, 4),
}


@pytest.mark.parametrize("case", RESIZED)
def test_another_number_of_ranks_takes_over_the_shards_of_a_checkpoint(tmp_path: Path, case: str) -> None:
    shard, before, after = RESIZED[case]
    script = _script(tmp_path, shard, epochs=2, batch=12, **KEEPING)
    alone = _gang(tmp_path / "alone", script, before, managed=False)
    assert end_together(alone) == [0] * before, _text(alone)
    shards = tmp_path / "shards"
    first = _gang(tmp_path / "first", script, before, stop_at=3, checkpoint=shards)
    assert end_together(first) == [75] * before, _text(first)
    assert {_offered(rank) for rank in first} == {Capability.RESHARD if before > 1 else Capability.RESIZE}
    # so that the ranks of another mesh, whose tensor-parallel ones share their samples, divide the batch
    assert {rank.page.get(Word.RESIZE_DIVIDES) for rank in first} == {24 if shard is BOTH else 12}
    step = {rank.page.get(Word.CHECKPOINT_STEP) for rank in first}.pop()
    assert step > 1
    store = Rendezvous()
    last = [
        Rank(
            tmp_path / "last",
            script,
            rank=rank,
            world=after,
            rendezvous=store,
            restore={"kind": "checkpoint", "path": str(shards), "step": step, "rank": rank % before},
        )
        for rank in range(after)
    ]
    assert end_together(last) == [0] * after, _text(last)
    expected = _losses(alone[0])
    assert _losses(first[0], last[0]) == pytest.approx(expected, rel=0, abs=1e-6)
    assert len(expected) == 8 > step


def test_a_damaged_shard_of_another_rank_ends_the_ranks_that_need_it_and_says_why(tmp_path: Path) -> None:
    script = _script(tmp_path, FSDP2, epochs=2)
    shards = tmp_path / "shards"
    first = _gang(tmp_path / "first", script, 4, stop_at=3, checkpoint=shards)
    assert end_together(first) == [75] * 4, _text(first)
    damaged = bytearray((shards / "rank-3.shard").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (shards / "rank-3.shard").write_bytes(damaged)
    step = {rank.page.get(Word.CHECKPOINT_STEP) for rank in first}.pop()
    last = _gang(tmp_path / "last", script, 2, restore={"kind": "checkpoint", "path": str(shards), "step": step})
    # whichever rank needs the damaged part
    wait_until(lambda: any(rank.process.exitcode == EXIT_NO_STATE for rank in last), "a rank has ended")
    (ended, *_) = [rank for rank in last if rank.process.exitcode == EXIT_NO_STATE]
    assert ended.page.get(Word.ERROR) == Error.STATE_UNREADABLE
    said = json.loads((ended.directory / f"rank-{ended.rank}.error.json").read_text())
    assert said["message"] == "cannot restore: the image of rank 3 is damaged: chunk 0 differs from its digest"
    for rank in last:
        rank.kill()
