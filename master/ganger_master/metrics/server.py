"""The HTTP endpoint that Prometheus asks, in a thread of its own: one request at a time, each bounded in time.

Of the event loop it takes an instant, for the snapshot; the sums are made here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ganger.wire.endpoints import EndpointError
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from ganger_master.metrics.families import Snapshot, families

log = logging.getLogger(__name__)

# A connection that sends no request or reads no response in this time is closed.
_REQUEST_S: Final = 5.0
# Maximum wait for the event loop, which is never busy for this long.
_SNAPSHOT_S: Final = 5.0
_TEXT: Final = [("Content-Type", "text/plain")]


class MetricsServer:
    """Serves metrics from creation until `stop`, which any thread except the loop's may call.

    `take`: returns a snapshot, called in `loop`. `context`: with TLS, callers need a certificate. Raises EndpointError
    if the address is not available.
    """

    def __init__(
        self,
        listen: str,
        version: str,
        take: Callable[[], Snapshot],
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._version = version
        self._take = take
        self._loop = loop
        registry: Any = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        host, _, port = listen.rpartition(":")
        try:
            self._http = _bound(host.strip("[]"), int(port))
        except OSError as error:
            text = f"cannot serve metrics on {listen}: {error.strerror or error}; choose another --metrics HOST:PORT"
            raise EndpointError(text) from error
        if context is not None:
            # The handshake comes with the first byte that is read, so it is bounded as that is.
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True, do_handshake_on_connect=False)
        self._http.set_app(_answering(make_wsgi_app(registry)))
        self.url = f"{'http' if context is None else 'https'}://{host}:{self._http.server_port}/metrics"
        self._thread = threading.Thread(target=self._http.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def describe(self) -> Iterable[Any]:
        """So that nothing is collected for being registered."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Called for each request, in this server's thread. Raises TimeoutError."""
        taken = asyncio.run_coroutine_threadsafe(self._taken(), self._loop)
        return families(taken.result(_SNAPSHOT_S), self._version)

    async def _taken(self) -> Snapshot:
        return self._take()


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, *_: object) -> None:
        """Nothing: it is asked every few seconds."""


def _bound(host: str, port: int) -> WSGIServer:
    # The kind of the first address that the name has, as others dial it.
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class Server(WSGIServer):
        address_family = family

        def handle_error(self, *_: object) -> None:
            log.debug("connection for metrics failed", exc_info=True)

    return Server((str(address[0]), port), _Handler)


def _answering(app: Any) -> Any:
    def answer(environ: Any, start_response: Any) -> Any:
        try:
            return app(environ, start_response)
        except (TimeoutError, concurrent.futures.CancelledError):
            start_response("503 Service Unavailable", _TEXT)
            return [b"the master is busy, or stopping: ask again\n"]
        except Exception:
            log.exception("metrics failed")
            start_response("500 Internal Server Error", _TEXT)
            return [b"internal error: the master's log has the details\n"]

    return answer
