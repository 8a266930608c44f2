"""Sets the counter of `enumerate(loader)` when a loop is entered in the middle.

Python cannot set it, and `for i, batch in enumerate(loader)` is everywhere. The counter is CPython's first field after
the object's head; it is only written after a check that what is read there is what the object itself says.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import types
from typing import Any


def count_from(iterator: Any, start: int) -> bool:
    """Let every enumerate over `iterator` go on at `start`; False if one could not be set.

    To be called while the script fetches from `iterator`, so that generators in between (progress bars) are known by
    being on the stack.
    """
    generators = _fetching_generators()
    counters = [found for found in gc.get_objects() if type(found) is enumerate]
    return all(_set(counter, start) for counter in counters if _counts(counter, iterator, generators))


def _fetching_generators() -> list[Any]:
    """The frames of the generators that are waiting for the fetch in progress, innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("ganger."):
        frame = frame.f_back
    found = []
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        found.append(frame)
        frame = frame.f_back
    return found


def _counts(counter: Any, iterator: Any, generators: list[Any]) -> bool:
    for item in gc.get_referents(counter):
        if item is iterator:
            return True
        if isinstance(item, types.GeneratorType) and any(item.gi_frame is frame for frame in generators):
            return True
    return False


def _set(counter: Any, start: int) -> bool:
    if sys.implementation.name != "cpython":
        return False
    began = _count(counter)
    field = ctypes.c_ssize_t.from_address(id(counter) + object.__basicsize__)
    if field.value != began:
        return False
    # enumerate(loader, 1) began at 1 and has counted nothing in this process
    field.value = began + start
    if _count(counter) != began + start:
        field.value = began
        return False
    return True


def _count(counter: Any) -> int:
    count: int = counter.__reduce__()[1][1]
    return count
