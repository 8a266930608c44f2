"""The gate of a launch for another account. Its launcher is that account's program, so it is given no control group and
no log to open. Each process that it starts comes to this socket instead: the kernel names it, the daemon puts it into
the gang's control groups and hands it its log, open. Until then it runs nothing of the job."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ganger.injob.launcher.rank_tree import tree_name
from ganger.injob.process_identity import peer_of, user_of
from ganger.text import os_failure

from ganger_daemon.node.accounts import Account
from ganger_daemon.node.daemon_files import GangPaths

log = logging.getLogger(__name__)

# Longest wait for what a process that has come says; it says it at once.
_WORDS_S = 2.0
_MOST_BYTES = 4096
# Longest wait for a process that allocates memory for the launched ones.
_LATE_S = 20.0
_LOOK_S = 0.1
_BACKLOG = 256


class LaunchGate:
    """A context in which the processes of one launch pass. `place`: of the socket, in a directory of this process;
    `groups`: cgroup.procs files, in the order to enter; `logs`: by the launcher's names of the processes; `visits`: how
    many processes come, some of them after the context has ended."""

    def __init__(
        self, place: Path, account: Account, groups: Sequence[str], logs: Mapping[str, Path], visits: int
    ) -> None:
        self._place, self._account = place, account
        self._groups, self._logs = groups, logs
        self._left, self._until = visits, math.inf
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="launch-gate", daemon=True)

    def __enter__(self) -> LaunchGate:
        """Raises OSError."""
        try:
            self._place.unlink(missing_ok=True)
            self._listener.bind(str(self._place))
            os.chown(self._place, self._account.uid, self._account.gid)
            self._place.chmod(0o600)
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._until = time.monotonic() + (_LATE_S if error is None else 0.0)
        if error is not None:
            self._thread.join()

    def _serve(self) -> None:
        with self._listener:
            self._listener.settimeout(_LOOK_S)
            while self._left > 0 and time.monotonic() < self._until:
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:
                    log.warning("gate closed", extra={"gate": str(self._place), "error": str(error)})
                    break
                self._left -= 1
                with connection:
                    self._answer(connection)
        with suppress(OSError):
            self._place.unlink(missing_ok=True)

    def _answer(self, connection: socket.socket) -> None:
        try:
            self._let_in(connection)
        except (OSError, LookupError, ValueError, AttributeError, RecursionError) as error:
            log.warning("process not let into its gang", extra={"gate": str(self._place), "error": str(error)})
            with suppress(OSError):
                connection.send(json.dumps({"error": os_failure(error)[:500]}).encode())

    def _let_in(self, connection: socket.socket) -> None:
        peer = peer_of(connection)
        if peer.uid != self._account.uid:
            raise PermissionError(f"process {peer.pid} runs as user {peer.uid}, not as {self._account.name}")
        connection.settimeout(_WORDS_S)
        place = self._logs[str(json.loads(connection.recv(_MOST_BYTES)).get("name"))]
        # It waits for the answer, so its pid is its own still; unless it was killed, and then the pid may be another's.
        if user_of(peer.pid) != self._account.uid:
            raise PermissionError(f"process {peer.pid} is none of {self._account.name}'s any more")
        for path in self._groups:
            _write(path, peer.pid)
        output = _open_log(place, peer.pid)
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", output))]
            connection.sendmsg([b"{}"], rights)
        finally:
            os.close(output)


def gate_of(
    paths: GangPaths, groups: Sequence[str], launches: Sequence[Mapping[str, Any]], *, has_parent: bool = False
) -> AbstractContextManager[object]:
    """Return the context in which these launches, of an account's launcher, enter control groups; without effect where
    they run as the daemon's own user. `has_parent`: the processes have one parent, which comes, too."""
    if paths.account is None:
        return nullcontext()
    logs = {str(one["name"]): Path(one["log"]) for one in launches}
    visits = len(launches) + sum(1 for one in launches if one["arena"] and one["touched_bytes"])
    if has_parent:
        logs[tree_name(str(launches[0]["name"]))] = Path(launches[0]["log"])
        visits += 1
    return LaunchGate(paths.gate, paths.account, groups, logs, visits)


def make_log(path: Path, account: Account) -> None:
    """Make a log that an account may write to, in a directory of this process. Raises OSError."""
    path.touch(mode=0o600)
    os.chown(path, account.uid, account.gid)


def _open_log(place: Path, pid: int) -> int:
    """Open a log as a process sees it: with a file of other mounts, it can have no process image. What the process sees
    in its place is not opened."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    found = [os.open(place, flags)]
    try:
        with suppress(OSError):
            found.append(os.open(f"/proc/{pid}/root{place}", flags))
        is_seen = os.path.samestat(os.fstat(found[0]), os.fstat(found[-1]))
        chosen = found[-1] if is_seen else found[0]
        return os.open(f"/proc/self/fd/{chosen}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    finally:
        for one in found:
            os.close(one)


def _write(path: str, pid: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(pid).encode())
    finally:
        os.close(descriptor)
