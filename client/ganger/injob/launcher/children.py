"""Who a launcher looks after, and the arenas they share with it."""

from __future__ import annotations

import fcntl
import os
from typing import Callable

from ganger.injob.launcher.exits import start_ticks


class Child:
    """One process: a rank, a rendezvous store or a helper. ``adopted``: another launcher was its parent."""

    def __init__(
        self,
        name: str,
        kind: str,
        pid: int,
        page: str = "",
        exit_path: str = "",
        *,
        adopted: bool = False,
        ticks: int | None = None,
        pidfd: int | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.pid = pid
        self.page = page
        self.exit_path = exit_path
        self.adopted = adopted
        self.pidfd = os.pidfd_open(pid) if pidfd is None else pidfd
        self.start_ticks = (start_ticks(pid) or 0) if ticks is None else ticks
        self.settle: Callable[[], None] | None = None  # hears whether it could begin, until it has said so
        self.launch_error: dict[str, str] = {}
        self.port = 0  # of a store


def make_arena(existing: int | None, name: str, size: int) -> int:
    """Return a memfd of at least ``size`` bytes, the existing one if there is one. Raises OSError."""
    if existing is None:
        existing = os.memfd_create(_memfd_name(name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(existing, size)
        # A job that shrank it would kill the daemon that streams from it.
        fcntl.fcntl(existing, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    elif os.fstat(existing).st_size < size:
        os.ftruncate(existing, size)
    return existing


def recover_arena(pid: int, name: str) -> int | None:
    """Find the arena of a rank another launcher started, among the rank's own descriptors."""
    wanted = f"/memfd:{_memfd_name(name)} (deleted)"
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{entry}"
            if os.readlink(path) == wanted:
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pass
    return None


def _memfd_name(name: str) -> str:
    # The kernel allows 249 bytes; slashes are fine.
    return f"ganger {name}"[:240]
