"""`ganger bench boundary`: what a boundary costs while nothing is ordered, and how fast and exactly a gang stops.

The gangs have stragglers, read the loss every ten steps, and are spread over nodes whose relay is slowed down; every
stop must find all ranks at one step, and none may run over it or wait for ever.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from ganger.injob.page import Level, Order, Page, Word
from ganger.injob.pages import page_path

from ganger_daemon.bench_gang import LEVELS, Gang, Stop, StuckError
from ganger_daemon.bench_report import Report, quantile

HOOK_LIMIT_MICROSECONDS = 0.5
ZERO_LINE_LIMIT_MICROSECONDS = 3.0
SLACK_SECONDS = 0.015
RESUME_SLACK_SECONDS = 0.020
# ranks, nodes, relay delay one way in seconds, cycles
GANGS = ((2, 1, 0.0, 80), (2, 2, 0.005, 60), (4, 2, 0.010, 60))

# The five-line form: rounds that alternate between the hook and an empty call. The zero-line form: a loop over a loader
# whose optimizer does nothing, first without the agent and then with it, because it finds its boundary between the two.
HOOKS = """
import json, statistics, sys, time
import torch
torch.set_num_threads(1)
ROUNDS = 9

def empty(): pass

def cost(call, calls=50_000):
    def one(f):
        begin = time.perf_counter_ns()
        for _ in range(calls): f()
        return (time.perf_counter_ns() - begin) / calls / 1000
    one(call), one(empty)
    return [one(call) - one(empty) for _ in range(ROUNDS)]

class Still(torch.optim.Optimizer):
    def __init__(self): super().__init__([torch.nn.Parameter(torch.zeros(1))], {})
    def step(self, closure=None): pass

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 20_000
    def __getitem__(self, index): return index

def loop():
    loader, step, rounds = torch.utils.data.DataLoader(Numbers(), batch_size=None), Still().step, []
    for _ in range(ROUNDS):
        begin = time.perf_counter_ns()
        for _ in loader: step()
        rounds.append((time.perf_counter_ns() - begin) / 20_000 / 1000)
    return rounds

if sys.argv[1] == "attached":
    import ganger
    job = ganger.attach()
    print(json.dumps({"boundary": cost(job._control.boundary), "five_line": cost(job.step)}))
else:
    from ganger.injob.arm import arm
    without = statistics.median(loop())
    arm()
    print(json.dumps({"zero_line": [value - without for value in loop()]}))
"""


def main(cycles: int = 0) -> dict[str, object]:
    """Run it; `cycles` per gang instead of the usual number."""
    report = Report("boundary")
    with tempfile.TemporaryDirectory(prefix="ganger-bench-", dir=_tmpfs()) as directory:
        _measure_hooks(report, Path(directory))
        seed = random.SystemRandom().randrange(1 << 30)
        report.figure("seed", seed)
        for number, (ranks, nodes, delay, usual) in enumerate(GANGS):
            place = Path(directory) / f"gang-{number}"
            place.mkdir()
            _measure_gang(report, place, ranks, nodes, delay, cycles or usual, seed + number)
    return report.result()


def _measure_hooks(report: Report, directory: Path) -> None:
    for form in ("attached", "plain"):
        report.say(f"hook cost, {form} form")
        place = directory / form
        place.mkdir()
        page = Page.create(page_path(str(place), 0), epoch=1, rank=0, world=1)
        page.write_order(1, Order.RUN)
        environment = {**os.environ, "GANGER_PAGE": page.path, "GANGER_JOB_DIR": str(place), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", HOOKS, form],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        passed = page.get(Word.STEP)
        page.close()
        if done.returncode or not passed:
            why = done.stderr[-2000:] or "no boundary was seen in the page"
            raise RuntimeError(f"the {form} form could not be measured: {why}")
        measured: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
        for name, rounds in measured.items():
            limit = ZERO_LINE_LIMIT_MICROSECONDS if name == "zero_line" else HOOK_LIMIT_MICROSECONDS
            report.samples({"hook": name, "microseconds": value} for value in rounds)
            report.at_most(f"{name}_microseconds", quantile(rounds, 0.5), limit)


def _measure_gang(
    report: Report, directory: Path, ranks: int, nodes: int, delay: float, cycles: int, seed: int
) -> None:
    name = f"ranks{ranks}_nodes{nodes}"
    dice = random.Random(seed)
    stops: list[Stop] = []
    report.say(f"{ranks} ranks on {nodes} nodes, relay {delay * 1000:g} ms: starting")
    stuck = ""
    try:
        with Gang(directory, ranks, nodes, delay, seed) as gang:
            for cycle in range(cycles):
                gang.train(dice.uniform(0.005, 0.08))
                stops.append(gang.stop_and_go(LEVELS[cycle % len(LEVELS)], dice.uniform(0.001, 0.01)))
                if (cycle + 1) % 20 == 0:
                    report.say(f"{ranks} ranks on {nodes} nodes: {cycle + 1} of {cycles} cycles")
    except StuckError as error:
        stuck = str(error)
        report.say(stuck)
    report.samples(
        {
            "gang": name,
            "level": stop.level,
            "suspend_seconds": stop.seconds,
            "resume_seconds": stop.resume_seconds,
            "longest_batch_seconds": stop.longest_batch_seconds,
            "skew_steps": stop.skew_steps,
            "overrun_steps": stop.overrun_steps,
        }
        for stop in stops
    )
    report.at_least(f"{name}_cycles", len(stops), cycles)
    report.at_most(f"{name}_deadlocks", bool(stuck), 0)
    if not stops:
        return
    report.at_most(f"{name}_skew_steps", max(stop.skew_steps for stop in stops), 0)
    report.at_most(f"{name}_overrun_steps", max(stop.overrun_steps for stop in stops), 0)
    paused = [stop for stop in stops if stop.level == Level.PAUSE]
    # the limit of each cycle is its own longest mini-batch, so what is judged is the excess over it
    for share, factor in ((0.5, 1.5), (0.99, 2.0)):
        excess = [stop.seconds - factor * stop.longest_batch_seconds - 2 * delay for stop in paused]
        report.at_most(
            f"{name}_suspend_p{share * 100:g}_over_batches_milliseconds",
            1000 * quantile(excess, share),
            1000 * SLACK_SECONDS,
        )
        report.figure(
            f"{name}_suspend_p{share * 100:g}_milliseconds", 1000 * quantile([s.seconds for s in paused], share)
        )
    report.figure(
        f"{name}_longest_batch_p50_milliseconds", 1000 * quantile([s.longest_batch_seconds for s in paused], 0.5)
    )
    offloaded = [stop for stop in stops if stop.level == Level.OFFLOAD]
    if offloaded:
        # to the end of the first step: that step's own time is not the resume's
        waits = [stop.resume_seconds - stop.batch_after_seconds for stop in offloaded]
        report.at_most(
            f"{name}_resume_offload_p50_milliseconds", 1000 * quantile(waits, 0.5), 1000 * RESUME_SLACK_SECONDS
        )


def _tmpfs() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
