"""What a test does in the place of the daemon while a rank's control is in a call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from kit.waiting import eventually


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Let `act` run in a thread of its own during the body, and wait for its end."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def within(condition: Callable[[], object], what: str) -> None:
    eventually(condition, within_seconds=20, what=what, every_seconds=0.001)
