"""What keeps a daemon from starting, and the state and run directories that it claims for itself alone."""

from __future__ import annotations

import fcntl
import os
import stat
import time
import uuid
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, Final

from ganger.text import os_reason
from ganger.wire.endpoints import CredentialError, EndpointError

from ganger_daemon.node.daemon_files import (
    LOCK,
    DaemonPaths,
    DirectoryError,
    DirectoryNameError,
    choose_run_directory,
    make_private,
    read_json,
    remove_tree,
    write_json,
)
from ganger_daemon.node.node_context import Storage, StorageHungError

_LOCK_TRIES, _LOCK_RETRY_S = 3, 0.01
_STORAGE_PATIENCE_S: Final = 2.0


class DaemonObstacle(Enum):
    """Kind of obstacle that keeps a daemon from starting."""

    SETTING = "a setting cannot be used"
    STATE = "something is in use"
    RIGHTS = "a right is missing"


class DaemonError(Exception):
    """The daemon cannot start; the message says why and what to do."""

    def __init__(self, message: str, obstacle: DaemonObstacle = DaemonObstacle.STATE) -> None:
        super().__init__(message)
        self.obstacle = obstacle


def obstacle_of(error: BaseException) -> DaemonObstacle:
    """Return the kind of an error of the system, of an address or of a certificate."""
    if isinstance(error, CredentialError | PermissionError) or isinstance(error.__cause__, PermissionError):
        return DaemonObstacle.RIGHTS
    return DaemonObstacle.SETTING if isinstance(error, EndpointError) else DaemonObstacle.STATE


class ClaimedDirectories:
    """The directories of one daemon, locked until `release`. Once they are claimed, `paths` has the places in them, and
    `machine_uuid` the name of the machine that its first start gave it."""

    paths: DaemonPaths
    machine_uuid: str

    def __init__(self, state: Path, node: str) -> None:
        self._state, self._node = state, node
        self._locks: list[int] = []
        self._is_run_named = True

    def claim(self, run: Path | None, *, are_accounts_served: bool) -> dict[str, Any]:
        """Lock the state and run directories for this daemon, and return the fields of node.json. `run`: the run
        directory that was named, if one was; `are_accounts_served`: jobs of other accounts must reach them. Raises
        DaemonError."""
        try:
            make_private(self._state)
            self._take_lock(self._state, "--state-dir")
            known = self._claim_state()
            self._is_run_named = run is not None
            run = run or choose_run_directory(self._state, known)
            self.paths = DaemonPaths(self._state, run.absolute(), self.machine_uuid)
            self.paths.prepare(are_accounts_served=are_accounts_served)
            self._take_lock(self.paths.run, "--run-dir")
        except DirectoryError as error:
            named = isinstance(error, DirectoryNameError)
            raise DaemonError(str(error), DaemonObstacle.SETTING if named else obstacle_of(error)) from error
        return known

    def _claim_state(self) -> dict[str, Any]:
        """Return the fields of node.json. The first start writes the machine UUID there, before it makes anything
        that is named after it. Raises DaemonError."""
        path = self._state / "node.json"
        known = read_json(path)
        former = str(known.get("node") or self._node)
        if former != self._node:
            # Its gangs belong to that node: under this name they would not be adopted, and their devices be given away.
            raise DaemonError(
                f"{self._state} is that of node {former}, whose jobs may still run: give --node {former}, or, once"
                " they have ended, another --state-dir"
            )
        if not known.get("machine_uuid"):
            known |= {"node": self._node, "machine_uuid": str(uuid.uuid4())}
            try:
                write_json(path, known, durable=True)
            except OSError as error:
                raise DaemonError(f"cannot write {path}: {os_reason(error)}", obstacle_of(error)) from error
        self.machine_uuid = str(known["machine_uuid"])
        return known

    def _take_lock(self, directory: Path, flag: str) -> None:
        """Lock a directory for this daemon: two daemons with one would take each other's gangs, sockets and launchers
        for their own. `flag`: the option that names it. Raises DaemonError."""
        path = directory / LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DaemonError(f"cannot use {path}: {os_reason(error)}", obstacle_of(error)) from error
        try:
            _lock(lock)
        except OSError as error:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise DaemonError(
                f"another daemon (pid {owner or 'unknown'}) uses {directory}: stop it or choose another {flag}"
            ) from error
        self._locks.append(lock)
        # For the message of the next daemon only: a full disk is no reason not to start.
        with suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)

    def tidy(self) -> None:
        """Remove the run directory, unless it was named: no gang is here any more. Blocks."""
        if not self._is_run_named:
            remove_tree(self.paths.run)

    def release(self) -> None:
        """Let another daemon claim them."""
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()


def _lock(file: int) -> None:
    """Raises OSError if another daemon has the lock. One that starts may look at it for a moment."""
    for _ in range(_LOCK_TRIES):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_RETRY_S)
    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def check_storage(storage: Storage, former: str) -> None:
    """Raise DaemonError where --storage names no directory. What this daemon has used before may be away for a while,
    and what hangs is there."""
    path = storage.override
    if path is None or str(path.absolute()) == former:
        return
    try:
        is_directory = stat.S_ISDIR((await storage.work.run(path.stat, within_s=_STORAGE_PATIENCE_S)).st_mode)
        why = "" if is_directory else "it is not a directory"
    except StorageHungError:
        return
    except OSError as error:
        why = os_reason(error)
    if why:
        raise DaemonError(
            f"--storage {path}: {why}; mount the cluster's storage there, or name where this node sees it",
            DaemonObstacle.SETTING,
        )
