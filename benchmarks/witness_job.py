"""A small job that records, outside the system, each step: when and where it did it, in which attempt, and its result.

Each rank appends one JSON object a step to FILE.RANK, and prints the step. The files are the record of the test or
benchmark: nothing of Ganger writes or reads them. Times are of the machine's monotonic clock, so those of all processes
compare.

Alone or as a gang of fixed size it has dropout, in single precision: any bit lost of its state shows. `--elastic` is in
double precision without dropout: with any number of ranks the same losses but for the order of sums.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import ganger
import torch
from torch import distributed, nn

STEPS_OF_EPOCH = 8
SAMPLES = 96
# Steps between two records of the weights.
WEIGHTS_EVERY = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", required=True)
    parser.add_argument("--steps", type=int, required=True, help="a multiple of 8")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how long a step takes, in place of a device")
    parser.add_argument("--hurry-once", default="", help="take no time once this file is there")
    options = parser.parse_args()

    torch.manual_seed(7)
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 or options.elastic:
        distributed.init_process_group("gloo")
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0 if options.elastic else 0.1))
    net.append(nn.Linear(16, 1))
    net.register_buffer("ballast", torch.zeros(1 << 18))
    if options.elastic:
        net = net.double()
    trained: Any = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False) if world > 1 else net
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
    kind = torch.float64 if options.elastic else torch.float32
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1), dtype=kind)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True))

    attach: Any = ganger.attach
    job = attach(model=net, optimizer=optimizer)
    loader = job.dataloader(data, global_batch=SAMPLES // STEPS_OF_EPOCH, shuffle=True)
    page = Path(os.environ["GANGER_PAGE"])
    place = {
        "attempt": int(page.parent.name),
        "node": page.parents[2].name,
        "devices": [int(device) for device in os.environ["GANGER_DEVICES"].split(",")],
        "rank": rank,
        "world": world,
    }
    record = os.open(f"{options.record}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for epoch in job.epochs(options.steps // STEPS_OF_EPOCH):
        for chosen, x, y in loader:
            began = time.monotonic_ns()
            loss: Any = nn.functional.mse_loss(trained(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not (options.hurry_once and os.path.exists(options.hurry_once)):
                time.sleep(options.step_seconds)
            step = job.step_count + 1
            line = {"step": step, "epoch": epoch, "loss": float(loss).hex(), "samples": chosen.tolist(), **place}
            line["weights"] = weights_of(net) if step % WEIGHTS_EVERY == 0 else ""
            # the last thing before the boundary: whatever is done after it is the next step's
            line.update(began=began, ended=time.monotonic_ns())
            os.write(record, (json.dumps(line) + "\n").encode())
            print(f"step {step}", flush=True)
            job.step(loss)


def weights_of(net: Any) -> str:
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
