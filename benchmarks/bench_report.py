"""The object a benchmark prints: figures with units in their names, the limits they must hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SAMPLES: Final = Path("build") / "bench"


@dataclass(frozen=True, slots=True)
class AtLeast:
    bound: float

    def holds(self, figure: float) -> bool:
        return figure >= self.bound


@dataclass(frozen=True, slots=True)
class AtMost:
    bound: float

    def holds(self, figure: float) -> bool:
        return figure <= self.bound


def report(
    name: str,
    figures: Mapping[str, float],
    limits: Mapping[str, AtLeast | AtMost],
    samples: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Writes the samples to build/bench/NAME.jsonl and returns the object. A limit without its figure does not hold."""
    write_samples(name, samples)
    missed = [figure for figure, limit in limits.items() if figure not in figures or not limit.holds(figures[figure])]
    found: dict[str, Any] = {
        "name": name,
        "ok": not missed,
        "figures": dict(figures),
        "limits": {figure: limit.bound for figure, limit in limits.items()},
    }
    return found | ({"missed": missed} if missed else {})


def write_samples(name: str, samples: Sequence[Mapping[str, Any]], directory: Path = SAMPLES) -> Path:
    """One JSON object a line, so that anyone can compute the figures again."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps(sample) + "\n" for sample in samples)
    return path
