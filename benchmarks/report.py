"""What a benchmark prints: figures with units in their names, and limits they must keep."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

SAMPLES = Path("build/bench")


class BenchReport:
    """Collects figures; `result` is the object that is printed. A figure whose limit is not kept makes it not ok."""

    def __init__(self, name: str, directory: Path = SAMPLES) -> None:
        self.name = name
        self._figures: dict[str, float] = {}
        self._limits: dict[str, float] = {}
        self._kept: dict[str, bool] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._samples = (directory / f"{name}.jsonl").open("w")

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def figure(self, name: str, value: float) -> None:
        self._figures[name] = round(value, 6)

    def at_most(self, name: str, value: float, limit: float) -> None:
        self._judge(name, value, limit, value <= limit)

    def at_least(self, name: str, value: float, limit: float) -> None:
        self._judge(name, value, limit, value >= limit)

    def figures_of(self, prefix: str) -> dict[str, float]:
        """Return the figures so far whose names begin with it."""
        return {name: value for name, value in self._figures.items() if name.startswith(prefix)}

    def samples(self, of: Iterable[Mapping[str, object]]) -> None:
        """Raw samples, one object a line, from which the figures can be computed again."""
        for sample in of:
            self._samples.write(json.dumps(sample) + "\n")

    def result(self) -> dict[str, object]:
        self._samples.close()
        return {
            "name": self.name,
            "ok": all(self._kept.values()),
            "figures": self._figures,
            "limits": self._limits,
            "missed": sorted(name for name, kept in self._kept.items() if not kept),
        }

    def _judge(self, name: str, value: float, limit: float, kept: bool) -> None:
        self._figures[name] = round(value, 6)
        self._limits[name] = round(limit, 6)
        self._kept[name] = kept


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least that share of the values does not exceed."""
    if not values:
        raise ValueError("there are no samples")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]
