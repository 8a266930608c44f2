"""By arrival, and nobody running is stopped: strict, or passing over what does not fit (Tiresias's `fifo` and `fjf`)."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ganger_master.policies.facts import Capacity, Facts
from ganger_master.policies.order import Order


def keys(facts: Facts, now: float, capacity: Capacity) -> tuple[NDArray[Any], ...]:
    return ()


FIFO = Order("fifo", keys, preempts=False, is_strict=True)
FIFO_BACKFILL = Order("fifo-backfill", keys, preempts=False)
