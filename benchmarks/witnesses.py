"""What jobs wrote down of their own steps, and what must hold of it whatever was killed meanwhile: findings in words.

An attempt of a job is called by its epoch; `epoch` here is one of training data. Times are nanoseconds of one clock.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

Device: TypeAlias = tuple[str, int]

# The program of a job that writes such a record.
WITNESS_JOB: Final = Path(__file__).with_name("witness_job.py")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank."""

    job: str
    step: int
    epoch: int
    attempt: int
    node: str
    devices: tuple[int, ...]
    rank: int
    world: int
    loss: str
    weights: str
    samples: tuple[int, ...]
    began: int
    ended: int

    @property
    def where(self) -> tuple[Device, ...]:
        return tuple((self.node, device) for device in self.devices)

    def __str__(self) -> str:
        return f"step {self.step} of {self.job} (rank {self.rank} of attempt {self.attempt} on {self.node})"


@dataclass
class Record:
    """The files of one job's ranks, read as they grow."""

    job: str
    path: Path
    steps: list[Step] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def read(self) -> list[Step]:
        """Return all steps so far. Lines that are not whole yet come with a later call."""
        for path in sorted(self.path.parent.glob(f"{self.path.name}.[0-9]*")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(new)
            for line in new.splitlines():
                fields = json.loads(line)
                fields.update(devices=tuple(fields["devices"]), samples=tuple(fields["samples"]))
                self.steps.append(Step(self.job, **fields))
        return self.steps

    def done(self) -> int:
        """Return the number of steps that its ranks have done so far, also those that were undone."""
        return len(self.read())


@dataclass
class Pack:
    """Jobs that were co-located on a device, and the period in which they were."""

    device: Device
    jobs: frozenset[str]
    began: int
    ended: int | None = None

    def allows(self, one: Step, other: Step, device: Device) -> bool:
        is_meanwhile = max(one.began, other.began) >= self.began and (
            self.ended is None or min(one.ended, other.ended) <= self.ended
        )
        return device == self.device and {one.job, other.job} <= self.jobs and is_meanwhile


@dataclass(frozen=True)
class Death:
    """A rank was killed. `saved`: the step of the newest complete checkpoint that was on storage before."""

    job: str
    at: int
    saved: int


def what_counts(steps: Iterable[Step]) -> list[Step]:
    """Return the steps that were not undone: an attempt that begins with a step undoes what earlier ones did from there
    on."""
    counts: list[Step] = []
    for own in _by_attempt(steps):
        first = min(one.step for one in own)
        counts = [*[one for one in counts if one.step < first], *own]
    return counts


def undone_without_cause(steps: Iterable[Step], deaths: Sequence[Death]) -> list[str]:
    """Only the death of a rank of the attempt before, or of one that came to no step, undoes steps; and none that was
    in the newest complete checkpoint."""
    found = []
    for before, own in pairwise(_by_attempt(steps)):
        done = max(one.step for one in before)
        first = min(own, key=lambda one: (one.step, one.began))
        if first.step > done:
            continue
        since = min(one.began for one in before)
        saved = [death.saved for death in deaths if death.job == first.job and since < death.at < first.began]
        if not saved:
            found.append(f"{first}: up to step {done} all had been done, and nothing was killed")
        elif first.step <= min(saved):
            found.append(f"{first}: there was a checkpoint of step {min(saved)}")
    return found


def _by_attempt(steps: Iterable[Step]) -> list[list[Step]]:
    found: dict[int, list[Step]] = defaultdict(list)
    for one in steps:
        found[one.attempt].append(one)
    return [found[attempt] for attempt in sorted(found)]


def lost_or_repeated(steps: Sequence[Step]) -> list[str]:
    """Every rank of the world that did a step did it once, and step follows step. Ranks may still be at it, so of the
    last step some may be missing."""
    found = []
    by_step: dict[int, list[Step]] = defaultdict(list)
    for one in steps:
        by_step[one.step].append(one)
    last = max(by_step, default=0)
    for step in range(1, last + 1):
        there = by_step[step]
        ranks = sorted(one.rank for one in there)
        world = {(one.attempt, one.world) for one in there}
        is_whole = len(world) == 1 and ranks == list(range(there[0].world))
        if not is_whole and not (step == last and len(world) == 1 and len(set(ranks)) == len(ranks)):
            found.append(f"step {step} was done by {', '.join(map(str, there)) or 'no process'}")
    return found


def two_attempts_at_once(steps: Iterable[Step]) -> list[str]:
    """An attempt ends its last step before the next one begins its first, and never comes back."""
    ordered = sorted(steps, key=lambda one: one.began)
    found, latest = [], 0
    ended: dict[int, int] = {}
    for one in ordered:
        if one.attempt < latest:
            found.append(f"{one} was done though attempt {latest} had begun")
        latest = max(latest, one.attempt)
        before = max((end for attempt, end in ended.items() if attempt != one.attempt), default=0)
        if one.began < before:
            found.append(
                f"{one} was begun {(before - one.began) / 1e6:.1f} ms before another attempt had ended its own"
            )
        ended[one.attempt] = max(ended.get(one.attempt, 0), one.ended)
    return found


def two_on_a_device(steps: Iterable[Step], packs: Sequence[Pack] = ()) -> list[str]:
    """Return the violations of: two jobs step on a device at once only if they are co-located."""
    by_device: dict[Device, list[Step]] = defaultdict(list)
    for one in steps:
        for device in one.where:
            by_device[device].append(one)
    found = []
    for device, there in sorted(by_device.items()):
        going: list[Step] = []
        for one in sorted(there, key=lambda step: step.began):
            going = [other for other in going if other.ended > one.began]
            for other in going:
                if other.job != one.job and not any(pack.allows(one, other, device) for pack in packs):
                    ms = (min(one.ended, other.ended) - one.began) / 1e6
                    found.append(f"{other} and {one} were at it at once on {device[0]}:{device[1]} for {ms:.1f} ms")
            going.append(one)
    return found


def other_results(steps: Iterable[Step], reference: Mapping[tuple[int, int], Step]) -> list[str]:
    """Bit for bit as the undisturbed run, by step and rank."""
    found = []
    for one in steps:
        expected = reference[one.step, one.rank]
        if (one.loss, one.weights, one.samples) != (expected.loss, expected.weights, expected.samples):
            found.append(f"{one}: loss {one.loss} and weights {one.weights}, not {expected.loss}, {expected.weights}")
    return found


def by_step_and_rank(steps: Iterable[Step]) -> dict[tuple[int, int], Step]:
    return {(one.step, one.rank): one for one in steps}


def losses_of_batches(steps: Iterable[Step]) -> dict[int, float]:
    """Return the loss of each batch that every rank of its world has recorded, by step."""
    by_step: dict[int, list[Step]] = defaultdict(list)
    for one in steps:
        by_step[one.step].append(one)
    return {
        step: sum(float.fromhex(one.loss) for one in ranks) / len(ranks)
        for step, ranks in by_step.items()
        if len(ranks) == ranks[0].world
    }


def samples_not_once(steps: Iterable[Step], of_epoch: int) -> list[str]:
    """In every epoch but the present one each sample is taken once, and in none more often."""
    taken: dict[int, list[int]] = defaultdict(list)
    for one in steps:
        taken[one.epoch].extend(one.samples)
    found = []
    for epoch, samples in sorted(taken.items()):
        if len(set(samples)) < len(samples):
            found.append(f"epoch {epoch} takes samples twice")
        elif epoch < max(taken) and sorted(samples) != list(range(of_epoch)):
            found.append(f"epoch {epoch} takes {len(samples)} samples of {of_epoch}")
    return found


def switches(steps: Iterable[Step]) -> int:
    """Return how often a device passed from one job to another."""
    by_device: dict[Device, list[Step]] = defaultdict(list)
    for one in steps:
        for device in one.where:
            by_device[device].append(one)
    return sum(
        before.job != after.job
        for there in by_device.values()
        for before, after in pairwise(sorted(there, key=lambda step: step.began))
    )
