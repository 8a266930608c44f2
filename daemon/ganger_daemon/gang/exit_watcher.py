"""Who of a gang's local ranks is gone, and how: watched by pidfd, read from what the launcher recorded."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from ganger_daemon.core.gang_judgement import RankExit
from ganger_daemon.gang.exits import exit_of
from ganger_daemon.node.directories import GangPaths
from ganger_daemon.node.processes import ProcessId, is_alive

# A launcher that lives records an exit at once; after this nobody will.
_RECORD_SECONDS = 3.0


class Deaths:
    """Processes and exits of local ranks. `launcher_lives` may block and is called only for the dead."""

    def __init__(self, paths: GangPaths, wake: Callable[[], None], launcher_lives: Callable[[], bool]) -> None:
        self._paths = paths
        self._wake = wake
        self._launcher_lives = launcher_lives
        self._pidfds: dict[int, int] = {}
        self._dead_since: dict[int, float] = {}
        self.processes: dict[int, ProcessId] = {}
        self.exits: dict[int, RankExit] = {}

    def watch(self, rank: int, process: ProcessId) -> None:
        if self.processes.get(rank) == process:
            return
        self.processes[rank] = process
        try:
            fd = os.pidfd_open(process.pid)
        except (OSError, OverflowError):
            self._note_dead(rank)
            return
        if not is_alive(process):
            os.close(fd)
            self._note_dead(rank)
            return
        self._pidfds[rank] = fd
        asyncio.get_running_loop().add_reader(fd, self._died, rank)

    def close(self) -> None:
        for rank in tuple(self._pidfds):
            self._close(rank)

    @property
    def awaited(self) -> bool:
        """Somebody died and it is not known yet how."""
        return any(rank not in self.exits for rank in self._dead_since)

    def live(self) -> tuple[ProcessId, ...]:
        return tuple(process for rank, process in sorted(self.processes.items()) if rank not in self._dead_since)

    def is_live(self, rank: int) -> bool:
        return rank in self.processes and rank not in self._dead_since

    async def settle(self, page_exit_codes: Callable[[int], int | None]) -> None:
        """Finds out how those that died ended."""
        for rank, since in sorted(self._dead_since.items()):
            if rank in self.exits:
                continue
            record, process = self._paths.exit(rank), self.processes[rank]
            found = exit_of(record, process, page_exit_codes(rank), launcher_lives=True)
            if found is None:
                lives = time.monotonic() - since < _RECORD_SECONDS and await asyncio.to_thread(self._launcher_lives)
                found = exit_of(record, process, page_exit_codes(rank), lives)
            if found is not None:
                self.exits[rank] = found

    def _died(self, rank: int) -> None:
        self._close(rank)
        self._note_dead(rank)
        self._wake()

    def _note_dead(self, rank: int) -> None:
        self._dead_since.setdefault(rank, time.monotonic())

    def _close(self, rank: int) -> None:
        fd = self._pidfds.pop(rank, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
