"""Exits of a gang's local ranks, and the stored outcome of the gang's part on this node, which never changes. An exit
status is the launcher's record, else the code that the agent left in the page, else unknown."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ganger_daemon.core.part_facts import SIGKILL, PartOutcome, RankExit
from ganger_daemon.node.daemon_files import GangPaths, make_directory, read_json, write_json
from ganger_daemon.node.process_identity import NO_PROCESS, ProcessId, has_other_user, is_alive

log = logging.getLogger(__name__)


def exit_of(record: Path, process: ProcessId, page_exit_code: int | None, launcher_lives: bool) -> RankExit | None:
    """Return how a rank ended; None while it lives, or while its launcher may still record it.

    A missing record counts only when neither the process nor its launcher is left to write one."""
    recorded = _recorded(read_json(record), process, page_exit_code)
    if recorded is not None:
        return recorded
    if is_alive(process) or launcher_lives:
        return None
    return RankExit(known=False) if page_exit_code is None else RankExit(page_exit_code)


def _recorded(fields: Mapping[str, Any], process: ProcessId, page_exit_code: int | None) -> RankExit | None:
    """Return the exit in a launcher's record; None if it is of another process or cannot be read."""
    if not fields:
        return None
    try:
        # A record of another pid belongs to an earlier launch; after a reboot no pid is known, and any record counts.
        if process.pid and int(fields.get("pid") or 0) not in (0, process.pid):
            return None
        code, number = fields.get("code"), fields.get("signal")
        at = float(fields.get("time") or 0.0)
        if code is None and not number:
            return RankExit(known=False, at=at) if page_exit_code is None else RankExit(page_exit_code, at=at)
        return RankExit(int(code or 0) & 0xFF, int(number or 0) & 0x7F, at=at)
    except (TypeError, ValueError, OverflowError):
        return None


class StoredOutcome(NamedTuple):
    """An outcome, and the step of the checkpoint that the gang ended with, if any."""

    outcome: PartOutcome
    step: int | None


def keep(paths: GangPaths, outcome: PartOutcome, step: int | None) -> None:
    """Store the outcome of a gang's part. It is durable when this returns."""
    make_directory(paths.job)
    write_json(paths.outcome, {**msgspec.to_builtins(outcome), "step": step}, durable=True)


def kept(paths: GangPaths) -> StoredOutcome | None:
    """Return the stored outcome; None if the gang has not ended or the file cannot be read."""
    fields = read_json(paths.outcome)
    if not fields:
        return None
    try:
        return StoredOutcome(msgspec.convert(fields, PartOutcome), msgspec.convert(fields.get("step"), int | None))
    except msgspec.ValidationError as error:
        log.warning("outcome cannot be read", extra={"path": str(paths.outcome), "error": repr(error)})
        return None


# A live launcher records an exit at once; after this long, a missing record counts as lost.
_RECORD_S = 3.0
# A dead launcher leaves a process that records it within a moment.
_ORPHANED_S = 0.5


class ExitWatcher:
    """Processes and exits of one gang's local ranks, and how its part on this node ended.

    `settled`: the stored outcome; `is_reaped`: nothing of the gang is left but its outcome."""

    def __init__(self, paths: GangPaths, wake: Callable[[], None]) -> None:
        self._paths = paths
        self._wake = wake
        self._pidfds: dict[int, int] = {}
        self._dead_since: dict[int, float] = {}
        self.processes: dict[int, ProcessId] = {}
        self.exits: dict[int, RankExit] = {}
        self.settled: PartOutcome | None = None
        self.is_reaped = False

    def watch(self, rank: int, process: ProcessId) -> None:
        """Report the end of a rank's process. Of an account's gang, a process of another user counts as none: the
        account's launcher may have named a pid before it was in use."""
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
        # Only now: the descriptor is of this process, and remains so.
        if self._paths.account is not None and has_other_user(process.pid, self._paths.account.uid):
            os.close(fd)
            self.processes[rank] = NO_PROCESS
            self._note_dead(rank)
            log.warning("process of another user is no rank", extra={"group": self._paths.group, "pid": process.pid})
            return
        self._pidfds[rank] = fd
        asyncio.get_running_loop().add_reader(fd, self._died, rank)

    def close(self) -> None:
        for rank in tuple(self._pidfds):
            self._close(rank)

    @property
    def awaited(self) -> bool:
        """Whether the exit status of some dead rank is not known yet."""
        return any(rank not in self.exits for rank in self._dead_since)

    def live(self) -> tuple[ProcessId, ...]:
        return tuple(process for rank, process in sorted(self.processes.items()) if rank not in self._dead_since)

    def is_live(self, rank: int) -> bool:
        return rank in self.processes and rank not in self._dead_since

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended a rank."""
        return any(exit_.signal == SIGKILL for exit_ in self.exits.values())

    async def store(self, outcome: PartOutcome, step: int | None) -> None:
        """Store how the gang's part ended, once. `step`: of the checkpoint that it ended with."""
        if self.settled is None:
            self.settled = outcome
            await asyncio.to_thread(keep, self._paths, outcome, step)

    async def settle(self, page_exit_code: Callable[[int], int | None], launcher_lives: Callable[[], bool]) -> None:
        """Read the exit status of ranks that have died. `launcher_lives` may block."""
        for rank, since in sorted(self._dead_since.items()):
            if rank in self.exits:
                continue
            record, process = self._paths.exit(rank), self.processes[rank]
            found = exit_of(record, process, page_exit_code(rank), launcher_lives=True)
            if found is None:
                passed_s = time.monotonic() - since
                lives = passed_s < _ORPHANED_S or (passed_s < _RECORD_S and await asyncio.to_thread(launcher_lives))
                found = exit_of(record, process, page_exit_code(rank), lives)
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
