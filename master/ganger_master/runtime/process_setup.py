"""Set-up of a process: its log lines, its garbage collection, and its threads of linear algebra."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Allocations before a collection of the youngest generation: most objects of a burst of calls die without one.
_YOUNGEST: Final = 20_000


def settle() -> None:
    """Exclude all present objects from garbage collection; for a program that has just loaded its state.

    The state is large, lives as long as the program and holds no cycles.
    """
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


_NAMES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit linear algebra to one thread in processes started, and libraries first imported, within this context."""
    before = {name: os.environ.get(name) for name in _NAMES}
    os.environ.update(dict.fromkeys(_NAMES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
