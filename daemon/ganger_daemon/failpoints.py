"""Places at which a test may kill the daemon; see ganger.failpoints."""

from __future__ import annotations

from functools import cache

from ganger.failpoints import Failpoints

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


def hit(name: str) -> None:
    """End this process by SIGKILL if the environment names this failpoint."""
    _of_process().passing(name)


@cache
def _of_process() -> Failpoints:
    return Failpoints(NAMES)
