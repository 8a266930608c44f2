"""The stream port: serves the arenas of parked gangs as they fill, and fetches into the arenas of those that move in.

Threads with blocking sockets: the bytes go from memory to socket to memory and never through the event loop. What a
connection may have is decided by the `Sources` the server is given; the token is checked before anything else.
"""

from __future__ import annotations

import hmac
import json
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ganger_daemon.failpoints import hit

from .frames import (
    FRAME_BYTES,
    StreamError,
    StreamRequest,
    limit_silence,
    parse_line,
    parse_request,
    read_line,
    receive_frame,
    send_frame,
)

log = logging.getLogger(__name__)

# A host serves at most this many ranks' states at once: more would only share the same link.
MAX_CONNECTIONS = 128
SOCKET_TIMEOUT_SECONDS = 30.0
SOCKET_BUFFER_BYTES = 4 << 20
# While the arena fills: well below the time a frame takes on a fast link.
FILL_POLL_SECONDS = 0.0005


class Source(Protocol):
    """One rank's arena on the serving side. Called from a thread of the server."""

    def progress(self) -> tuple[int, int]:
        """(bytes of the image, bytes of it that are final); size 0 while it is not known."""

    def valid(self) -> bool:
        """False once this stop is over: the bytes may change under the reader."""

    def open_arena(self) -> int:
        """A file descriptor of the arena; the caller closes it."""


class Sources(Protocol):
    def find(self, request: StreamRequest) -> Source:
        """Raises StreamError when there is nothing to serve."""


class StreamServer:
    """Listens on (host, port); `port` 0 takes a free one."""

    def __init__(
        self, sources: Sources, token: str, host: str = "127.0.0.1", port: int = 0, wait_seconds: float = 3600.0
    ):
        self._sources = sources
        self._token = token
        self._wait_seconds = wait_seconds
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._socket = socket.create_server((host, port), backlog=128)
        self._socket.settimeout(0.5)
        self._thread = threading.Thread(target=self._accept, name="state-stream", daemon=True)
        self._workers: set[threading.Thread] = set()

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"{host}:{port}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops listening and ends every transfer; what was received of one stays valid at the other side."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
        self._socket.close()
        for worker in tuple(self._workers):
            worker.join(2.0)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            worker = threading.Thread(target=self._serve, args=(connection,), name="state-stream-out", daemon=True)
            self._workers.add(worker)
            worker.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(SOCKET_TIMEOUT_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                try:
                    self._answer(connection)
                except StreamError as error:
                    connection.sendall(json.dumps({"error": str(error), "retry": error.retry}).encode() + b"\n")
        except OSError as error:
            log.info("state stream broke off", extra={"error": str(error)})
        finally:
            self._workers.discard(threading.current_thread())
            self._slots.release()

    def _answer(self, connection: socket.socket) -> None:
        request = parse_request(read_line(connection))
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            raise StreamError("the token is wrong", retry=False)
        source = self._sources.find(request)
        size = self._wait_for_size(connection, source)
        if request.offset > size:
            raise StreamError(f"offset {request.offset} lies beyond the image of {size} bytes", retry=False)
        fd = source.open_arena()
        try:
            arena = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        finally:
            os.close(fd)
        try:
            connection.sendall(json.dumps({"size": size}).encode() + b"\n")
            limit_silence(connection, SOCKET_TIMEOUT_SECONDS)
            with memoryview(arena) as whole:
                self._send(connection, source, whole, request.offset)
        finally:
            arena.close()

    def _wait_for_size(self, connection: socket.socket, source: Source) -> int:
        deadline = time.monotonic() + self._wait_seconds
        while True:
            if not source.valid():
                raise StreamError("this stop is over: the gang runs again or has ended", retry=False)
            size, _ = source.progress()
            if size:
                return size
            if self._closing.is_set() or time.monotonic() > deadline:
                raise StreamError("the source has not begun to fill its arena")
            if _has_left(connection):
                raise OSError("the client left")
            time.sleep(FILL_POLL_SECONDS * 2)

    def _send(self, connection: socket.socket, source: Source, whole: memoryview, offset: int) -> None:
        size = len(whole)
        moved = time.monotonic()
        while offset < size:
            if self._closing.is_set():
                return
            if not source.valid():
                return
            _, filled = source.progress()
            end = min(filled, size, offset + FRAME_BYTES)
            # a short piece waits for more, unless it is the last
            if end - offset < FRAME_BYTES and end < size and time.monotonic() - moved < 0.01:
                time.sleep(FILL_POLL_SECONDS)
                continue
            if end <= offset:
                if time.monotonic() - moved > self._wait_seconds:
                    return
                time.sleep(FILL_POLL_SECONDS)
                continue
            with whole[offset:end] as piece:
                send_frame(connection, piece)
            hit("mid-stream")
            offset = end
            moved = time.monotonic()
        if source.valid():
            send_frame(connection, whole[size:])


def _has_left(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(SOCKET_TIMEOUT_SECONDS)


def fetch(
    address: str,
    request: StreamRequest,
    arena_fd: int,
    arena_bytes: int,
    available: Callable[[int], None],
    cancelled: threading.Event,
    attempts: int = 60,
    retry_seconds: float = 0.25,
) -> int:
    """Fetches one rank's image into the arena behind `arena_fd`, telling `available` how many bytes are final; its
    size.

    Reconnects with the offset reached when the connection breaks or a hash does not match. Raises StreamError when the
    source refuses for good, when the image is larger than the arena, or after `attempts` tries without progress.
    """
    offset = request.offset
    left = attempts
    while True:
        begun = offset
        try:
            return _fetch_once(
                address, replace(request, offset=offset), arena_fd, arena_bytes, _noting(available), cancelled
            )
        except _BrokenError as error:
            offset = error.offset
            if cancelled.is_set():
                raise StreamError("the transfer was cancelled", retry=False) from error
            left = attempts if offset > begun else left - 1
            if left <= 0 or not error.retry:
                raise StreamError(str(error), retry=False) from error
            cancelled.wait(retry_seconds)


def _noting(available: Callable[[int], None]) -> Callable[[int], None]:
    highest = 0

    def note(offset: int) -> None:
        nonlocal highest
        if offset > highest:
            highest = offset
            available(offset)

    return note


class _BrokenError(Exception):
    def __init__(self, message: str, offset: int, retry: bool) -> None:
        super().__init__(message)
        self.offset = offset
        self.retry = retry


def _fetch_once(
    address: str,
    request: StreamRequest,
    arena_fd: int,
    arena_bytes: int,
    available: Callable[[int], None],
    cancelled: threading.Event,
) -> int:
    offset = request.offset
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5.0) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            connection.sendall(request.line())
            answer = parse_line(_read_answer(connection, cancelled))
            if "error" in answer:
                raise StreamError(str(answer["error"]), retry=bool(answer.get("retry", True)))
            size = int(answer["size"])
            if size > arena_bytes:
                raise StreamError(f"the image of {size} bytes does not fit the arena of {arena_bytes}", retry=False)
            # filling may pause between two frames: at the source's boundary, on its device
            limit_silence(connection, SOCKET_TIMEOUT_SECONDS * 4)
            with mmap.mmap(arena_fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE) as arena, memoryview(arena) as whole:
                while True:
                    with whole[offset:] as target:
                        length = receive_frame(connection, target)
                    if length == 0:
                        if offset != size:
                            raise StreamError("the stream ended before the image was complete")
                        return size
                    offset += length
                    available(offset)
                    if cancelled.is_set():
                        raise StreamError("the transfer was cancelled", retry=False)
    except StreamError as error:
        raise _BrokenError(str(error), offset, error.retry) from error
    except (OSError, KeyError, ValueError) as error:
        raise _BrokenError(f"the state stream from {address} broke off: {error}", offset, True) from error


def _read_answer(connection: socket.socket, cancelled: threading.Event) -> bytes:
    """The answer comes when the source begins to fill: wait for it in slices, so that a cancel is seen."""
    connection.settimeout(0.25)
    while True:
        try:
            if connection.recv(1, socket.MSG_PEEK) == b"":
                raise StreamError("the other side closed the connection")
            break
        except TimeoutError:
            if cancelled.is_set():
                raise StreamError("the transfer was cancelled", retry=False) from None
    connection.settimeout(SOCKET_TIMEOUT_SECONDS)
    return read_line(connection)
