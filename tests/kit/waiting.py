"""Wait for a condition, with a deadline and a story to tell when it does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

# Never set: waiting on it paces a poll without pretending that time is a synchronisation.
_pace = threading.Event()
# Between two probes that take long.
_MOST_S = 0.25


def eventually(
    probe: Callable[[], Value],
    *,
    within_seconds: float = 30.0,
    what: str = "",
    story: Callable[[], str] | None = None,
    every_seconds: float = 0.02,
) -> Value:
    """The first truthy answer of `probe`. Fails with `what` and `story()` when the deadline passes.

    A probe that takes long, such as a command to a master, comes less often: what is waited for needs the processors.
    """
    deadline = time.monotonic() + within_seconds
    while True:
        began = time.monotonic()
        value = probe()
        if value:
            return value
        now = time.monotonic()
        if now > deadline:
            told = f"\n{story()}" if story is not None else ""
            raise AssertionError(f"not within {within_seconds:g} s: {what or probe}{told}")
        _pace.wait(max(every_seconds, min(3 * (now - began), _MOST_S)))
