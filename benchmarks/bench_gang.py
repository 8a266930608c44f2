"""A gang to measure: real PyTorch ranks under real control pages, on nodes that are directories of this machine, with a
relay between them that can be slowed down. What a daemon does for the boundary, and nothing else."""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ganger.injob.page import PageOrder, now_ns, page_path
from ganger.injob.page_layout import PageOrderKind, PageParkLevel, PageState, Word
from ganger.protocol.stop_rules import RelayedPoint
from ganger_daemon.gang.control_pages import ControlPages

POLL_S = 0.0002
START_S = 120.0
DEADLOCK_S = 30.0
STEPS = 1 << 18
"""Steps a rank can note; a run makes far fewer."""
ARENA_BYTES = 32 << 20

# Forked from one interpreter that has imported torch and run nothing: ranks start in a tenth of a second. Each notes
# when every mini-batch began and ended in a file its parent reads while it runs.
RANKS = """
import ctypes, json, mmap, os, random, struct, sys, time
import torch, torch.distributed, torch.nn.parallel
import ganger
from ganger.injob.state_image import VARIABLE, arena_variable, make_arena
plan = json.loads(sys.argv[1])
parent = os.getpid()
for rank, environment in enumerate(plan["ranks"]):
    if os.fork() == 0:
        break
else:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            sys.exit(0)
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != parent:
    sys.exit(1)
os.environ.update(environment)
torch.set_num_threads(1)
torch.manual_seed(0)
dice = random.Random(plan["seed"] * 1000 + rank)
arena = make_arena(None, "of a bench", plan["arena_bytes"])
os.environ[VARIABLE] = arena_variable(arena)
torch.distributed.init_process_group("gloo", init_method="file://" + plan["store"], rank=rank, world_size=plan["world"])
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
samples = torch.randn(32, 64)
file = open(plan["notes"] + f"/rank-{rank}", "r+b")
notes = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
clock, BOOTTIME = time.clock_gettime_ns, time.CLOCK_BOOTTIME
job = ganger.attach(model=model, optimizer=optimizer)
step = 0
while True:
    begin = clock(BOOTTIME)
    if dice.random() < plan["straggle_share"]:
        time.sleep(dice.random() * plan["straggle_seconds"])
    loss = (model(samples) - samples).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 10 == 0:
        loss.item()
    notes[2 * step] = begin
    notes[2 * step + 1] = clock(BOOTTIME)
    notes[0] = step
    job.step(loss)
"""


class StuckError(Exception):
    """Ranks did not get where they were told to within the time; the text says where each one is."""


@dataclass(frozen=True, slots=True)
class StopSample:
    """One suspend and resume. `longest_batch_s`: of the cycle so far, see `Gang._longest`."""

    level: int
    seconds: float
    resume_s: float
    longest_batch_s: float
    batch_after_s: float
    skew_steps: int
    overrun_steps: int


class BenchGang:
    """`ranks` ranks dealt evenly to `nodes` nodes. `delay_s`: how long the relay takes one way."""

    def __init__(self, directory: Path, ranks: int, nodes: int, delay_s: float, seed: int) -> None:
        self._world = ranks
        self._delay = delay_s
        self._directory = directory
        self._sequence = 1
        local = [tuple(range(n * ranks // nodes, (n + 1) * ranks // nodes)) for n in range(nodes)]
        self._nodes = [ControlPages(directory / f"node-{n}", 1, ranks, local[n]) for n in range(nodes)]
        for node in self._nodes:
            node.create(dict.fromkeys(node.local, 1))
            node.write_order(PageOrder(1, PageOrderKind.RUN, 0, 0, 0))
        self._home = {rank: node for node in self._nodes for rank in node.local}
        self._sent: list[dict[int, RelayedPoint]] = [{} for _ in self._nodes]
        self._under_way: deque[tuple[float, int, tuple[RelayedPoint, ...]]] = deque()
        notes = directory / "notes"
        notes.mkdir()
        for rank in range(ranks):
            with (notes / f"rank-{rank}").open("wb") as file:
                file.truncate(16 * STEPS)
        self._notes = [_map_notes(notes / f"rank-{rank}") for rank in range(ranks)]
        plan = {
            "world": ranks,
            "seed": seed,
            "store": str(directory / "store"),
            "notes": str(notes),
            "arena_bytes": ARENA_BYTES,
            "straggle_share": 0.1,
            "straggle_seconds": 0.01,
            "ranks": [self._environment(rank) for rank in range(ranks)],
        }
        self._log = (directory / "ranks.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", RANKS, json.dumps(plan)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )

    def __enter__(self) -> BenchGang:
        try:
            self._until(lambda: all(self._step(rank) >= 20 for rank in range(self._world)), START_S, "started")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        for notes in self._notes:
            notes.close()
        for node in self._nodes:
            node.close()

    def train(self, seconds: float) -> None:
        """Let it run for a while; the relay is idle, as it is between stops."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(POLL_S)

    def stop_and_go(self, level: int, hold_s: float) -> StopSample:
        """One cycle. Raises StuckError for a deadlock."""
        self._sequence += 1
        stop = self._sequence
        before = [self._step(rank) for rank in range(self._world)]
        ordered = now_ns()
        self._order(PageOrderKind.STOP, stop, level)
        self._until(lambda: all(self._reached(rank) == stop for rank in self._home), DEADLOCK_S, "stopped")
        stopped = now_ns()
        steps = [self._home[rank][rank].get(Word.REACHED_STEP) for rank in range(self._world)]
        self.train(hold_s)
        overrun = max(self._home[rank][rank].get(Word.STEP) - steps[rank] for rank in range(self._world))
        self._sequence += 1
        resumed = now_ns()
        self._order(PageOrderKind.RUN, 0, 0)
        self._until(lambda: all(self._first_step(rank) > resumed for rank in self._home), DEADLOCK_S, "resumed")
        going = max(self._first_step(rank) for rank in range(self._world))
        return StopSample(
            level,
            (stopped - ordered) / 1e9,
            (going - resumed) / 1e9,
            self._longest(before, steps),
            self._longest(steps, [step + 1 for step in steps]),
            max(steps) - min(steps),
            overrun,
        )

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "GANGER_PAGE": page_path(str(self._home[rank].directory), rank),
            "GANGER_JOB_DIR": str(self._directory),
            "RANK": str(rank),
            "WORLD_SIZE": str(self._world),
        }

    def _order(self, order: int, stop: int, level: int) -> None:
        for node in self._nodes:
            node.write_order(PageOrder(self._sequence, order, stop, level, 0))

    def _until(self, holds: object, seconds: float, what: str) -> None:
        assert callable(holds)
        deadline = time.monotonic() + seconds
        while not holds():
            self._relay()
            if self._process.poll() is not None:
                raise StuckError(f"the ranks ended before they {what}:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise StuckError(f"not {what} within {seconds:g} s: {self._story()}\n{self._tail()}")
            time.sleep(POLL_S)

    def _relay(self) -> None:
        """What changed on a node goes to the others and arrives after the delay."""
        if len(self._nodes) == 1:
            return
        now = time.monotonic()
        for number, node in enumerate(self._nodes):
            points = {rank: point for rank, point in node.points().items() if rank in node.local}
            news = tuple(point for rank, point in points.items() if self._sent[number].get(rank) != point)
            if news:
                self._sent[number] = points
                self._under_way.append((now + self._delay, number, news))
        while self._under_way and self._under_way[0][0] <= now:
            _, source, news = self._under_way.popleft()
            for number, node in enumerate(self._nodes):
                if number != source:
                    node.mirror(news)

    def _step(self, rank: int) -> int:
        return self._home[rank][rank].get(Word.STEP)

    def _reached(self, rank: int) -> int:
        return self._home[rank][rank].get(Word.REACHED_SEQ)

    def _first_step(self, rank: int) -> int:
        return self._home[rank][rank].get(Word.FIRST_STEP_TIME)

    def _longest(self, first: list[int], last: list[int]) -> float:
        """Seconds of the gang's longest mini-batch after step `first` up to step `last`. A mini-batch of a gang lasts
        from when its last rank begins: what the others wait for one that is held back is no part of it."""
        longest = 0
        for step in range(max(1, min(*first, *last)), max(last) + 1):
            noted = [struct.unpack_from("<QQ", notes, 16 * step) for notes in self._notes]
            longest = max(longest, max(end for _, end in noted) - max(begin for begin, _ in noted))
        return longest / 1e9

    def _story(self) -> str:
        names = {value: name for name, value in vars(PageState).items() if not name.startswith("_")}
        return "; ".join(
            f"rank {rank}: step {page.step}, ack {page.ack_seq} at {page.ack_step}, reached {page.reached_seq}, "
            f"{names.get(page.state, page.state)}, error {page.error}"
            for rank, page in ((rank, self._home[rank].progress(rank)) for rank in range(self._world))
        )

    def _tail(self) -> str:
        return (self._directory / "ranks.log").read_text(errors="replace")[-2000:]


def _map_notes(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


LEVELS = (PageParkLevel.PAUSE, PageParkLevel.PAUSE, PageParkLevel.PAUSE, PageParkLevel.OFFLOAD)
"""What a run of cycles asks for in turn."""
