"""What `ganger bench chaos` does, and what must hold afterwards: kills, kinds of jobs, and judges of results.

Kills are drawn from a seed before the run. Which of several ranks, launchers or daemons dies is drawn, too, as a number
from 0 to 1 that chooses among those that are there at that moment.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ganger.v1.resources_pb2 import Claim

from benchmarks.witnesses import (
    Death,
    Step,
    losses_of_batches,
    lost_or_repeated,
    other_results,
    samples_not_once,
    two_attempts_at_once,
    undone_without_cause,
    what_counts,
)

# How often each part is a victim, relative to the others. A rank's death is the cheapest for the machine.
WEIGHTS: Final = {
    "leader": 3.0,
    "stand-by": 2.0,
    "planner": 3.0,
    "daemon": 4.0,
    "launcher": 4.0,
    "rank": 6.0,
    "command": 4.0,
    "job scheduler": 3.0,
}
PAUSE_SHARE: Final = 0.15
PAUSE_S: Final = (1.0, 5.0)
# Losses of an elastic job differ by the order of sums.
TOLERANCE: Final = 1e-12
SAMPLES: Final = 96


@dataclass(frozen=True, slots=True)
class ChaosEvent:
    """A victim. `at_s`: from the beginning of a part of the run; `draw`: 0 to 1, which one of its kind; `pause_s`: for
    how long it is stopped by SIGSTOP; zero: it is killed."""

    at_s: float
    part: str
    draw: float
    pause_s: float = 0.0


def schedule(seed: int, seconds: float, every_s: float) -> list[ChaosEvent]:
    """Return the victims of one part of the run of `seconds`: one in each period of `every_s`, each kind in its share,
    in an order that the seed decides."""
    dice = random.Random(seed)
    count = int(seconds / every_s)
    total = sum(WEIGHTS.values())
    parts = [part for part, weight in WEIGHTS.items() for _ in range(max(1, round(count * weight / total)))]
    dice.shuffle(parts)
    return [
        ChaosEvent(
            (number + dice.random()) * every_s,
            part,
            dice.random(),
            dice.uniform(*PAUSE_S) if dice.random() < PAUSE_SHARE else 0.0,
        )
        for number, part in enumerate(parts[:count])
    ]


@dataclass(frozen=True, slots=True)
class JobKind:
    """Jobs of the stream. `gpus`: of each; zero for an elastic job of one to four; `alive`: how many of them are there
    at any time; `members`: of an array, or zero; `has_steps`: it trains, and writes down each step."""

    name: str
    gpus: int
    alive: int
    members: int = 0
    has_steps: bool = True
    has_scheduler: bool = False


KINDS: Final = (
    JobKind("one", 1, 3),
    JobKind("two", 2, 1),
    JobKind("four", 4, 1),
    JobKind("elastic", 0, 1),
    JobKind("scheduled", 1, 1, has_scheduler=True),
    JobKind("script", 1, 1, has_steps=False),
    JobKind("array", 1, 1, members=3, has_steps=False),
)
# Gangs whose result is needed from an undisturbed run.
REFERENCES: Final = tuple(sorted({kind.gpus for kind in KINDS if kind.has_steps}))
SCRIPT_LINES: Final = 40
# A script without steps. Its numbered lines show whether it ran to its end, and how often it began.
SCRIPT: Final = f'i=0; while [ $i -lt {SCRIPT_LINES} ]; do i=$((i+1)); echo "line $i of {{label}}"; sleep 0.1; done'
_LINE: Final = re.compile(r"line (\d+) of (\S+)")
_STEP: Final = re.compile(r"step (\d+)")


# Busy and calm phases alternate: in a calm one gangs have room to move, and elastic jobs to grow.
_PHASE_S: Final = 40.0
_BUSY_ONLY: Final = frozenset({"four", "array"})


def next_kind(dice: random.Random, alive: Mapping[str, int], at_s: float) -> JobKind | None:
    """Return a kind of which fewer live than should, `at_s` seconds after the beginning; None if all are there."""
    is_calm = int(at_s / _PHASE_S) % 2 == 1
    wanted = {kind: min(kind.alive, 1) * (kind.name not in _BUSY_ONLY) if is_calm else kind.alive for kind in KINDS}
    missing = [kind for kind, count in wanted.items() if alive.get(kind.name, 0) < count]
    return dice.choice(missing) if missing else None


def beside(mover: Claim, other: Claim) -> Claim:
    """Return the claim with which the job of the claim `mover` joins that of `other` on its device, both of one GPU."""
    claim = Claim()
    claim.CopyFrom(mover)
    claim.node, claim.device_mask, claim.shared_mask = other.node, other.device_mask, other.device_mask
    return claim


# -- judges: each returns findings in words ----------------------------------------------------------------------------


def not_once(accepted: Mapping[str, str], listed: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Return the submissions that are lost, and those that are there twice. `accepted`: the name of the job by its
    label; `listed`: names and labels of all jobs that the master has."""
    jobs = list(listed)
    labels = Counter(label for _, label in jobs)
    names = {name for name, _ in jobs}
    lost = [f"{name} ({label}) was accepted, and is lost" for label, name in accepted.items() if name not in names]
    twice = [f"{label} was submitted once, and is there {count} times" for label, count in labels.items() if count > 1]
    return lost, twice


def step_findings(
    steps: Sequence[Step],
    deaths: Sequence[Death],
    wanted: int,
    gpus: int,
    reference: Sequence[Step],
) -> list[str]:
    """Return what is wrong with the record of a job that did `wanted` steps: steps undone though no rank had died,
    steps lost or done twice, two attempts at once, and results other than those of the undisturbed `reference`."""
    counts = what_counts(steps)
    found = [*undone_without_cause(steps, deaths), *lost_or_repeated(counts), *two_attempts_at_once(steps)]
    last = [one for one in counts if one.step == wanted]
    if not last or len(last) != last[0].world:
        found.append(f"its last step, {wanted}, was done by {len(last)} ranks; {len(counts)} steps count")
    if gpus:
        return found + other_results(steps, {(one.step, one.rank): one for one in reference})
    expected = losses_of_batches(reference)
    found += samples_not_once(counts, SAMPLES)
    for step, loss in losses_of_batches(counts).items():
        if abs(loss - expected[step]) > TOLERANCE * abs(expected[step]):
            found.append(f"step {step}: loss {loss!r}, not {expected[step]!r}")
    return found


def log_findings(log: str, rank: int, steps: Sequence[Step], deaths: int) -> list[str]:
    """Return what is wrong with the log of a rank: it has the line of each of its steps, in their order, once. A rank
    that was killed may have died between its record and its line: as many lines as ranks that died may be missing."""
    expected = [one.step for one in sorted(steps, key=lambda one: one.began) if one.rank == rank]
    printed = [int(match[1]) for match in map(_STEP.fullmatch, log.splitlines()) if match]
    missing, at = [], 0
    for step in expected:
        if at < len(printed) and printed[at] == step:
            at += 1
        else:
            missing.append(step)
    found = []
    if at < len(printed):
        found.append(f"log of rank {rank}: line {printed[at]} is there twice, or out of order, of {len(printed)}")
    elif len(missing) > deaths:
        found.append(f"log of rank {rank}: lines of steps {missing[:10]} are missing, and {deaths} ranks died")
    return found


def script_findings(log: str, label: str, deaths: int) -> list[str]:
    """Return what is wrong with the log of a script without steps. It runs from its first line to its last. Each of
    `deaths` may have made it begin once more: its own, or its launcher's, without which its exit is not recorded."""
    numbers = [int(match[1]) for match in map(_LINE.fullmatch, log.splitlines()) if match and match[2] == label]
    runs: list[list[int]] = []
    for number in numbers:
        if number == 1:
            runs.append([])
        if not runs:
            return [f"its log begins with line {number}"]
        runs[-1].append(number)
    found = [
        f"run {at} of its log has lines {run[:3]} ... {run[-3:]}"
        for at, run in enumerate(runs, 1)
        if run != list(range(1, len(run) + 1))
    ]
    if not runs or len(runs[-1]) != SCRIPT_LINES:
        found.append(f"its last run printed {len(runs[-1]) if runs else 0} lines of {SCRIPT_LINES}")
    if len(runs) > 1 + deaths:
        found.append(f"it began {len(runs)} times, and died {deaths} times")
    return found


def event_counts(events: Iterable[Any]) -> Counter[str]:
    """Return how often each kind of event happened (`ganger.v1.Event`), changes also with their reason."""
    counts: Counter[str] = Counter()
    for event in events:
        counts[event.kind] += 1
        if reason := event.figures.get("reason", ""):
            counts[f"{event.kind}:{reason}"] += 1
    return counts
