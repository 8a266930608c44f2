"""Two trainings compared step by step, bit by bit. Pure, but for reading the files the examples write."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LossCurve:
    """What a run left: the loss of every step as a hexadecimal float, and the SHA-256 of the final weights. `lines`
    counts repetitions too."""

    losses: tuple[tuple[int, str], ...]
    weights: str
    lines: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """`first_difference` is the first step that differs, None when none does; `steps` how many were compared."""

    steps: int
    differing: int
    first_difference: int | None
    same_weights: bool
    repeated: int

    @property
    def identical(self) -> bool:
        return self.differing == 0 and self.same_weights and self.steps > 0


def read_training(losses: Path, weights: Path) -> LossCurve:
    """Raises OSError for a file that is not there, ValueError for one that is not what the examples write."""
    lines = losses.read_text().splitlines()
    last: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        step, space, loss = line.partition(" ")
        if not space or not step.isdigit():
            raise ValueError(f"{losses}:{number} is not a step and a loss: {line!r}")
        float.fromhex(loss)
        # A step repeated after a crash counts as it was the last time.
        last[int(step)] = loss
    return LossCurve(tuple(sorted(last.items())), weights.read_text().strip(), len(lines))


def compare(expected: LossCurve, found: LossCurve) -> Comparison:
    """Every step of either run; one that only one of them has differs."""
    one, other = dict(expected.losses), dict(found.losses)
    steps = sorted(one.keys() | other.keys())
    differing = [step for step in steps if one.get(step) != other.get(step)]
    return Comparison(
        steps=len(steps),
        differing=len(differing),
        first_difference=differing[0] if differing else None,
        same_weights=bool(expected.weights) and expected.weights == found.weights,
        repeated=found.lines - len(found.losses),
    )


def largest_gap(seen: list[tuple[float, int]], after: float, before: float) -> float:
    """The longest time without a new step within a span, in seconds. `seen`: (time, steps so far), one entry for each
    change, in order. The gap the span begins or ends in counts whole."""
    longest = 0.0
    for (earlier, _), (later, _) in itertools.pairwise(seen):
        if later > after and earlier < before:
            longest = max(longest, later - earlier)
    return longest
