"""Named places at which a test may have this process killed: GANGER_FAILPOINTS="name[:count],...", count = which hit
fires."""

from __future__ import annotations

import os
import signal
import threading

NAMES = frozenset(
    {
        "after-prepare",
        "partial-acks",
        "mid-stream",
        "before-move-commit",
        "parked-before-report",
        "between-fork-and-page",
        "mid-fsync",
        "before-rename",
        "after-rename",
        "order-half-written",
        "before-reap",
    }
)

_lock = threading.Lock()
_left: dict[str, int] | None = None


def hit(name: str) -> None:
    """Dies by SIGKILL when the environment asked for it here; otherwise costs a dictionary look-up."""
    assert name in NAMES, f"failpoint {name} is not in the table"
    global _left
    if _left is None:
        _left = parse(os.environ.get("GANGER_FAILPOINTS", ""))
    if name not in _left:
        return
    with _lock:
        _left[name] -= 1
        if _left[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def parse(text: str) -> dict[str, int]:
    """Hits left by name. Names of other programs are let through: one variable serves master and daemon."""
    left: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = item.partition(":")
        if name in NAMES:
            left[name] = int(count) if count else 1
    return left
