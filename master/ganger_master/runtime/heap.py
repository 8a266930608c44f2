"""What the collector of cycles is spared: the state is large, lives as long as the master and holds no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Allocations before a collection of the youngest generation: most objects of a burst of calls die without one.
_YOUNGEST: Final = 20_000


def settle() -> None:
    """Exclude all present objects from garbage collection; for a program that has just loaded its state."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, 50, 100)


@contextmanager
def settled() -> Iterator[None]:
    """Exclude the present objects from garbage collection within this context."""
    thresholds = gc.get_threshold()
    settle()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
