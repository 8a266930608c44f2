"""The state stream: its messages, one JSON line each, its TLS links, and the receiver of one rank's image, which goes
on through broken connections. The arena is mapped before the first byte arrives, so that receiving only copies, without
the interpreter's lock. The reader of the image checks its digests."""

from __future__ import annotations

import json
import mmap
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from ganger.injob.state_image import enter_pages, leave_pages
from ganger.text import os_failure
from ganger.wire.endpoints import EndpointError
from ganger.wire.errors import CertificateInvalid, CertificateRevoked
from ganger.wire.methods import CallerRole
from ganger.wire.revocation import Revocations, read_certificate
from ganger.wire.tls import client_context

MAX_LINE_BYTES = 4096


class StreamError(Exception):
    """The other side refused, broke off, or sent invalid data; `retry`: whether a new request may succeed."""

    def __init__(self, message: str, retry: bool = True) -> None:
        super().__init__(message)
        self.retry = retry


_Count = Annotated[int, msgspec.Meta(ge=0)]


class StreamRequest(msgspec.Struct, frozen=True):
    token: str
    job_uid: str
    epoch: int
    stop_sequence: int
    rank: _Count
    offset: _Count = 0
    # Not a rank's arena, but a file of a checkpoint on the node's disk: "checkpoints/STEP-EPOCH/rank-0.shard".
    file: str = ""

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def parse_request(line: bytes) -> StreamRequest:
    """Parse an untrusted request. Raises StreamError if it is none."""
    try:
        return msgspec.json.decode(line, type=StreamRequest)
    except (ValueError, RecursionError) as error:
        raise StreamError(f"the request is not understood: {error}", retry=False) from error


def line_of(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def parse_line(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise StreamError("the other side does not speak the state stream's protocol", retry=False)
    return fields


def read_line(connection: socket.socket, begun: bytes = b"") -> bytes:
    """One line, byte by byte: what follows it belongs to the image. `begun`: what of it was read already."""
    line = bytearray(begun)
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise StreamError("the other side closed the connection")
        line += byte
        if len(line) > MAX_LINE_BYTES:
            raise StreamError(f"a line of the state stream is longer than {MAX_LINE_BYTES} bytes", retry=False)
    return bytes(line)


def limit_silence(connection: socket.socket, seconds: float) -> None:
    """Limit the time of one call on a socket, by the kernel's options and not by settimeout.

    A socket that Python polls returns after every segment; one that blocks moves megabytes in one call, without the
    interpreter's lock. A TLS socket gets settimeout: it retries for ever under the kernel's limit, and moves 16 KiB in
    a call anyway."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def connect(address: str, tls: str) -> socket.socket:
    """Return a connection to a state stream. Raises OSError, EndpointError, and StreamError without a daemon."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise StreamError("the node has no state stream now")
    connection = socket.create_connection((host, int(port)), timeout=CONNECT_S)
    return to_daemon(connection, host, tls) if tls else connection


def to_daemon(connection: socket.socket, host: str, tls: str) -> ssl.SSLSocket:
    """Return the TLS socket of an outgoing connection. Raises OSError, EndpointError; StreamError without a daemon."""
    try:
        guarded = client_context(Path(tls)).wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise
    try:
        check_daemon(guarded)
    except StreamError:
        guarded.close()
        raise
    return guarded


def check_daemon(connection: ssl.SSLSocket, revocations: Revocations | None = None) -> None:
    """Check after the handshake that the peer is a daemon, whose certificate is not revoked. Raises StreamError."""
    try:
        shown = read_certificate(ssl.DER_cert_to_PEM_cert(connection.getpeercert(True) or b"").encode())
        if revocations is not None:
            revocations.check(shown)
    except (CertificateInvalid, CertificateRevoked) as error:
        raise StreamError(error.message, retry=False) from error
    identity = shown.identity
    if identity.role is not CallerRole.DAEMON:
        raise StreamError(f"states travel between daemons only, and this is {identity}", retry=False)


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

    def __exit__(self, *_: object) -> None:
        # The pages first: unmapping holds the lock, and is quick when there is nothing left to unmap.
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
    the digests of the bytes."""
    offset = request.offset
    left = attempts
    while True:
        leg = _Leg(landing, available, cancelled, offset, tls)
        try:
            return leg.travel(address, msgspec.structs.replace(request, offset=offset))
        except (StreamError, EndpointError, OSError, KeyError, ValueError) as error:
            broke = f"the state stream from {address} broke: {os_failure(error)}"
            why = str(error) if isinstance(error, StreamError) else broke
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
        with connect(address, self._tls) as connection:
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

    def _receive(self, connection: socket.socket, size: int) -> None:
        received_at = time.monotonic()
        while self.offset < size:
            if self._cancelled.is_set():
                raise StreamError("the transfer was cancelled", retry=False)
            try:
                with self._landing.view[self.offset : min(self.offset + PIECE_BYTES, size)] as piece:
                    count = _receive_piece(connection, piece)
            except (BlockingIOError, TimeoutError):
                if time.monotonic() - received_at > SILENCE_S:
                    raise
                continue
            if count == 0:
                raise StreamError("the other side closed the connection before the image was complete")
            self.offset += count
            self._available(self.offset)
            received_at = time.monotonic()

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
    """Receive into `piece` until it is full or its time is over. Return the bytes received, zero when the other side
    has closed. Raises BlockingIOError or TimeoutError if none arrived."""
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
