"""The process at the other end of a Unix socket, as the kernel records it."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple


class Peer(NamedTuple):
    """Ids of a process, as the kernel translates them for the reader."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that connected, or that listened, as it was then. Raises OSError."""
    return Peer(*struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))
