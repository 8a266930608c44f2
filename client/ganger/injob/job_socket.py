"""The job's side of its socket: rare messages to the daemon, one JSON object per packet, that never make training wait.
While the daemon is away they wait in a bounded queue; every new connection begins with the hello. The daemon sends
empty messages: it has changed the page, and a rank that waits reads it."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections import deque
from typing import Any

from ganger.injob.process_identity import peer_of

_QUEUE_LIMIT = 64  # Packets; a job that sends more while its daemon is away loses the oldest
_PACKET_LIMIT = 60_000  # Bytes; below the default send buffer, so that a packet goes whole or not at all
_FIRST_RETRY_NS = 50_000_000
_LAST_RETRY_NS = 5_000_000_000
_SHORTEST_SLEEP = 20e-6
_LONGEST_SLEEP = 1e-3
# Parked, and the daemon says when there is something new: wake-ups are for what it could not say. Without its socket a
# rank looks by itself: soon at first, later seldom, for 1,000 wake-ups a second of every parked rank would be felt.
_TOLD_SLEEP = 0.2
_PARKED_SLEEP = 5e-3
_PARKED_AFTER = 5.0


class JobSocketClient:
    """One connection to ``path`` (SOCK_SEQPACKET); with an empty path there is no daemon and messages are dropped.

    Only `wait` blocks, and nothing raises: progress and state are in the page, the socket only explains them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: socket.socket | None = None
        self._hello: dict[str, Any] | None = None
        self._queue: deque[bytes] = deque(maxlen=_QUEUE_LIMIT)
        self._retry_ns = _FIRST_RETRY_NS
        self._next_try_ns = 0
        self._is_suspended = False

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def hello(self, message: dict[str, Any], now: int) -> None:
        """Identify this rank to the daemon, now and after every reconnection; ``now``: ns of one monotonic clock."""
        self._hello = message
        self._is_suspended = False
        self._drop()
        # Rare, and perhaps the last word of a short job: it does not wait its turn.
        self._next_try_ns = 0
        self.tend(now)

    def send(self, message: dict[str, Any], now: int) -> None:
        if not self._path:
            return
        self._queue.append(_encode(message))
        self.tend(now)

    def tend(self, now: int) -> None:
        """Reconnect if it is time to, send what waits, notice that the daemon has gone."""
        if not self._path or self._hello is None or self._is_suspended:
            return
        if self._connection is None and now >= self._next_try_ns:
            self._connect(now)
        if self._connection is None:
            return
        try:
            while self._queue:
                self._connection.send(self._queue[0])
                self._queue.popleft()
            if now >= self._next_try_ns:
                # A packet means that the page changed; an empty read means that the daemon has closed the socket.
                self._next_try_ns = now + _LAST_RETRY_NS
                if not self._connection.recv(4096):
                    self._drop()
        except BlockingIOError:
            return
        except OSError:
            self._drop()

    def wait(self, seconds: float) -> None:
        """Block until the daemon reports a change of the page, for at most `seconds`, without use of the processor."""
        if self._connection is None:
            time.sleep(seconds)
            return
        looking = select.poll()
        looking.register(self._connection, select.POLLIN)
        if not looking.poll(1000.0 * seconds):
            return
        try:
            if not self._connection.recv(4096):
                self._drop()
        except BlockingIOError:
            return
        except OSError:
            self._drop()

    def suspend(self) -> None:
        """Have no connection until `resume` or `hello` is called: a process image must not lead outside."""
        self._drop()
        self._is_suspended = True

    def resume(self, now: int) -> None:
        """Connect again after `suspend`; without effect otherwise."""
        if self._is_suspended:
            self._is_suspended = False
            self._next_try_ns = 0
            self.tend(now)

    def close(self) -> None:
        self._drop()
        self._path = ""

    def _connect(self, now: int) -> None:
        self._next_try_ns = now + self._retry_ns
        self._retry_ns = min(self._retry_ns * 2, _LAST_RETRY_NS)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            connection.connect(self._path)
            if peer_of(connection).uid not in (0, os.getuid()):
                raise OSError("no daemon of this user")
            connection.send(_encode(self._hello or {}))
        except OSError:
            connection.close()
            return
        self._connection = connection
        self._retry_ns = _FIRST_RETRY_NS

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Backoff:
    """Waits longer each time: 20 us at first, so that an agreement costs microseconds, 1 ms soon, 5 ms when parked."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again with the shortest wait."""
        self._delay = _SHORTEST_SLEEP
        self._began = time.monotonic()

    def sleep(self) -> None:
        time.sleep(self._delay)
        limit = _PARKED_SLEEP if time.monotonic() - self._began > _PARKED_AFTER else _LONGEST_SLEEP
        self._delay = min(self._delay * 1.5, limit)

    def until_message(self, socket: JobSocketClient) -> None:
        """Wait for a message on the socket, such as an order for a rank that rests."""
        if socket.connected:
            socket.wait(_TOLD_SLEEP)
        else:
            self.sleep()


def _encode(message: dict[str, Any]) -> bytes:
    data = json.dumps(message, separators=(",", ":"), default=str).encode()
    if len(data) <= _PACKET_LIMIT:
        return data
    shortened: dict[str, Any] = {}
    texts: list[str] = [key for key, value in message.items() if isinstance(value, str)]
    for key, value in message.items():
        shortened[key] = value[: _PACKET_LIMIT // (2 * max(1, len(texts)))] if key in texts else value
    data = json.dumps(shortened, separators=(",", ":"), default=str).encode()
    return data if len(data) <= _PACKET_LIMIT else b'{"event":"note","message":"a message was too long to send"}'
