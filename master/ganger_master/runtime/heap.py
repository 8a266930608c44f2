"""What the collector of cycles is spared: the state is large, lives as long as the master and holds no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Objects made before the youngest are looked through: a burst of calls makes hundreds of each, which go by themselves.
_YOUNGEST: Final = 20_000


def settle() -> None:
    """Called once by a program whose state is loaded: what is there now is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, 50, 100)


@contextmanager
def settled() -> Iterator[None]:
    """The same within this, for a program that goes on to other things."""
    thresholds = gc.get_threshold()
    settle()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
