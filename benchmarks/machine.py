"""On what machine a benchmark ran, and how much of it was there for it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

# Fields of the first line of /proc/stat, proc(5): idle and iowait, and steal; what follows is part of the first two.
_IDLE, _STEAL = slice(3, 5), 7


def machine(ticks_before: Sequence[int] = ()) -> dict[str, object]:
    """What figures of other machines are to be compared with. `ticks_before`: `processor_ticks` when it began."""
    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line[:10] == "model name"), "")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": model or platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "stolen_share": stolen_share(ticks_before, processor_ticks()),
    }


def processor_ticks() -> list[int]:
    """Of all processors since the machine started, by kind; empty where the kernel does not tell."""
    return [int(field) for line in _lines("/proc/stat")[:1] for field in line.split()[1:]]


def stolen_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Of the processor time that this machine wanted between two looks, what its host gave to others: a virtual machine
    is slower by it."""
    spent = [late - early for early, late in zip(before, after, strict=False)]
    stolen = sum(spent[_STEAL : _STEAL + 1])
    wanted = sum(spent[: _STEAL + 1]) - sum(spent[_IDLE])
    return round(stolen / wanted, 3) if wanted > 0 else 0.0


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
