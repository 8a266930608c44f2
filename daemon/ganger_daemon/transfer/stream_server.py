"""Stream port: serves the arenas of parked gangs while they fill, by threads with blocking sockets: the kernel sends
the arena's pages, and only under TLS are they copied, to be encrypted. Token or certificate are checked first."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ganger.agent.v1 import agent_pb2
from ganger.failpoints import hit
from ganger.injob.page_layout import PageState
from ganger.wire.endpoints import EndpointError, why_not_listening
from ganger.wire.revocation import Revocations
from ganger.wire.tls import Renewed, server_context

from ganger_daemon.checkpoints.node_checkpoints import CheckpointFile
from ganger_daemon.core.gang_judgement import PartPhase
from ganger_daemon.transfer.state_stream import (
    StreamError,
    StreamRequest,
    check_daemon,
    limit_silence,
    line_of,
    parse_request,
    read_line,
)

if TYPE_CHECKING:
    from ganger_daemon.gang.local_gang import LocalGang
    from ganger_daemon.node.gang_set import GangSet

log = logging.getLogger(__name__)

# A host serves at most this many ranks' states at once: more would only share the same link.
MAX_CONNECTIONS = 128
# Most connections that have not authenticated yet; a further one closes the oldest of them.
MAX_STRANGERS = 128
SOCKET_TIMEOUT_S = 30.0
# While the arena fills: well below the time a piece takes on a fast link.
FILL_POLL_S = 0.0005
# Most broken streams that are remembered.
BROKEN_MOST = 1024
# Bytes of the arena sent in one call. Between two calls the server checks that the stop still lasts.
PIECE_BYTES = 8 << 20
# What is encrypted at once: it is copied before.
GUARDED_PIECE_BYTES = 1 << 20

_FILLING = (PageState.SAVING, PageState.HANDED_OVER, PageState.OFFLOADED)


def find_state(gangs: GangSet, checkpoints: Path, request: StreamRequest) -> Source:
    """Return what a request names: an arena of a parked gang, or a file of a checkpoint in this node's directory.
    Raises StreamError."""
    return CheckpointFile(checkpoints, request) if request.file else find_parked(gangs, request)


def find_parked(gangs: GangSet, request: StreamRequest) -> ParkedArena:
    """Return an arena of a parked gang of this node, for a thread of the stream server. Raises StreamError."""
    gang = gangs.find(request.job_uid, request.epoch)
    if gang is None:
        raise StreamError(f"epoch {request.epoch} of {request.job_uid} is not here", retry=True)
    if request.rank not in gang.context.part.ranks:
        raise StreamError(f"rank {request.rank} is not on this node", retry=False)
    return ParkedArena(gang, request.rank, request.stop_sequence)


class ParkedArena:
    """One rank's arena, bound to the first stop during which it is seen filling."""

    def __init__(self, gang: LocalGang, rank: int, stop_sequence: int) -> None:
        self._gang = gang
        self._rank = rank
        self._stop = stop_sequence

    def progress(self) -> tuple[int, int]:
        gang = self._gang
        # Parked for another time slice only, it will resume: its arena is not the state that it moves with.
        if (
            not gang.context.pages.readable
            or not gang.wanted.stop_sequence
            or gang.master_desired.intent == agent_pb2.INTENT_RUN
        ):
            return 0, 0
        progress = gang.context.pages.progress(self._rank)
        if gang.parts.images.are_carried:
            size, filled = gang.parts.images.handed(self._rank, gang.wanted.stop_sequence)
            self._stop = self._stop or (gang.wanted.stop_sequence if size else 0)
            return size, filled
        # Before the rank is parked in this stop, the numbers may be those of an earlier one.
        if progress.ack_seq != gang.wanted.stop_sequence or progress.state not in _FILLING:
            return 0, 0
        if progress.arena_size and progress.arena_filled and not self._stop:
            self._stop = gang.wanted.stop_sequence
        return progress.arena_size, min(progress.arena_filled, progress.arena_size)

    def valid(self) -> bool:
        gang = self._gang
        if gang.forgotten or gang.phase is PartPhase.ENDED:
            return False
        return not self._stop or gang.wanted.stop_sequence == self._stop

    def open_arena(self) -> int:
        parts = self._gang.parts
        if not parts.images.are_carried:
            return parts.launcher.open_arena(self._rank)
        parts.images.note_request(self._gang.wanted.stop_sequence)
        return parts.launcher.open_image_arena(self._rank)


class Source(Protocol):
    """One rank's arena on the serving side. Called from a thread of the server."""

    def progress(self) -> tuple[int, int]:
        """(bytes of the image, bytes of it that are final); size 0 while it is not known."""

    def valid(self) -> bool:
        """Return whether this stop still lasts. After it, the bytes may change."""

    def open_arena(self) -> int:
        """A file descriptor of the arena; the caller closes it."""


class StreamServer:
    """Listens on (host, port); `port` 0 takes a free one. `find` returns the state to serve, or raises StreamError.
    `tls`: the directory of its certificate, which goes before the token, and `revocations`: what goes with it. Raises
    EndpointError for one that does not do, and for an address at which it cannot listen."""

    def __init__(
        self,
        find: Callable[[StreamRequest], Source],
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        wait_s: float = 3600.0,
        tls: str = "",
        revocations: Revocations | None = None,
    ) -> None:
        self._find = find
        self._token = token
        self._wait_s = wait_s
        self._revocations = revocations
        self._contexts = Renewed(Path(tls), server_context) if tls else None
        self._host = host
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            self._socket = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise EndpointError(why_not_listening(f"{host}:{port}", error)) from error
        self._socket.settimeout(0.5)
        self._thread = threading.Thread(target=self._accept, name="state-stream", daemon=True)
        self._workers: set[threading.Thread] = set()
        # Connections that have not authenticated yet, in order of arrival. Removal from here closes one later.
        self._strangers: dict[socket.socket, None] = {}
        # Which broke off where, the latest last: a client may come again several times a second, for minutes.
        self._broken: dict[tuple[str, int, int, int, int], None] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"{self._host}:{self._socket.getsockname()[1]}"

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
            try:
                stranger = self._stranger(connection)
            except OSError:
                connection.close()
                continue
            worker = threading.Thread(target=self._serve, args=(stranger,), name="state-stream-out", daemon=True)
            self._workers.add(worker)
            worker.start()

    def _stranger(self, connection: socket.socket) -> socket.socket:
        if self._contexts is not None:
            context = self._contexts.current()
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._strangers[connection] = None
            if len(self._strangers) > MAX_STRANGERS:
                longest = next(iter(self._strangers))
                del self._strangers[longest]
                with contextlib.suppress(OSError):
                    # Its thread wakes up and closes it. SSLSocket.shutdown would leave it to send unencrypted data.
                    socket.socket.shutdown(longest, socket.SHUT_RDWR)
        return connection

    def _serve(self, connection: socket.socket) -> None:
        request = None
        try:
            with connection:
                try:
                    request = self._request(connection)
                    if not self._slots.acquire(blocking=False):
                        raise StreamError(
                            f"{MAX_CONNECTIONS} states are on their way from this node: as many as may be"
                        )
                    try:
                        self._answer(connection, request)
                    finally:
                        self._slots.release()
                except StreamError as error:
                    connection.sendall(line_of({"error": str(error), "retry": error.retry}))
        except OSError as error:
            self._note_broken(request, error)
        finally:
            self._workers.discard(threading.current_thread())

    def _request(self, connection: socket.socket) -> StreamRequest:
        try:
            limit_silence(connection, SOCKET_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
                try:
                    check_daemon(connection, self._revocations)
                except StreamError as error:
                    log.warning("state stream refused", extra={"error": str(error)})
                    raise
                self._forget_stranger(connection)
                return parse_request(read_line(connection))
            request = parse_request(read_line(connection))
            if not hmac.compare_digest(request.token.encode(errors="surrogatepass"), self._token.encode()):
                raise StreamError("the token is wrong", retry=False)
            return request
        finally:
            self._forget_stranger(connection)

    def _forget_stranger(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    def _note_broken(self, request: StreamRequest | None, error: OSError) -> None:
        """Log a broken stream, once until it gets further."""
        if request is None:
            # A connection without a request needs no warning.
            log.debug("connection without a request", extra={"error": str(error)})
            return
        where = (request.job_uid, request.epoch, request.stop_sequence, request.rank, request.offset)
        with self._lock:
            is_known = where in self._broken
            self._broken[where] = None
            if len(self._broken) > BROKEN_MOST:
                del self._broken[next(iter(self._broken))]
        if not is_known:
            figures = {"job_uid": request.job_uid, "rank": request.rank, "offset": request.offset}
            log.info("state stream broke off", extra={**figures, "error": str(error)})

    def _answer(self, connection: socket.socket, request: StreamRequest) -> None:
        source = self._find(request)
        # Opened before the source stops: afterwards every millisecond counts.
        fd = source.open_arena()
        try:
            size = self._wait_for_size(connection, source)
            if request.offset > size:
                raise StreamError(f"offset {request.offset} lies beyond the image of {size} bytes", retry=False)
            connection.sendall(line_of({"size": size}))
            if self._send(connection, source, fd, size, request.offset):
                connection.sendall(line_of({"whole": True}))
        finally:
            os.close(fd)

    def _wait_for_size(self, connection: socket.socket, source: Source) -> int:
        deadline = time.monotonic() + self._wait_s
        while True:
            if not source.valid():
                raise StreamError("this stop is over: the gang runs again or has ended", retry=False)
            size, _ = source.progress()
            if size:
                return size
            if self._closing.is_set() or time.monotonic() > deadline:
                raise StreamError("the source has not begun to fill its arena")
            _see_that_it_is_there(connection)
            time.sleep(FILL_POLL_S * 2)

    def _send(self, connection: socket.socket, source: Source, fd: int, size: int, offset: int) -> bool:
        """Send the state; return whether all of it was sent while the stop lasted."""
        moved = time.monotonic()
        while offset < size:
            if self._closing.is_set() or not source.valid():
                return False
            _, filled = source.progress()
            if filled > offset:
                sent = _send_piece(connection, fd, offset, min(filled - offset, PIECE_BYTES))
                if not sent:
                    # The job has cut off the file of its checkpoint.
                    return False
                offset += sent
                hit("mid-stream")
                moved = time.monotonic()
            elif time.monotonic() - moved > self._wait_s:
                return False
            else:
                _see_that_it_is_there(connection)
                time.sleep(FILL_POLL_S)
        return source.valid()


def _send_piece(connection: socket.socket, fd: int, offset: int, size: int) -> int:
    """Send some of the `size` bytes from `offset` on. Return the number sent; 0: there are no more."""
    if not isinstance(connection, ssl.SSLSocket):
        return os.sendfile(connection.fileno(), fd, offset, size)
    piece = os.pread(fd, min(size, GUARDED_PIECE_BYTES), offset)
    connection.sendall(piece)
    return len(piece)


def _see_that_it_is_there(client: socket.socket) -> None:
    """Raise OSError if the client has left: it sends nothing after its request."""
    if isinstance(client, ssl.SSLSocket):
        # Below TLS, and only if data is there: a read from this socket blocks.
        poller = select.poll()
        poller.register(client, select.POLLIN)
        if poller.poll(0) and socket.socket.recv(client, 1, socket.MSG_PEEK) == b"":
            raise ConnectionAbortedError("the client left")
        return
    try:
        if client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
            raise ConnectionAbortedError("the client left")
    except BlockingIOError:
        pass
