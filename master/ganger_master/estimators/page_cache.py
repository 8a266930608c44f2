"""How fast a job runs with less host memory for its file caches: the least that costs it nothing, and what to measure
next.

Caches of a kernel keep what was used last. A loop over more data than fits finds nothing of it there, a random order
finds as large a part as fits. So no shape of the curve is assumed: an amount counts as the largest measured one below.
Synergy (OSDI 2022, section 3) derives this curve from a cache of fixed hits instead, which a job would have to use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ganger_master.estimators.cpu import LEAST_DIFFERENCE, CpuPoint

# Amounts closer than this part of what is used are not told apart.
_RESOLUTION: Final = 1 / 16
# Speed at which a cache that was emptied is filled again: a network file system, or one disk.
REFILL_BYTES_PER_S: Final = 100e6


def is_full_rate(point: CpuPoint, points: Sequence[CpuPoint]) -> bool:
    """Return whether a point is as fast as the one of most memory, which is the last."""
    return point.rate >= (1.0 - LEAST_DIFFERENCE) * points[-1].rate


def enough_memory(points: Sequence[CpuPoint]) -> float:
    """Return the least measured memory from which on no point is slower; infinite without points. `points`: by memory,
    ascending, the last one with all that the job had."""
    enough = math.inf
    for point in reversed(points):
        if not is_full_rate(point, points):
            break
        enough = point.memory_bytes
    return enough


def next_memory(points: Sequence[CpuPoint], used: float, least: float, affordable: float) -> float | None:
    """Return the memory to measure next; None: enough is known, or no more is affordable.

    The least is tried first: a job that loses nothing with it needs no other trial. Else the middle between what costs
    something and what costs nothing. All arguments are in bytes for each GPU. `points`: as above. `used`: what the job
    uses with all its caches; `least`: what it needs without any; `affordable`: how much of a cache that it may need
    may be emptied.
    """
    high = min(used, enough_memory(points))
    low = max([point.memory_bytes for point in points if point.memory_bytes < high], default=0.0)
    wanted = max(least, (low + high) / 2 if low else 0.0, high - affordable)
    return wanted if high - wanted >= _RESOLUTION * used > 0.0 else None
