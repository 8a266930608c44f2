"""The connection of a client to a master: calls, pages and streams, each failure explained in words for people.

Streams are opened again while a master is away, for as long as the client's patience lasts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import grpc

from ganger.v1.job_service_pb2_grpc import JobServiceStub
from ganger.v1.node_pb2_grpc import NodeServiceStub
from ganger.wire.channels import MAX_MESSAGE_BYTES, open_channel
from ganger.wire.endpoints import MASTER_VARIABLE, TLS_VARIABLE, Endpoint, EndpointError, find_endpoint
from ganger.wire.errors import (
    ApiError,
    CertificateInvalid,
    DeadlineExceeded,
    MessageTooLarge,
    NotLeader,
    NotReady,
    Unreachable,
    from_rpc_error,
)

Answer = TypeVar("Answer")

_RECONNECT_S = 0.5
# What a stream survives: it is opened again.
PASSING: tuple[type[ApiError], ...] = (Unreachable, NotReady, DeadlineExceeded)
# gRPC's message where a server accepts the connection and drops it, as a server that expects TLS does.
_HUNG_UP = ("Socket closed", "Connection reset by peer")


class MasterConnection:
    """Channels to one master, and calls by them. See `ganger.client.Client` for the arguments. Thread-safe."""

    def __init__(self, master: str | Endpoint | None = None, *, patience_s: float = 60.0) -> None:
        self._master = master
        self.endpoint = master if isinstance(master, Endpoint) else find_endpoint(master)
        self._patience_s = patience_s
        self._channels: list[grpc.Channel] = []
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._channels.append(channel := open_channel(self.endpoint))
        self._jobs = JobServiceStub(channel)
        self._nodes = NodeServiceStub(channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _call(self, method: Callable[[Any], Answer], request: object) -> Answer:
        try:
            return method(request)
        except grpc.RpcError as error:
            raise self._explained(from_rpc_error(error)) from error

    def _pages(self, method: Callable[[Any], Answer], request: Any) -> Iterator[Answer]:
        """Call a list method until its last page."""
        while True:
            page: Any = self._call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _submitted(self, method: Callable[[Any], Answer], request: Any) -> Answer:
        """Submit. If the answer is lost, the error names the request id that repeats the submission safely."""
        try:
            return self._call(method, request)
        except (Unreachable, DeadlineExceeded, NotReady) as error:
            if isinstance(error, NotLeader) and self.endpoint.masters is None:
                # One call, which a stand-by refused. Of a list, an earlier attempt may have been accepted.
                listed = f"HOST:PORT,HOST:PORT by --master, ${MASTER_VARIABLE} or ganger.Client"
                refused = NotLeader(f"{error.message}\nnot accepted: name all masters of the cluster, {listed}")
                refused.metadata.update(error.metadata)
                raise refused from error
            identifier = request.request_id
            text = (
                f"{error.message}\nwhether the submission was accepted is not known: repeat the same command with"
                f" --request-id {identifier} (in Python, request_id={identifier!r}); that submits it once"
            )
            lost = type(error)(text, request_id=identifier)
            lost.metadata.update(error.metadata)
            raise lost from error

    def _stream(self, open_stream: Callable[[], Iterator[Answer]]) -> Iterator[Answer]:
        stream = open_stream()
        try:
            yield from stream
        except grpc.RpcError as error:
            raise self._explained(from_rpc_error(error)) from error
        finally:
            cancel = getattr(stream, "cancel", None)
            if cancel is not None:
                cancel()

    def _lasting(
        self,
        open_stream: Callable[[], Iterator[Answer]],
        is_over: Callable[[], bool],
        passing: tuple[type[ApiError], ...] = PASSING,
    ) -> Iterator[Answer | None]:
        """Yield the messages of a stream, reopened when it ends or fails with one of the `passing` errors; None once it
        has ended for good. Raises such an error when the patience is exhausted."""
        deadline: float | None = None
        while True:
            try:
                for message in self._stream(open_stream):
                    deadline = None
                    yield message
                # The stream was empty, but the master answered.
                deadline = None
                if is_over():
                    yield None
                    return
            except passing:
                now = time.monotonic()
                deadline = deadline or now + self._patience_s
                if now >= deadline:
                    raise
            time.sleep(_RECONNECT_S)

    def _find_again(self) -> None:
        """Read the endpoint again: a restarted master may listen at another address, which it writes to its
        directory."""
        if isinstance(self._master, Endpoint) or self.endpoint.masters is not None:
            # The channel to a list of masters finds the one that leads.
            return
        with self._lock:
            try:
                found = find_endpoint(self._master)
            except EndpointError:
                # It is not there again yet.
                return
            if found != self.endpoint:
                self.endpoint = found
                # Calls of other threads still use the old channel: it is closed with all others.
                self._open()

    def _explained(self, error: ApiError) -> ApiError:
        if isinstance(error, Unreachable):
            address = str(self.endpoint.masters or self.endpoint.address)
            if self.endpoint.tls:
                # gRPC does not report what is wrong with certificates.
                from ganger.wire.tls import trouble_with

                if trouble := trouble_with(self.endpoint):
                    return CertificateInvalid(f"cannot talk to the master at {address}: {trouble}")
            self._find_again()
            # gRPC lists every address and layer. Only its last clause has the cause.
            cause = error.message.rpartition(": ")[2].rstrip(")]}") or "no answer"
            hint = "can this machine reach it?" if self.endpoint.tls else "`ganger up` starts one here"
            if not self.endpoint.tls and not address.startswith("unix:") and any(each in cause for each in _HUNG_UP):
                hint = f"or does it ask for a certificate? Name the directory of yours by ${TLS_VARIABLE}"
            return Unreachable(f"no master answers at {address} ({cause}): is it running? {hint}")
        if isinstance(error, DeadlineExceeded):
            place = self.endpoint.masters or self.endpoint.address
            return DeadlineExceeded(f"the master at {place} did not answer in time: try again")
        if isinstance(error, MessageTooLarge) and "larger than max" in error.message:
            return MessageTooLarge(f"the message is larger than {MAX_MESSAGE_BYTES} bytes: ask for or send less")
        return error
