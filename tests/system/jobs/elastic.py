"""An elastic job for system tests: each rank appends what it did in each step to FILE.RANK, one JSON object a line.

In double precision, without dropout or batch statistics: with any number of ranks the same losses but for the order of
sums. The files are the test harness's own record: nothing of Ganger writes or reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import ganger
import torch
from torch import distributed, nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--slow-until", default="", help="take a while for each step until this file is there")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="how long such a step takes one rank alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    net.register_buffer("ballast", torch.zeros(1 << 18, dtype=torch.float64))
    ranks = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(torch.arange(96), inputs, inputs.sum(1, keepdim=True))
    job = ganger.attach(model=net, optimizer=optimizer)
    loader = job.dataloader(data, global_batch=12, shuffle=True)
    with open(f"{options.record}.{rank}", "a", buffering=1) as record:
        for epoch in job.epochs(options.epochs):
            for chosen, x, y in loader:
                loss = nn.functional.mse_loss(ranks(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if options.slow_until and not os.path.exists(options.slow_until):
                    # as on devices that each take their part of the batch
                    time.sleep(options.step_seconds / world)
                line = {"step": job.step_count + 1, "epoch": epoch, "rank": rank, "world": world, "loss": loss.item()}
                record.write(json.dumps({**line, "samples": chosen.tolist()}) + "\n")
                job.step(loss)


if __name__ == "__main__":
    main()
