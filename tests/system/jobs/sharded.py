"""A job for system tests whose model is sharded by FSDP2 over tensor parallelism, on a mesh of N/2 x 2 ranks.

Each rank appends `step loss-as-hex pid` to FILE.RANK, the loss being that of the whole batch, and at the end
`done sum-of-all-weights-as-hex pid`. In double precision: with any number of ranks the same losses but for the order
of sums. The files are the test harness's own record: nothing of Ganger writes or reads them.
"""

from __future__ import annotations

import argparse
import os
import time

import ganger
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--slow-until", default="", help="take tenths of a second a step until this file is there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(64, 258), nn.Tanh(), nn.Linear(258, 64), nn.LayerNorm(64)).double()
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net[0], mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    inputs = torch.randn(48, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    job = ganger.attach(model=net, optimizer=optimizer)
    loader = job.dataloader(inputs, global_batch=8, shuffle=True, mesh=mesh["dp"])
    with open(f"{options.record}.{rank}", "a", buffering=1) as record:
        for _ in job.epochs(options.epochs):
            for x in loader:
                loss = nn.functional.mse_loss(net(x), x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                whole = loss.detach().clone()
                distributed.all_reduce(whole, group=mesh["dp"].get_group())
                if options.slow_until and not os.path.exists(options.slow_until):
                    time.sleep(0.1)
                record.write(f"{job.step_count + 1} {(whole / mesh['dp'].size()).item().hex()} {os.getpid()}\n")
                job.step(loss)
        total = sum(parameter.full_tensor().sum().item() for parameter in net.parameters())
        record.write(f"done {total.hex()} {os.getpid()}\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
