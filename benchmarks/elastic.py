"""`ganger bench elastic`: a training that grows from one GPU to four and shrinks back, again and again.

A real master, a daemon with four virtual GPUs, a real job with DistributedDataParallel. Every rank writes down each
step it did, with its loss and its samples; another run of the same job with one GPU and as large a global batch says
what they must be. How fast a shrink gives its GPUs back is read from the control pages and from the master's history.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from ganger.injob.page import Page, now_ns
from ganger.injob.page_access import PageError
from ganger.injob.page_layout import PageOrderKind, PageState, Word

from benchmarks.bench_cluster import START_S, BenchCluster, BenchClusterError
from benchmarks.report import BenchReport, quantile
from benchmarks.switch_timing import Watch

GPUS = 4
ROUNDS = 4
SAMPLES = 1152
BATCH = 48
STATE_MEGABYTES = 32
# Between two changes of size, so that each is seen to train.
STEPS_BETWEEN = 20
# After the last change: so far ahead that every rank hears in time where to end.
EPOCHS_AFTER = 20
MOST_EPOCHS = 1_000_000
END_S = 300.0
RESIZE_S = 120.0
# Beside one boundary (two mini-batches of a gang at most) and the copy: reports, commits, looks at memory.
SLACK_S = 0.3
LARGEST_LOSS_BILLIONTHS = 1.0

# Neither dropout nor batch statistics, in double precision: what is left of a difference is the order of sums.
JOB = """
import json, os, sys, time
import torch
from torch import distributed, nn
import ganger
torch.set_num_threads(1)
torch.manual_seed(1)
distributed.init_process_group("gloo")
record, last, epochs, samples, batch, megabytes = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
rank, world = distributed.get_rank(), distributed.get_world_size()
net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).double()
net.register_buffer("ballast", torch.zeros(megabytes << 17, dtype=torch.float64))
# its buffer never changes: nothing to broadcast in every step
ranks = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
inputs = torch.randn(samples, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
data = torch.utils.data.TensorDataset(torch.arange(samples), inputs, inputs.square().mean(1, keepdim=True))
job = ganger.attach(model=net, optimizer=optimizer)
loader = job.dataloader(data, global_batch=batch, shuffle=True)
clock = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME)
with open(f"{record}.{rank}", "a", buffering=1) as notes:
    for epoch in job.epochs(epochs):
        if os.path.exists(last) and epoch > int(open(last).read()):
            break
        for chosen, x, y in loader:
            begin = clock()
            loss = nn.functional.mse_loss(ranks(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not os.path.exists(last):
                time.sleep(0.01)
            line = {"step": job.step_count + 1, "epoch": epoch, "rank": rank, "world": world, "loss": loss.item(),
                    "samples": chosen.tolist(), "begin": begin, "end": clock()}
            notes.write(json.dumps(line) + "\\n")
            job.step(loss)
"""


@dataclass(frozen=True, slots=True)
class ResizeStep:
    step: int
    epoch: int
    rank: int
    world: int
    loss: float
    samples: Sequence[int]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Resize:
    """One change, in seconds. `pause`: end of the last step of the old world to end of the first of the new one. Of a
    shrink, by its pages: `stop` from the order to all ranks at the boundary, `copy` until their state is off the
    devices; and by the master: `free` from the order until others may have what it gave back. `longest_step` of the old
    world."""

    ranks: int
    becomes: int
    pause: float
    stop: float
    copy: float
    free: float
    longest_step: float


def main(rounds: int = ROUNDS, quick: bool = False) -> dict[str, object]:
    """Run it, so many times from one GPU to all and back; `quick`: once."""
    rounds = 1 if quick else rounds
    report = BenchReport("elastic")
    with BenchCluster(nodes=1, gpus=GPUS, cores=GPUS, memory="16G", daemon=("--topology", str(GPUS))) as cluster:
        (cluster.directory / "train.py").write_text(JOB)
        job = _submit(cluster, "elastic", f"1:{GPUS}")
        resizes = [
            one
            for number in range(rounds)
            for one in _there_and_back(cluster, job, report, f"round {number + 1} of {rounds}")
        ]
        epochs = _steps(cluster, "elastic")[-1].epoch + EPOCHS_AFTER
        _end_after(cluster, "elastic", epochs - 1)
        _wait(cluster, job)
        steps = _steps(cluster, "elastic")
        report.say(f"a run of {epochs} epochs that never changes its size")
        _end_after(cluster, "alone", epochs - 1)
        _wait(cluster, _submit(cluster, "alone", "1"))
        alone = _steps(cluster, "alone")
    report.samples({"resize": asdict(one)} for one in resizes)
    report.samples(asdict(step) for step in [*alone, *steps])
    _judge(report, alone, steps, resizes, epochs)
    return report.result()


def _judge(
    report: BenchReport,
    alone: Sequence[ResizeStep],
    steps: Sequence[ResizeStep],
    resizes: Sequence[Resize],
    epochs: int,
) -> None:
    whole, expected = _by_step(steps), _by_step(alone)
    count = epochs * -(-SAMPLES // BATCH)
    report.figure("changes_of_size", len(resizes))
    report.figure("steps", len(whole))
    report.at_most("steps_missing", count - len(whole), 0)
    # Of each step, every rank of one world, once.
    odd = [step for step, ranks in whole.items() if sorted(one.rank for one in ranks) != list(range(ranks[0].world))]
    report.at_most("steps_not_done_once_by_every_rank", len(odd), 0)
    taken = [(one.epoch, sample) for ranks in whole.values() for one in ranks for sample in one.samples]
    report.at_most("samples_taken_twice", len(taken) - len(set(taken)), 0)
    report.at_most("samples_never_taken", epochs * SAMPLES - len(set(taken)), 0)
    moved = [step for step in whole if _samples(whole[step]) != _samples(expected[step])]
    report.at_most("steps_with_other_samples_than_alone", len(moved), 0)
    differences = [abs(_loss(whole[step]) / _loss(expected[step]) - 1) for step in whole]
    report.at_most("largest_difference_of_a_loss_in_billionths", 1e9 * max(differences), LARGEST_LOSS_BILLIONTHS)
    for name, chosen in (("grow", [r for r in resizes if r.becomes > r.ranks]), ("shrink", _shrinks(resizes))):
        report.figure(f"{name}_pause_p50_milliseconds", 1e3 * quantile([one.pause for one in chosen], 0.5))
        report.figure(f"{name}_pause_max_milliseconds", 1e3 * max(one.pause for one in chosen))
    for part in ("stop", "copy", "free"):
        figure = f"shrink_{part}_p50_milliseconds"
        report.figure(figure, 1e3 * quantile([getattr(one, part) for one in _shrinks(resizes)], 0.5))
    over = [one.free - one.copy - 2 * one.longest_step for one in _shrinks(resizes)]
    report.at_most("shrink_free_beyond_boundary_and_copy_p50_seconds", quantile(over, 0.5), SLACK_S)


def _there_and_back(cluster: BenchCluster, job: str, report: BenchReport, text: str) -> list[Resize]:
    done = []
    for ranks, becomes in ((1, GPUS), (GPUS, 1)):
        report.say(f"{text}: from {ranks} to {becomes}")
        before = _steps(cluster, "elastic")
        wanted = (before[-1].step if before else 0) + STEPS_BETWEEN
        cluster.until(lambda: _last(cluster) >= wanted, START_S, f"{job} does step {wanted}")  # noqa: B023
        done.append(_resize(cluster, job, ranks, becomes))
    return done


def _resize(cluster: BenchCluster, job: str, ranks: int, becomes: int) -> Resize:
    (directory,) = {path.parent for path in cluster.pages().values()}
    watch = _Watch([directory / f"rank-{rank}.page" for rank in range(ranks)])
    with watch:
        cluster.ganger("resize", job, str(becomes), "--timeout", f"{RESIZE_S:g}s")
        cluster.until(lambda: not directory.exists(), RESIZE_S, "the old world is gone")
    steps = [step for step in _steps(cluster, "elastic") if step.rank == 0]
    first = next(number for number in range(len(steps) - 1, -1, -1) if steps[number].world != becomes) + 1
    old = [step for step in steps[max(0, first - STEPS_BETWEEN) : first] if step.world == ranks]
    seen = watch.times
    if ranks > becomes and not {"ordered", "stopped", "copied"} <= seen.keys():
        raise BenchClusterError(f"the pages of {job} showed only {sorted(seen)}")
    shrinks = ranks > becomes
    return Resize(
        ranks,
        becomes,
        pause=(steps[first].end - steps[first - 1].end) / 1e9,
        stop=(seen["stopped"] - seen["ordered"]) / 1e9 if shrinks else math.nan,
        copy=(seen["copied"] - seen["stopped"]) / 1e9 if shrinks else math.nan,
        free=_seconds_until_free(cluster, job) if shrinks else math.nan,
        longest_step=max(step.end - step.begin for step in old) / 1e9,
    )


def _seconds_until_free(cluster: BenchCluster, job: str) -> float:
    """By the master's clock, from the order to the commit that gave the devices back."""
    times = {
        str(event["kind"]): datetime.fromisoformat(str(event["time"])).timestamp()
        for event in json.loads(cluster.ganger("events", f"jobs/{job}", "--json"))
    }
    return times["gang_parked"] - times["resize_begun"]


class _Watch(Watch):
    """Notes when a stop shows in the pages of a world: the order, all ranks at the boundary, all states off the
    devices."""

    def __init__(self, pages: Sequence[Path]) -> None:
        super().__init__()
        self.times: dict[str, int] = {}
        self._paths = pages

    def look(self) -> None:
        try:
            pages = [Page.open(str(path), writable=False) for path in self._paths]
        except (OSError, PageError):
            return
        resting = (PageState.PAUSED, PageState.SAVING, PageState.OFFLOADED, PageState.HANDED_OVER)
        while self.goes_on():
            states = [page.get(Word.STATE) for page in pages]
            if pages[0].get(Word.ORDER) == PageOrderKind.STOP:
                self.times.setdefault("ordered", now_ns())
            if all(state in resting for state in states):
                self.times.setdefault("stopped", now_ns())
            if all(state in (PageState.OFFLOADED, PageState.HANDED_OVER) for state in states):
                self.times.setdefault("copied", now_ns())
        for page in pages:
            page.close()


def _end_after(cluster: BenchCluster, label: str, epoch: int) -> None:
    """Tells a training, which hurries from then on, its last epoch."""
    path = cluster.directory / f"{label}.last"
    path.with_suffix(".new").write_text(str(epoch))
    path.with_suffix(".new").rename(path)


def _wait(cluster: BenchCluster, job: str) -> None:
    def has_succeeded() -> bool:
        state = str(json.loads(cluster.ganger("show", job, "--json"))["state"])
        if state in ("FAILED", "CANCELLED"):
            raise BenchClusterError(f"job {job} is {state}: {cluster.ganger('history', job)}")
        return state == "SUCCEEDED"

    cluster.until(has_succeeded, END_S, f"job {job} has succeeded")


def _submit(cluster: BenchCluster, label: str, gpus: str) -> str:
    numbers = (MOST_EPOCHS, SAMPLES, BATCH, STATE_MEGABYTES)
    submitted = cluster.ganger(
        "submit",
        *(
            "--name",
            label,
            "--distributed",
            "--gpus",
            gpus,
            "--cpus-per-gpu",
            "1",
            "--memory",
            "1G",
            "--gpu-memory",
            "128M",
        ),
        *("--checkpoint-every", "never", "--directory", str(cluster.directory), "--json", "--"),
        *(sys.executable, "train.py", label, f"{label}.last", *map(str, numbers)),
    )
    return str(json.loads(submitted)["name"]).removeprefix("jobs/")


def _steps(cluster: BenchCluster, label: str) -> list[ResizeStep]:
    """Whole lines of all ranks, by step."""
    found = []
    for path in cluster.directory.glob(f"{label}.[0-9]*"):
        found += [ResizeStep(**json.loads(line)) for line in path.read_text().split("\n")[:-1]]
    return sorted(found, key=lambda step: (step.step, step.rank))


def _last(cluster: BenchCluster) -> int:
    return max((step.step for step in _steps(cluster, "elastic")), default=0)


def _by_step(steps: Sequence[ResizeStep]) -> dict[int, list[ResizeStep]]:
    found: dict[int, list[ResizeStep]] = {}
    for step in steps:
        found.setdefault(step.step, []).append(step)
    return found


def _samples(ranks: Sequence[ResizeStep]) -> list[int]:
    return sorted(sample for one in ranks for sample in one.samples)


def _loss(ranks: Sequence[ResizeStep]) -> float:
    """Of the whole batch: every rank has as many of its samples."""
    return sum(one.loss for one in ranks) / len(ranks)


def _shrinks(resizes: Sequence[Resize]) -> list[Resize]:
    return [one for one in resizes if one.becomes < one.ranks]
