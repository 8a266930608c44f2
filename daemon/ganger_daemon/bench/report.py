"""What a benchmark prints: figures with units in their names, limits they must keep, and the machine they are of."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

SAMPLES = Path("build/bench")


class Report:
    """Collects figures; `result` is the object that is printed. A figure whose limit is not kept makes it not ok."""

    def __init__(self, name: str, directory: Path = SAMPLES) -> None:
        self.name = name
        self._figures: dict[str, float] = {}
        self._limits: dict[str, float] = {}
        self._kept: dict[str, bool] = {}
        self._processors = processor_ticks()
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
            "machine": {**machine(), "stolen_share": stolen_share(self._processors, processor_ticks())},
        }

    def _judge(self, name: str, value: float, limit: float, kept: bool) -> None:
        self._figures[name] = round(value, 6)
        self._limits[name] = round(limit, 6)
        self._kept[name] = kept


def machine() -> dict[str, object]:
    model = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": model or platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def processor_ticks() -> Sequence[int]:
    """Of all processors since the machine started, by kind; empty where the kernel does not tell."""
    try:
        return [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
    except (OSError, ValueError):
        return []


def stolen_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Of the processor time that this machine wanted, what its host gave to others; a virtual machine is slow by it."""
    kinds = [late - early for early, late in zip(before, after, strict=True)]
    stolen, idle = sum(kinds[_STEAL : _STEAL + 1]), sum(kinds[_IDLE])
    wanted = sum(kinds[: _STEAL + 1]) - idle
    return round(stolen / wanted, 3) if wanted > 0 else 0.0


# Fields of /proc/stat, proc(5): idle and iowait, and steal; what follows is part of user and nice.
_IDLE, _STEAL = slice(3, 5), 7


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least that share of the values does not exceed."""
    if not values:
        raise ValueError("there are no samples")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
