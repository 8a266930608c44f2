"""Notes that benchmark jobs write of their steps, and the slices and shares of time computed from them.

A note is five numbers (`NOTE_FORMAT`), one note for each step. A job that was moved continues in another process. The
parts of training programs here are texts because they run in processes of jobs.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import quantile

# Process, number of the step, its begin and end (nanoseconds of the clock of control pages), and the processor time in
# nanoseconds that the process had used by then.
NOTE_FORMAT = "<QQQQQ"

# `note = note_to(path)`, `begin = now()`, and `note(number, begin)` at the end of each step.
NOTING = f"""
import os, struct, time
def now():
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
def note_to(path):
    notes = open(path, "ab", buffering=0)
    def note(number, begin):
        notes.write(struct.pack("{NOTE_FORMAT}", os.getpid(), number, begin, now(), time.process_time_ns()))
    return note
"""

# `Heavy(size)`: most of the state is buffers that no step touches, so that a step stays short at any size.
HEAVY = """
import torch
class Heavy(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        for part in range(16):
            self.register_buffer(f"part{part}", torch.full((size // 64,), float(part)))
    def forward(self, x):
        return self.layer(x)
"""


NOTE = struct.Struct(NOTE_FORMAT)
# Between two steps of one turn nothing takes so long.
_REST_NS = 500_000_000


@dataclass(frozen=True, slots=True)
class NotedStep:
    """Nanoseconds."""

    pid: int
    number: int
    begin: int
    end: int
    used: int


@dataclass(frozen=True, slots=True)
class NotedSlice:
    """Steps of one job on end. Nanoseconds."""

    job: int
    begin: int
    end: int
    steps: int


def steps_of(path: Path) -> list[NotedStep]:
    """What is noted there so far; a note that is half written does not count."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = len(data) // NOTE.size * NOTE.size
    return [NotedStep(*fields) for fields in NOTE.iter_unpack(data[:whole])]


def rate(steps: Sequence[Sequence[NotedStep]]) -> float:
    """Steps of all these jobs per processor-second, from the end of the first step of each process to that of its
    last."""
    lives = [life for own in steps for life in _lives(own)]
    used = sum((life[-1].used - life[0].used) / 1e9 for life in lives)
    return sum(len(life) - 1 for life in lives) / max(1e-9, used)


def share_outside(steps: Sequence[Sequence[NotedStep]]) -> float:
    """Return the share of processor time that time-sliced jobs used between two slices (to stop, to offload their state
    and to restore it): the time from one step to the next beyond the usual time."""
    outside = total = 0.0
    for life in [life for own in steps for life in _lives(own)]:
        used = [after.used - before.used for before, after in itertools.pairwise(life)]
        if not used:
            continue
        usual = quantile(used, 0.5)
        gaps = [after.begin - before.end for before, after in itertools.pairwise(life)]
        outside += sum(max(0.0, one - usual) for one, gap in zip(used, gaps, strict=True) if gap > _REST_NS)
        total += sum(used)
    return outside / max(1.0, total)


def turns_of(steps: Sequence[Sequence[NotedStep]]) -> list[NotedSlice]:
    """The turns of jobs on one device, in their order: steps of one, without another's between them."""
    merged = sorted([(step.begin, step.end, job) for job, own in enumerate(steps) for step in own])
    found: list[NotedSlice] = []
    for job, own in itertools.groupby(merged, key=lambda one: one[2]):
        inside = list(own)
        found.append(NotedSlice(job, inside[0][0], inside[-1][1], len(inside)))
    return found


def switches(steps: Sequence[Sequence[NotedStep]], began: int, ended: int) -> tuple[list[float], list[float]]:
    """Seconds that the devices of these jobs idled at each switch between two moments (nanoseconds): until a job
    resumed, and until a program had started there, as at a move. Notes do not name devices: as many slices begin as
    end, so each end of a slice is paired with the next begin of one."""
    ends: list[int] = []
    begins: list[tuple[int, bool]] = []
    for own in steps:
        # A running job that is moved hardly pauses, but leaves one device, and another one waited for it.
        rests = [(a, b) for a, b in itertools.pairwise(own) if b.begin - a.end > _REST_NS or a.pid != b.pid]
        ends += [a.end for a, _ in rests] + [step.end for step in own[-1:] if step.end < ended - _REST_NS]
        begins += [(b.begin, a.pid != b.pid) for a, b in rests]
        begins += [(step.begin, False) for step in own[:1] if step.begin > began + _REST_NS]
    going_on: list[float] = []
    starting: list[float] = []
    coming = sorted(begins)
    for end in sorted(ends):
        following = next((one for one in coming if one[0] > end), None)
        if following is not None:
            coming.remove(following)
            (starting if following[1] else going_on).append((following[0] - end) / 1e9)
    return going_on, starting


def stepping(steps: Sequence[NotedStep]) -> float:
    """Seconds in steps."""
    return sum(step.end - step.begin for step in steps) / 1e9


def shares_of_cycles(turns: Sequence[NotedSlice], jobs: int) -> list[float]:
    """Of the time of their device, what each job had in as many whole cycles as were seen. ValueError for none."""
    # The first and the last one are cut by where the look at them began and ended.
    whole = turns[1:-1]
    whole = whole[: len(whole) // jobs * jobs]
    if not whole:
        raise ValueError("not one whole cycle was seen")
    span = whole[-1].end - whole[0].begin
    return [sum(turn.end - turn.begin for turn in whole if turn.job == job) / span for job in range(jobs)]


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 where all are equal, one over their number where one has all."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def _lives(steps: Sequence[NotedStep]) -> list[list[NotedStep]]:
    return [list(own) for _, own in itertools.groupby(steps, key=lambda step: step.pid)]
