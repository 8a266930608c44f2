"""What a benchmark prints: figures with units in their names, and limits they must keep."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
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


class BenchReport:
    """Collects figures; `result` is the object that is printed. A figure whose limit is not kept makes it not ok."""

    def __init__(self, name: str, directory: Path = SAMPLES) -> None:
        self.name = name
        self._figures: dict[str, float] = {}
        self._limits: dict[str, AtLeast | AtMost] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._samples = (directory / f"{name}.jsonl").open("w")

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def figure(self, name: str, value: float) -> None:
        self._figures[name] = value

    def at_most(self, name: str, value: float, limit: float) -> None:
        self._figures[name], self._limits[name] = value, AtMost(limit)

    def at_least(self, name: str, value: float, limit: float) -> None:
        self._figures[name], self._limits[name] = value, AtLeast(limit)

    def limit(self, name: str, limit: AtLeast | AtMost) -> None:
        """State the limit of a figure that is measured at another place. Without the figure it does not hold."""
        self._limits[name] = limit

    def figures_of(self, prefix: str) -> dict[str, float]:
        """Return the figures so far whose names begin with it."""
        return {name: value for name, value in self._figures.items() if name.startswith(prefix)}

    def samples(self, of: Iterable[Mapping[str, object]]) -> None:
        """Raw samples, one object a line, from which the figures can be computed again."""
        self._samples.writelines(json.dumps(sample) + "\n" for sample in of)

    def result(self) -> dict[str, Any]:
        self._samples.close()
        found = self._figures
        missed = [name for name, limit in self._limits.items() if name not in found or not limit.holds(found[name])]
        return {
            "name": self.name,
            "ok": not missed,
            "figures": {name: round(value, 6) for name, value in found.items()},
            "limits": {name: round(limit.bound, 6) for name, limit in self._limits.items()},
            "missed": sorted(missed),
        }


def report(
    name: str,
    figures: Mapping[str, float],
    limits: Mapping[str, AtLeast | AtMost],
    samples: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the object of a benchmark whose figures are all known."""
    made = BenchReport(name)
    made.samples(samples)
    for figure, value in figures.items():
        made.figure(figure, value)
    for figure, limit in limits.items():
        made.limit(figure, limit)
    return made.result()


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least that share of the values does not exceed."""
    if not values:
        raise ValueError("there are no samples")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]
