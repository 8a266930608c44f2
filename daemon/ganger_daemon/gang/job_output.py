"""Output of one gang's ranks. Packets on the job's socket are rare, JSON, and hints, as the pages count; one wakes the
gang's loop, or a parked rank, and a job without its socket loses nothing else. Logs and the metric series are copied to
storage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ganger.injob.metrics import series_path
from ganger.injob.process_identity import peer_of

from ganger_daemon.gang.gang_context import GangContext, summary_of
from ganger_daemon.node.accounts import Account

log = logging.getLogger(__name__)

MAX_PACKET_BYTES = 64 << 10
MAX_CONNECTIONS = 64
_LOOK = b"{}"
# More than all ranks of a node send in a second, and too few to slow the loop down.
_PACKETS_PER_PERIOD = 200
_PERIOD_S = 1.0
# Most packets of a job that are logged; further ones are only in the job's own log.
_LOGGED_PACKETS = 10_000
# Interval of copying logs; longest wait of a gang that has ended for the copy, if storage hangs.
_COPY_S = 10.0
_LAST_COPY_S = 30.0


class JobSocketServer:
    """Server at `path` that calls `received` with each JSON object. `account`: of the job; None: this process's."""

    def __init__(self, path: Path, received: Callable[[dict[str, Any]], None], account: Account | None = None) -> None:
        self._path = path
        self._account = account
        self._received = received
        self._socket: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._paused: set[socket.socket] = set()
        self._packets_in_period = 0
        self._is_closed = False

    def start(self) -> None:
        """Listen in the running event loop, replacing a former daemon's socket; log a failure. Not after `close`."""
        try:
            if not self._is_closed:
                self._listen()
        except OSError as error:
            log.warning("job socket not made", extra={"error": str(error)})

    def _listen(self) -> None:
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(new))
            if self._account is not None:
                os.chown(new, self._account.uid, self._account.gid)
            os.chmod(new, 0o600)
            listener.listen(64)
            os.replace(new, self._path)
        except OSError:
            listener.close()
            raise
        self._socket = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    @property
    def _users(self) -> tuple[int, ...]:
        return (0, os.geteuid() if self._account is None else self._account.uid)

    def close(self) -> None:
        """Close the socket and all connections for good."""
        self._is_closed = True
        self.pause()

    def pause(self) -> None:
        """Close the socket and all connections until `start`."""
        loop = asyncio.get_running_loop()
        for connection in tuple(self._connections):
            self._drop(connection)
        if self._socket is not None:
            loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def nudge(self) -> None:
        """Report a change of the pages. A rank that does not read is skipped: it polls its page from time to time."""
        for connection in tuple(self._connections):
            try:
                connection.send(_LOOK)
            except OSError:
                continue

    def _accept(self) -> None:
        assert self._socket is not None, "a closed socket accepts nothing"
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        if len(self._connections) >= MAX_CONNECTIONS or peer_of(connection).uid not in self._users:
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        asyncio.get_running_loop().add_reader(connection, self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        if self._packets_in_period == 0:
            asyncio.get_running_loop().call_later(_PERIOD_S, self._resume_reading)
        elif self._packets_in_period >= _PACKETS_PER_PERIOD:
            # A rank that sends more waits: all gangs share this loop.
            asyncio.get_running_loop().remove_reader(connection)
            self._paused.add(connection)
            return
        self._packets_in_period += 1
        try:
            packet = connection.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._drop(connection)
            return
        try:
            fields = json.loads(packet)
        except (ValueError, RecursionError):
            return
        if isinstance(fields, dict):
            self._received(fields)

    def _resume_reading(self) -> None:
        self._packets_in_period = 0
        for connection in self._paused & self._connections:
            asyncio.get_running_loop().add_reader(connection, self._read, connection)
        self._paused.clear()

    def _drop(self, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
        self._connections.discard(connection)


class PacketLog:
    """Logs the packets of one job, each error with its last line only."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._count = 0

    def add(self, packet: dict[str, Any]) -> None:
        if packet.get("event") not in ("error", "note", "hello"):
            return
        self._count += 1
        if self._count <= _LOGGED_PACKETS:
            if "message" in packet:
                packet = {**packet, "message": summary_of(str(packet["message"]))}
            log.info("packet of the job", extra={"job": self._job, "packet": str(packet)[:500]})
        elif self._count == _LOGGED_PACKETS + 1:
            log.warning("further packets of the job are not logged", extra={"job": self._job})


class LogMirror:
    """Copies the logs of one gang's local ranks to storage, and the series of rank 0 to its log: in a task of its own,
    as storage may hang."""

    def __init__(self, context: GangContext, job: str) -> None:
        self._context = context
        self._job = job
        self._copied_at = time.monotonic()
        # Size and time of the job's series when it was copied.
        self._series_seen: tuple[int, int] | None = None
        self._copying: asyncio.Task[None] | None = None

    def follow(self, now: float) -> None:
        """Begin a copy, which enforces the limit, if one is due. `now`: seconds of the monotonic clock."""
        paths, ranks = self._context.paths, self._context.part.ranks
        is_due = now - self._copied_at >= _COPY_S
        if is_due or self._context.host.logs.is_too_large(paths.job_uid, ranks, paths.epoch):
            self._copied_at = now
            self.begin()

    def begin(self) -> None:
        if self._copying is None or self._copying.done():
            self._copying = asyncio.create_task(self._copy(is_last=False))

    async def finish(self) -> None:
        """Copy the rest of the logs, to which nothing is written any more."""
        if self._copying is not None:
            await asyncio.wait((self._copying,), timeout=_LAST_COPY_S)
        await self._copy(is_last=True)

    async def _copy(self, is_last: bool) -> None:
        host = self._context.host
        try:
            await host.storage.work.run(self._copy_now, is_last, within_s=_LAST_COPY_S)
        except OSError as error:
            log.warning("log not copied", extra={"job": self._job, "error": str(error)})

    def _copy_now(self, is_last: bool) -> None:
        logs, paths, ranks = self._context.host.logs, self._context.paths, self._context.part.ranks
        logs.mirror_all(paths.job_uid, ranks, paths.epoch, is_last)
        if 0 not in ranks:
            return
        written = series_written(paths.work)
        with contextlib.suppress(FileNotFoundError):
            status = written.lstat()
            seen = (status.st_size, status.st_mtime_ns)
            if seen != self._series_seen:
                logs.mirror_series(paths.job_uid, paths.epoch, written)
                self._series_seen = seen


def series_written(work: Path) -> Path:
    """Return where rank 0 writes its series in a gang's directory for its job."""
    return Path(series_path(str(work)))
