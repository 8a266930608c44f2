"""B25. Epochs against the size of a mini-batch, with a parameter server and without (Yu, University of Virginia, 2021,
figure 4: an epoch of AlexNet with one parameter server and one worker takes 330 s with batches of 16 and 49 s with 128,
without them 5 to 8 s whatever the batch).

Set-up: real programs on this machine, as it is while the experiment runs. A master and a daemon run one job after the
other: `examples/parameter_server/train.py` with one server and one worker, and the same network alone in one process.
The network is a small AlexNet of 2.2 million parameters for images of 32 x 32, of which an epoch has 1,024. Gradients
and parameters cross the loopback of one machine after each mini-batch, where the report's crossed a network; the
processors compute, one core for each program. The worker notes when each epoch begins; the first one, in which caches
fill, does not count, and of the others the median does. Compared are ratios: how many times an epoch with batches of 16
takes that with 128, with a server and without.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.bench_cluster import BenchCluster
from experiments.experiment import CoreUse, Experiment, MeasuredRows, Row, Setting

_BATCHES = (16, 32, 64, 128)
_EPOCHS, _LONGEST_S = 4, 300.0
_EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "parameter_server"
# Its marks: when an epoch begins. The last one ends with the job.
_JOB = f"""
import argparse, sys, time
sys.path.insert(0, {str(_EXAMPLE)!r})
import ganger, torch, train
from torch import nn
from torch.utils.data import TensorDataset

IMAGES, MARKS, BATCH = 1024, sys.argv.pop(), int(sys.argv[sys.argv.index("--batch") + 1])

def make_network():
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )
    steps = iter(range(1 << 60))

    def mark(*_):
        if next(steps) % (IMAGES // BATCH) == 0:
            with open(MARKS, "a") as file:
                file.write(f"{{time.perf_counter()}}\\n")

    network.register_forward_pre_hook(mark)
    return network

def load_data():
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (IMAGES,), generator=random)
    return TensorDataset(torch.randn(IMAGES, 3, 32, 32, generator=random), labels, torch.arange(IMAGES))

def alone(arguments):
    torch.set_num_threads(1)
    network = make_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    job = ganger.attach(model=network, optimizer=optimizer, seed=0)
    loader = job.dataloader(load_data(), global_batch=BATCH, shuffle=True, drop_last=True)
    for _ in job.epochs(arguments.epochs):
        for images, labels, _ in loader:
            loss = nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.step(loss)

if "--servers" in sys.argv:
    # Digests of all parameters in each step are for tests of the example.
    train.make_network, train.load_data, train.digest = make_network, load_data, lambda network: ""
    train.main()
else:
    alone(train.parse_arguments())
"""


def parts(setting: Setting) -> Sequence[Row]:
    # One after the other: they would slow each other.
    return [{"epochs": 3 if setting.is_quick else _EPOCHS}]


def measure(setting: Setting, part: Row) -> Sequence[Row]:
    with BenchCluster(nodes=1, gpus=1, cores=2) as cluster:
        return [
            {"batch": batch, "is_served": is_served, "epoch_s": epoch_s(cluster, batch, is_served, part["epochs"])}
            for batch in _BATCHES
            for is_served in (True, False)
        ]


def epoch_s(cluster: BenchCluster, batch: int, is_served: bool, epochs: int) -> float:
    """Run a job of so many epochs, two at least, and one; return the median seconds of all but the first and last."""
    name = f"{'served' if is_served else 'alone'}-{batch}"
    script, marks = cluster.directory / "alexnet.py", cluster.directory / f"{name}.marks"
    script.write_text(_JOB)
    words = [sys.executable, str(script), "--epochs", str(epochs + 1), "--batch", str(batch)]
    worker = {"name": "worker", "tasks": 1, "gpus": 1, "cpus": 1, "memory": "2G"}
    server = {"name": "ps", "tasks": 1, "cpus": 1, "memory": "2G"}
    description = {
        "name": name,
        "command": [*words, *(("--servers", "1") if is_served else ()), str(marks)],
        "roles": [server, worker] if is_served else [worker],
    }
    file = cluster.directory / f"{name}.yaml"
    file.write_text(json.dumps(description))
    job = cluster.ganger("submit", "--file", str(file)).split()[-1]

    def has_ended() -> bool:
        return str(json.loads(cluster.ganger("show", job, "--json"))["state"]) not in ("PENDING", "HOLDING")

    cluster.until(has_ended, _LONGEST_S, f"{name} has ended")
    begins = [float(line) for line in marks.read_text().split()] if marks.exists() else []
    if len(begins) != epochs + 1:
        raise RuntimeError(f"{name}: {len(begins)} of {epochs + 1} epochs: {cluster.ganger('logs', job)[-2000:]}")
    return median([after - before for before, after in pairwise(begins[1:])])


def conclude(rows: Sequence[Row]) -> MeasuredRows:
    seconds = {(row["batch"], row["is_served"]): row["epoch_s"] for row in rows}
    smallest, largest = min(_BATCHES), max(_BATCHES)
    ours = {
        "served_16_over_128": seconds[smallest, True] / seconds[largest, True],
        "alone_16_over_128": seconds[smallest, False] / seconds[largest, False],
        "served_over_alone_at_16": seconds[smallest, True] / seconds[smallest, False],
        "served_over_alone_at_128": seconds[largest, True] / seconds[largest, False],
        **{
            f"{'served' if is_served else 'alone'}_epoch_s_at_{batch}": epoch
            for (batch, is_served), epoch in seconds.items()
        },
    }
    return MeasuredRows(
        ours,
        seeds=1,
        why="directional: a loopback carries what the report's network did. With a server each mini-batch costs an "
        f"exchange: an epoch takes {ours['served_over_alone_at_16']:.1f} times as long with batches of 16 and "
        f"{ours['served_over_alone_at_128']:.1f} times with 128. Without one it falls, too, by "
        f"{ours['alone_16_over_128']:.1f} times, where the report's is flat: a processor reads and updates all "
        "parameters for each mini-batch, which its GPUs hardly notice",
    )


SERVER_EPOCHS = Experiment("B25", parts, measure, conclude, core=CoreUse.WHOLE)
