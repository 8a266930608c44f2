"""Gangs of four under DistributedDataParallel: sums of more than two numbers depend on their order."""

from __future__ import annotations

from pathlib import Path

import pytest
from ganger.training import gradient_buckets
from training.harness import Rank, run_gang_in_parts, write_script

pytestmark = pytest.mark.torch

TRAINING = """
import hashlib, os, torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
torch.manual_seed(3)
distributed.init_process_group("gloo")
net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
model = nn.parallel.DistributedDataParallel(net, {wrapped})
{hook}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(96, 32))
{loader}
for (x,) in loader:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters())).hexdigest()
    print("loss", loss.item().hex(), digest, flush=True)
    {end}
"""
PLAIN = {"loader": "loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))", "end": "pass"}
ATTACHED = {
    "loader": "import ganger\njob = ganger.attach(model=net, optimizer=optimizer)\n"
    "loader = job.dataloader(data, global_batch=8, shuffle=True)",
    "end": "job.step(loss)",
}
HOOK = """
def halves(state, bucket):
    summed = distributed.all_reduce(bucket.buffer().div_(4), async_op=True).get_future()
    return summed.then(lambda done: done.value()[0])
model.register_comm_hook(None, halves)
"""


@pytest.mark.parametrize(
    ("form", "wrapped", "hook"),
    [
        pytest.param(PLAIN, "bucket_cap_mb=0.005", "", id="plain, several buckets"),
        pytest.param(ATTACHED, "gradient_as_bucket_view=True", HOOK, id="attached, with a hook"),
        pytest.param(PLAIN, "find_unused_parameters=True", "", id="an order that never changes"),
    ],
)
def test_four_ranks_that_go_on_in_new_processes_add_their_gradients_in_the_same_order(
    tmp_path: Path, form: dict[str, str], wrapped: str, hook: str
) -> None:
    script = write_script(tmp_path, TRAINING.format(wrapped=wrapped, hook=hook, **form))
    (alone,) = run_gang_in_parts(tmp_path / "alone", script, [], [], world=4)
    parts = run_gang_in_parts(tmp_path / "parts", script, [], [1, 4, 8], world=4)
    for rank in range(4):
        assert [line for part in parts for line in results(part[rank])] == results(alone[rank])


def test_in_a_version_of_pytorch_without_what_is_needed_no_order_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    class OlderWrapper:
        find_unused_parameters = static_graph = False

    wrapper = OlderWrapper()
    monkeypatch.setattr(gradient_buckets, "_wrappers", {wrapper})
    assert gradient_buckets.bucket_orders() == []


def results(rank: Rank) -> list[str]:
    return [line for line in rank.output().splitlines() if line.startswith("loss")]
