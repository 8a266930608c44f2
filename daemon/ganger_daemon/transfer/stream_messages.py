"""Messages of the state stream: a request, an answer, and an end, one JSON line each; and its TLS links.

The bytes between answer and end are the image's own. Its trailer has their digests, which the reader checks. Between
machines the same messages and bytes go over TLS, from daemon to daemon only.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ganger.wire.errors import CertificateInvalid
from ganger.wire.methods import CallerRole
from ganger.wire.tls import client_context, identity_at

MAX_LINE_BYTES = 4096


class StreamError(Exception):
    """The other side refused, broke off, or sent what cannot be; `retry` says whether asking again may help."""

    def __init__(self, message: str, retry: bool = True) -> None:
        super().__init__(message)
        self.retry = retry


@dataclass(frozen=True, slots=True)
class StreamRequest:
    token: str
    job_uid: str
    epoch: int
    stop_sequence: int
    rank: int
    offset: int = 0

    def line(self) -> bytes:
        fields = {
            "token": self.token,
            "job_uid": self.job_uid,
            "epoch": self.epoch,
            "stop_sequence": self.stop_sequence,
            "rank": self.rank,
            "offset": self.offset,
        }
        return line_of(fields)


def parse_request(line: bytes) -> StreamRequest:
    """Parse an untrusted request. Raises StreamError if it is none."""
    fields = parse_line(line)
    try:
        request = StreamRequest(
            str(fields["token"]),
            str(fields["job_uid"]),
            int(fields["epoch"]),
            int(fields["stop_sequence"]),
            int(fields["rank"]),
            int(fields.get("offset", 0)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StreamError(f"the request is not understood: {error}", retry=False) from error
    if request.offset < 0 or request.rank < 0:
        raise StreamError("the request has a negative offset or rank", retry=False)
    return request


def line_of(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def parse_line(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StreamError("the other side does not speak the state stream's protocol", retry=False) from error
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


def to_daemon(connection: socket.socket, host: str, tls: str) -> ssl.SSLSocket:
    """Return the TLS socket of an outgoing connection. Raises OSError, EndpointError, and StreamError unless a daemon
    answers."""
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


def check_daemon(connection: ssl.SSLSocket) -> None:
    """Raises StreamError unless a daemon is at the other end of a connection whose handshake is done."""
    try:
        identity = identity_at(connection)
    except CertificateInvalid as error:
        raise StreamError(error.message, retry=False) from error
    if identity.role is not CallerRole.DAEMON:
        raise StreamError(f"states travel between daemons only, and this is {identity}", retry=False)
