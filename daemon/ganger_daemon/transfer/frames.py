"""The bytes of the state stream: one JSON line each way, then frames `u32 length, u64 xxh3_64, bytes`, the last of
length 0."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

# Large enough that the header costs nothing, small enough that a hash finds its bytes still in the cache.
FRAME_BYTES = 4 << 20
MAX_FRAME_BYTES = 16 << 20
MAX_LINE_BYTES = 4096
HEADER = struct.Struct("<IQ")


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
        return json.dumps(fields).encode() + b"\n"


def parse_request(line: bytes) -> StreamRequest:
    """Raises StreamError for anything that is not a request; what it says is untrusted."""
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
    except (KeyError, TypeError, ValueError) as error:
        raise StreamError(f"the request is not understood: {error}", retry=False) from error
    if request.offset < 0 or request.rank < 0:
        raise StreamError("the request has a negative offset or rank", retry=False)
    return request


def parse_line(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise StreamError("the other side does not speak the state stream's protocol", retry=False) from error
    if not isinstance(fields, dict):
        raise StreamError("the other side does not speak the state stream's protocol", retry=False)
    return fields


def read_line(connection: socket.socket) -> bytes:
    """One line, byte by byte: what follows it belongs to the frames."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise StreamError("the other side closed the connection")
        line += byte
        if len(line) > MAX_LINE_BYTES:
            raise StreamError(f"a line of the state stream is longer than {MAX_LINE_BYTES} bytes", retry=False)
    return bytes(line)


def limit_silence(connection: socket.socket, seconds: float) -> None:
    """Lets one call wait so long. By the kernel's own limits and not by settimeout: a socket that Python polls returns
    after every segment, one that blocks moves a whole frame in one call and without the interpreter's lock."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send_frame(connection: socket.socket, view: memoryview) -> None:
    digest = xxhash.xxh3_64_intdigest(view) if len(view) else 0
    header = HEADER.pack(len(view), digest)
    sent = connection.sendmsg([header, view]) if len(view) else connection.send(header)
    if sent < len(header):
        connection.sendall(header[sent:])
        sent = len(header)
    body = sent - len(header)
    if body < len(view):
        connection.sendall(view[body:])


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise StreamError("the other side closed the connection in the middle of a frame")
        done += count


def receive_frame(connection: socket.socket, target: memoryview) -> int:
    """Reads one frame into the front of `target` and checks its hash; its length, 0 for the last.

    Raises StreamError for a frame that does not fit or whose hash does not match.
    """
    head = bytearray(HEADER.size)
    receive_exactly(connection, memoryview(head))
    length, digest = HEADER.unpack(head)
    if length == 0:
        return 0
    if length > MAX_FRAME_BYTES or length > len(target):
        raise StreamError(f"a frame of {length} bytes does not fit ({len(target)} bytes are left)", retry=False)
    body = target[:length]
    receive_exactly(connection, body)
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise StreamError("a frame's hash does not match its bytes")
    return int(length)
