"""The processes that a launcher looks after."""

from __future__ import annotations

import os
from typing import Callable

from ganger.injob.launcher.lease_keeper import LeaseKeeper
from ganger.injob.processes import start_ticks


class LauncherChild:
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
        keeper: LeaseKeeper | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.pid = pid
        self.page = page
        self.exit_path = exit_path
        self.adopted = adopted
        self.keeper = keeper
        self.pidfd = os.pidfd_open(pid) if pidfd is None else pidfd
        self.start_ticks = (start_ticks(pid) or 0) if ticks is None else ticks
        self.settle: Callable[[], None] | None = None  # hears whether it could begin, until it has said so
        self.launch_error: dict[str, str] = {}
        self.port = 0  # of a store
