"""Wait for a condition, with a deadline and a story to tell when it does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

# Never set: waiting on it paces a poll without pretending that time is a synchronisation.
_pace = threading.Event()


def eventually(
    probe: Callable[[], Value],
    *,
    within_seconds: float = 30.0,
    what: str = "",
    story: Callable[[], str] | None = None,
    every_seconds: float = 0.02,
) -> Value:
    """The first truthy answer of `probe`. Fails with `what` and `story()` when the deadline passes."""
    deadline = time.monotonic() + within_seconds
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            told = f"\n{story()}" if story is not None else ""
            raise AssertionError(f"not within {within_seconds:g} s: {what or probe}{told}")
        _pace.wait(every_seconds)
