"""Sets the counter of `enumerate(loader)` when a loop is entered in the middle.

Python cannot set it, and `for i, batch in enumerate(loader)` is everywhere. The counter is CPython's first field after
the object's head; it is only written after a check that what is read there is what the object itself says.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any


def count_from(iterator: Any, start: int) -> bool:
    """Let every enumerate over `iterator` go on at `start`; False if one could not be set."""
    counters = [found for found in gc.get_referrers(iterator) if type(found) is enumerate]
    return all(_set(counter, start) for counter in counters)


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
