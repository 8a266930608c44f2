"""`ganger bench boundary`: what a boundary costs while nothing is ordered, and how fast and exactly a gang stops.

The gangs have stragglers, read the loss every ten steps, and are spread over nodes whose relay is slowed down; every
stop must find all ranks at one step, and none may run over it or wait for ever. And how long a re-pin to other cores
takes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from ganger.injob.page import Page, page_path
from ganger.injob.page_layout import PageOrderKind, PageParkLevel, Word

from benchmarks.bench_gang import LEVELS, BenchGang, StopSample, StuckError
from benchmarks.repin import measure_repin
from benchmarks.report import BenchReport, quantile

HOOK_LIMIT_MICROSECONDS = 0.5
ZERO_LINE_LIMIT_MICROSECONDS = 3.0
SLACK_S = 0.015
RESUME_SLACK_S = 0.020
HOOK_ROUNDS = 101
REPINS = 200
QUICK_CYCLES = 4
# Ranks, nodes, relay delay one way in seconds, cycles.
GANGS = ((2, 1, 0.0, 80), (2, 2, 0.005, 60), (4, 2, 0.010, 60))

# What is compared runs in turn, in many short rounds, and CPU time is counted: other load on the machine stretches the
# wall clock of a round, and slow spells of a core hit both sides alike. The figure is the median of the differences.
# The agent changes PyTorch for its whole process, so the zero-line form is a fork beside its parent, in turn with it.
HOOKS = """
import gc, json, os, statistics, sys, time
import torch
torch.set_num_threads(1)
ROUNDS = int(sys.argv[2])

def empty(): pass

def one(call, calls):
    begin = time.process_time_ns()
    for _ in range(calls): call()
    return (time.process_time_ns() - begin) / calls / 1000

def cost(call, calls=5_000):
    one(call, calls), one(empty, calls)
    return [one(call, calls) - one(empty, calls) for _ in range(ROUNDS)]

class Still(torch.optim.Optimizer):
    def __init__(self): super().__init__([torch.nn.Parameter(torch.zeros(1))], {})
    def step(self, closure=None): pass

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 2_000
    def __getitem__(self, index): return index

def make_loop():
    loader, step = torch.utils.data.DataLoader(Numbers(), batch_size=None), Still().step
    def loop():
        begin = time.process_time_ns()
        for _ in loader: step()
        return (time.process_time_ns() - begin) / 2_000 / 1000
    return loop

gc.disable()
if sys.argv[1] == "attached":
    import ganger
    job = ganger.attach()
    print(json.dumps({"boundary": cost(job._control.boundary), "five_line": cost(job.step)}))
else:
    turn, back = os.pipe(), os.pipe()
    if os.fork() == 0:
        from ganger.injob.bootstrap import arm
        arm()
        loop = make_loop()
        loop()
        while os.read(turn[0], 1) == b"t":
            os.write(back[1], (repr(loop()) + "\\n").encode())
        os._exit(0)
    os.close(back[1])  # so that the child's death ends the wait for its answer
    loop, answers, differences = make_loop(), os.fdopen(back[0]), []
    loop()
    for _ in range(ROUNDS):
        without = loop()
        os.write(turn[1], b"t")
        differences.append(float(answers.readline()) - without)
    os.write(turn[1], b"e")
    os.wait()
    print(json.dumps({"zero_line": differences}))
"""


def main(cycles: int = 0, quick: bool = False) -> dict[str, object]:
    """Run it; `cycles` per gang instead of the usual number, which `quick` makes a few."""
    report = BenchReport("boundary")
    if quick:
        cycles = cycles or QUICK_CYCLES
    with tempfile.TemporaryDirectory(prefix="ganger-bench-", dir=_tmpfs()) as directory:
        _measure_hooks(report, Path(directory), HOOK_ROUNDS // 4 if quick else HOOK_ROUNDS)
        measure_repin(report, REPINS // 10 if quick else REPINS)
        seed = random.SystemRandom().randrange(1 << 30)
        report.figure("seed", seed)
        for number, (ranks, nodes, delay, usual) in enumerate(GANGS):
            place = Path(directory) / f"gang-{number}"
            place.mkdir()
            _measure_gang(report, place, ranks, nodes, delay, cycles or usual, seed + number)
    return report.result()


def _measure_hooks(report: BenchReport, directory: Path, rounds_each: int) -> None:
    for form in ("attached", "plain"):
        report.say(f"hook cost, {form} form")
        place = directory / form
        place.mkdir()
        page = Page.create(page_path(str(place), 0), epoch=1, rank=0, world=1)
        page.write_order(1, PageOrderKind.RUN)
        environment = {**os.environ, "GANGER_PAGE": page.path, "GANGER_JOB_DIR": str(place), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", HOOKS, form, str(rounds_each)],
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
    report: BenchReport, directory: Path, ranks: int, nodes: int, delay: float, cycles: int, seed: int
) -> None:
    name = f"ranks{ranks}_nodes{nodes}"
    dice = random.Random(seed)
    stops: list[StopSample] = []
    report.say(f"{ranks} ranks on {nodes} nodes, relay {delay * 1000:g} ms: starting")
    stuck = ""
    try:
        with BenchGang(directory, ranks, nodes, delay, seed) as gang:
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
            "resume_seconds": stop.resume_s,
            "longest_batch_seconds": stop.longest_batch_s,
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
    paused = [stop for stop in stops if stop.level == PageParkLevel.PAUSE]
    # The limit of each cycle is its own longest mini-batch, so what is judged is the excess over it.
    for share, factor in ((0.5, 1.5), (0.99, 2.0)):
        excess = [stop.seconds - factor * stop.longest_batch_s - 2 * delay for stop in paused]
        report.at_most(
            f"{name}_suspend_p{share * 100:g}_over_batches_milliseconds",
            1000 * quantile(excess, share),
            1000 * SLACK_S,
        )
        report.figure(
            f"{name}_suspend_p{share * 100:g}_milliseconds", 1000 * quantile([s.seconds for s in paused], share)
        )
    report.figure(f"{name}_longest_batch_p50_milliseconds", 1000 * quantile([s.longest_batch_s for s in paused], 0.5))
    offloaded = [stop for stop in stops if stop.level == PageParkLevel.OFFLOAD]
    if offloaded:
        # To the end of the first step: that step's own time is not the resume's.
        waits = [stop.resume_s - stop.batch_after_s for stop in offloaded]
        report.at_most(f"{name}_resume_offload_p50_milliseconds", 1000 * quantile(waits, 0.5), 1000 * RESUME_SLACK_S)


def _tmpfs() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
