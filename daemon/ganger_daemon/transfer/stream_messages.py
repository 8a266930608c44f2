"""The state stream between machines: the same words and bytes in TLS, and only from daemon to daemon."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from ganger.wire.errors import CertificateInvalid
from ganger.wire.roles import CallerRole
from ganger.wire.tls import client_context, identity_at

from ganger_daemon.transfer.request import StreamError


def to_daemon(connection: socket.socket, host: str, tls: str) -> ssl.SSLSocket:
    """A connection that was dialled. Raises OSError, EndpointError, and StreamError unless a daemon answers."""
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
