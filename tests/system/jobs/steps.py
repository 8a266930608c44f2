"""A small job for system tests: trains a little model and tells, outside the system, each step it did.

Appends one line per step to FILE.RANK: `step loss-as-hex pid`, and at the end `done sha256-of-weights pid`. The file is
the test harness's own record: nothing of Ganger writes or reads it. With FILE in STEPS_RECORD, not in its command, a
job is slow until there is FILE.go.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import ganger
import torch
from torch import nn


def main() -> None:
    known = os.environ.get("STEPS_RECORD", "")
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--record", default=known, required=not known)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how long a step takes, in place of a device")
    go = f"{known}.go" if known else ""
    parser.add_argument("--slow-until", default=go, help="take tenths of a second a step until this file is there")
    parser.add_argument("--computes", type=float, default=0.0, help="CPU seconds of a slow step")
    parser.add_argument("--waits", type=float, default=0.1, help="how long a slow step takes besides")
    parser.add_argument(
        "--jealous", action="store_true", help="be slow only while no other jealous job of its device is"
    )
    parser.add_argument("--homesick", action="store_true", help="take three times as long where it did not begin")
    parser.add_argument("--close-knit", action="store_true", help="take three times as long on several nodes")
    parser.add_argument("--reads", default="", help="a file that a slow step reads as a whole")
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--state-megabytes", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(7)
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    net: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    if options.state_megabytes:
        net.register_buffer("ballast", torch.zeros(options.state_megabytes << 18))
    trained = nn.parallel.DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
    inputs = torch.randn(64 * world, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

    job = ganger.attach(model=net, optimizer=optimizer)
    loader = job.dataloader(data, global_batch=8 * world, shuffle=True)
    record = f"{options.record}.{os.environ.get('RANK', '0')}"
    is_away = options.homesick and not is_at_home(options.record)
    is_apart = options.close_knit and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    slower = 3 if is_away or is_apart else 1
    for _ in job.epochs(options.steps // 8):
        for x, y in loader:
            loss = nn.functional.mse_loss(trained(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            is_slow = options.slow_until and not os.path.exists(options.slow_until)
            # the ranks of a gang come to a boundary one after the other, as with real stragglers
            waits = slower * (options.waits + 0.1 * int(os.environ.get("RANK", "0")))
            with device_lock(options.record) if options.jealous and is_slow else nullcontext():
                compute(options.computes if is_slow else 0.0)
                read(options.reads if is_slow else "")
                time.sleep(waits if is_slow else options.step_seconds)
            with open(record, "a") as out:
                out.write(f"{job.step_count + 1} {float(loss).hex()} {os.getpid()}\n")
            if job.step_count + 1 == options.fail_at:
                os._exit(3)
            job.step(loss)
    weights = hashlib.sha256()
    for tensor in net.state_dict().values():
        weights.update(tensor.numpy().tobytes())
    with open(record, "a") as out:
        out.write(f"done {weights.hexdigest()} {os.getpid()}\n")


def compute(seconds: float) -> None:
    """Has its device busy for so long, if it has it to itself."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def read(path: str) -> None:
    if path:
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


@contextmanager
def device_lock(record: str) -> Iterator[None]:
    """Hold a lock that jobs with records in the same directory have in common while they run on the same device."""
    with open(os.path.join(os.path.dirname(record), f"device-{os.environ['GANGER_DEVICES']}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_at_home(record: str) -> bool:
    """Whether it runs on the node on which it ran first."""
    home, here = f"{record}.home", os.path.dirname(os.path.realpath(os.environ["GANGER_JOB_DIR"]))
    if not os.path.exists(home):
        with open(home, "w") as out:
            out.write(here)
    with open(home) as known:
        return known.read() == here


if __name__ == "__main__":
    main()
