"""Socket of a job: rare packets of JSON from the ranks (hello, note, reached, error). They are hints; the pages count.

A packet wakes the gang's loop, so that it sees a reached order at once. A packet to a parked rank wakes it, so that it
need not poll its page. A job without its socket loses nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ganger.injob.process_identity import peer_of

log = logging.getLogger(__name__)

MAX_PACKET_BYTES = 64 << 10
MAX_CONNECTIONS = 64
_LOOK = b"{}"
# More than all ranks of a node send in a second, and too few to slow the loop down.
_PACKETS_PER_PERIOD = 200
_PERIOD_SECONDS = 1.0


class JobSocketServer:
    """Server at `path` that calls `received` with each packet that is a JSON object."""

    def __init__(self, path: Path, received: Callable[[dict[str, Any]], None]) -> None:
        self._path = path
        self._received = received
        self._socket: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._paused: set[socket.socket] = set()
        self._packets_in_period = 0

    def start(self) -> None:
        """Listen, replacing the socket of a former daemon. Needs a running event loop."""
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener.bind(str(new))
        os.chmod(new, 0o600)
        listener.listen(64)
        os.replace(new, self._path)
        self._socket = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def close(self) -> None:
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
        if len(self._connections) >= MAX_CONNECTIONS or peer_of(connection).uid not in (0, os.geteuid()):
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        asyncio.get_running_loop().add_reader(connection, self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        if self._packets_in_period == 0:
            asyncio.get_running_loop().call_later(_PERIOD_SECONDS, self._resume_reading)
        elif self._packets_in_period >= _PACKETS_PER_PERIOD:
            # a rank that sends more waits: all gangs share this loop
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
