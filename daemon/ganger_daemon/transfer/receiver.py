"""Receiving side of the state stream: fetches one rank's image into its arena, through broken connections.

The arena is mapped before the first byte arrives, so that receiving only copies. Copying runs without the interpreter's
lock, which the daemon's other threads need meanwhile.
"""

from __future__ import annotations

import mmap
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from ganger.injob.state_image import enter_pages, leave_pages
from ganger.wire.endpoints import EndpointError

from ganger_daemon.transfer.stream_messages import (
    StreamError,
    StreamRequest,
    limit_silence,
    parse_line,
    read_line,
    to_daemon,
)

_LOOK_S = 0.002
# An arena that has not grown for so long is filled as bytes arrive: its job may have no memory left.
_PATIENCE_S = 5.0


class Landing:
    """`size` bytes of the arena behind `fd`. Raises OSError, ValueError (the arena is smaller)."""

    def __init__(self, fd: int, size: int) -> None:
        self._mapping = mmap.mmap(fd, size)
        self.view = memoryview(self._mapping)

    def __enter__(self) -> Landing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # the pages first: unmapping holds the lock, and is quick when there is nothing left to unmap
        leave_pages(self._mapping)
        self.view.release()
        self._mapping.close()

    def enter(self, size: int) -> None:
        """Make the first `size` bytes, which are allocated, reachable without a fault."""
        enter_pages(self._mapping, size)


def wait_for_pages(fd: int, size: int, cancelled: threading.Event) -> None:
    """Wait until the job has allocated the first `size` bytes of a memory file. The kernel charges a page to the
    process that allocates it, which has to be the job's."""
    there, grown = 0, time.monotonic()
    while not cancelled.wait(_LOOK_S):
        blocks = os.fstat(fd).st_blocks * 512
        if blocks > there:
            there, grown = blocks, time.monotonic()
        if there >= size or time.monotonic() - grown > _PATIENCE_S:
            return


# Most bytes and time of one receiving call: large enough that calls cost nothing, small enough that the restoring rank
# is never far behind and sees received bytes while the source pauses.
PIECE_BYTES = 4 << 20
PIECE_S = 0.02
CONNECT_S = 5.0
LINE_S = 30.0
# Filling may pause: at the source's boundary, on its device.
SILENCE_S = 120.0


def fetch(
    address: str,
    request: StreamRequest,
    landing: Landing,
    available: Callable[[int], None],
    cancelled: threading.Event,
    attempts: int = 60,
    retry_s: float = 0.25,
    tls: str = "",
) -> int:
    """Fetch one rank's image; return its size in bytes. `available` is called with the bytes received so far.

    Reconnects with the offset reached when the connection breaks. Raises StreamError when the source refuses for good,
    when the image is larger than the arena, or after `attempts` tries without progress. The reader of the image checks
    the digests of the bytes.
    """
    offset = request.offset
    left = attempts
    while True:
        leg = _Leg(landing, available, cancelled, offset, tls)
        try:
            return leg.travel(address, replace(request, offset=offset))
        except (StreamError, EndpointError, OSError, KeyError, ValueError) as error:
            why = str(error) if isinstance(error, StreamError) else f"the state stream from {address} broke: {error}"
            if cancelled.is_set():
                raise StreamError("the transfer was cancelled", retry=False) from error
            left = attempts if leg.offset > offset else left - 1
            offset = leg.offset
            if left <= 0 or (isinstance(error, StreamError) and not error.retry):
                raise StreamError(why, retry=False) from error
        cancelled.wait(retry_s)


class _Leg:
    """Transfer over one connection."""

    def __init__(
        self, landing: Landing, available: Callable[[int], None], cancelled: threading.Event, offset: int, tls: str
    ) -> None:
        self.offset = offset
        self._landing = landing
        self._available = available
        self._cancelled = cancelled
        self._tls = tls

    def travel(self, address: str, request: StreamRequest) -> int:
        with self._connect(address) as connection:
            connection.sendall(request.line())
            answer = parse_line(self._read_answer(connection))
            if "error" in answer:
                raise StreamError(str(answer["error"]), retry=bool(answer.get("retry", True)))
            size, room = int(answer["size"]), len(self._landing.view)
            if size > room:
                raise StreamError(f"the image of {size} bytes does not fit the arena of {room}", retry=False)
            limit_silence(connection, PIECE_S)
            self._receive(connection, size)
            limit_silence(connection, LINE_S)
            if not parse_line(read_line(connection)).get("whole"):
                raise StreamError("the stop was over before the image was complete")
            return size

    def _connect(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_S)
        return to_daemon(connection, host, self._tls) if self._tls else connection

    def _receive(self, connection: socket.socket, size: int) -> None:
        heard = time.monotonic()
        while self.offset < size:
            if self._cancelled.is_set():
                raise StreamError("the transfer was cancelled", retry=False)
            try:
                with self._landing.view[self.offset : min(self.offset + PIECE_BYTES, size)] as piece:
                    count = _receive_piece(connection, piece)
            except (BlockingIOError, TimeoutError):
                if time.monotonic() - heard > SILENCE_S:
                    raise
                continue
            if count == 0:
                raise StreamError("the other side closed the connection before the image was complete")
            self.offset += count
            self._available(self.offset)
            heard = time.monotonic()

    def _read_answer(self, connection: socket.socket) -> bytes:
        """The answer comes when the source begins to fill: wait for it in slices, so that a cancel is seen."""
        connection.settimeout(0.25)
        while True:
            try:
                first = connection.recv(1)
                if first == b"":
                    raise StreamError("the other side closed the connection")
                break
            except TimeoutError:
                if self._cancelled.is_set():
                    raise StreamError("the transfer was cancelled", retry=False) from None
        connection.settimeout(LINE_S)
        return read_line(connection, first)


def _receive_piece(connection: socket.socket, piece: memoryview) -> int:
    """As many bytes as come within the piece's time; zero when the other side has closed. Raises BlockingIOError or
    TimeoutError when none came."""
    if not isinstance(connection, ssl.SSLSocket):
        return connection.recv_into(piece, 0, socket.MSG_WAITALL)
    end, count = time.monotonic() + PIECE_S, 0
    while count < len(piece) and time.monotonic() < end:
        try:
            with piece[count:] as rest:
                came = connection.recv_into(rest)
        except TimeoutError:
            if not count:
                raise
            break
        if not came:
            break
        count += came
    return count
