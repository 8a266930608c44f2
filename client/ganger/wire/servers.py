"""What all servers share: options, binding, authentication of callers, and errors on the wire.

Handlers raise `ApiError`; anything else they raise is our bug and reaches the caller as INTERNAL with an id that is in
the log beside the traceback. What cannot be read as the method's message is refused before it reaches a handler.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import os
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ganger.wire.channels import (
    MAX_MESSAGE_BYTES,
    TOKEN_KEY,
    UNSTATED_VERSIONS,
    VERSIONS_KEY,
    common_version,
    read_versions,
)
from ganger.wire.endpoints import EndpointError, check_listen_address, host_of, prepare_socket, why_not_listening
from ganger.wire.errors import (
    ApiError,
    Internal,
    MessageTooLarge,
    NotSupported,
    RequestInvalid,
    TokenInvalid,
    to_trailing_metadata,
)
from ganger.wire.methods import CallerIdentity, check_call, check_local_call, largest_bytes
from ganger.wire.revocation import Revocations, ShownCertificate, read_certificate

log = logging.getLogger(__name__)

# CreateSession negotiates the version of a daemon's session.
_SESSIONS = "/ganger.agent.v1.AgentService/"
# Health answers every connection: a probe has no token.
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_SSL: Final = b"ssl"
# Of a header with an access token; those of the master are shorter.
_LONGEST_TOKEN: Final = 512
# The identity of the holder of an access token. Raises TokenInvalid, TokenExpired and TokenRevoked.
HolderOfToken: TypeAlias = Callable[[bytes], CallerIdentity]

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port would share the calls at random.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 10_000),
    # Beyond these, calls are refused rather than queued without end.
    ("grpc.server.max_pending_requests", 10_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)


def make_server(
    token: str = "",
    options: Sequence[tuple[str, int]] = (),
    *,
    revocations: Revocations | None = None,
    holder_of: HolderOfToken | None = None,
    first_interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    more_interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
) -> grpc.aio.Server:
    """Return a grpc.aio server with our options and interceptors. `token`: what callers must send, "" for none.

    `revocations`: with it, a caller with a certificate that is not on its list may call the methods of its role, one
    with the token those for callers on this machine, and any other caller none. `holder_of`: the holder of an access
    token, with which callers come over TLS without a certificate. `first_interceptors` meet all callers,
    `more_interceptors` come last and meet permitted ones only. A later option of the same name wins."""
    interceptors: list[grpc.aio.ServerInterceptor[Any, Any]] = [ErrorInterceptor(), *first_interceptors]
    if revocations is not None:
        interceptors.append(RoleInterceptor(token, revocations, holder_of))
    elif token:
        interceptors.append(TokenInterceptor(token))
    interceptors.extend(more_interceptors)
    return grpc.aio.server(interceptors=interceptors, options=list(dict((*SERVER_OPTIONS, *options)).items()))


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Makes `server` listen on "unix:PATH" or "HOST:PORT" and returns the address, with the port chosen for port 0.
    Raises EndpointError for one where it cannot, and without certificates for one that other machines could reach."""
    check_listen_address(address, has_certificates=credentials is not None)
    prepare_socket(address)
    # The socket must never exist with more rights than these, not even until a chmod.
    mask = os.umask(0o177) if address.startswith("unix:") else None
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    finally:
        if mask is not None:
            os.umask(mask)
    if port == 0:
        raise EndpointError(_why_not_bound(address))
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _why_not_bound(address: str) -> str:
    """Return why a server cannot listen: gRPC gives no reason, so a plain socket tries the same address."""
    path = address.removeprefix("unix:")
    try:
        if path != address:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(path)
                os.unlink(path)
        else:
            places = socket.getaddrinfo(
                host_of(address), address.rpartition(":")[2], type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, kind, _, _, place in places:
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(place)
                    probe.listen()
    except OSError as error:
        return why_not_listening(address, error)
    return f"cannot listen on {address}: it was in use until now; try again"


if TYPE_CHECKING:
    _ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    # Generic for type checkers only.
    _ServerInterceptor = grpc.aio.ServerInterceptor


class WrappingInterceptor(_ServerInterceptor, ABC):
    """Wraps each method's handler once and remembers it: nothing is built per call."""

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        known = self._wrapped.get(handler_call_details.method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        # None: no such method. Not remembered, or a caller could fill our memory with names.
        if handler is None:
            return handler
        wrapped = self._wrap(handler_call_details.method, handler)
        self._wrapped[handler_call_details.method] = wrapped
        return wrapped

    @abstractmethod
    def _wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]: ...


class ErrorInterceptor(WrappingInterceptor):
    """Turns what handlers raise into google.rpc.Status, and refuses callers without a common version of the wire."""

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        is_negotiated = method.startswith(_SESSIONS)

        def check(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            if not is_negotiated:
                _check_versions(context)
            if isinstance(request, ApiError):
                raise request

        return guarded(handler, check, partial(_abort, method), _reader(method, handler))


def _check_versions(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    stated = next((value for key, value in context.invocation_metadata() or () if key == VERSIONS_KEY), None)
    common_version(UNSTATED_VERSIONS if stated is None else read_versions(str(stated)))


class TokenInterceptor(WrappingInterceptor):
    """Lets only callers in that bring `authorization: Bearer TOKEN`."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode() if token else b""

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        if method.startswith(_OPEN_SERVICES):
            return handler
        return guarded(handler, lambda _, context: self._check(method, context))

    def _check(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        brought = _authorization(context)
        if not brought:
            raise TokenInvalid("no token came with the call: use the endpoint.json of the server's state directory")
        if not hmac.compare_digest(brought, self._expected):
            raise TokenInvalid("the token is not this server's: use the one its endpoint.json names")


class RoleInterceptor(TokenInterceptor):
    """Lets callers with a certificate do what is for its role, those with an access token what is for its holder, and
    those with the server's token what is for this machine. A certificate or an access token that is revoked, or ends,
    while a stream is open ends it with the next message."""

    def __init__(self, token: str, revocations: Revocations, holder_of: HolderOfToken | None = None) -> None:
        super().__init__(token)
        self._revocations = revocations
        self._holder_of = holder_of

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        wrapped = super()._wrap(method, handler)
        is_stream = wrapped.request_streaming or wrapped.response_streaming
        return _checked(wrapped, self._check_credentials) if is_stream else wrapped

    def _check(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        caller = self._check_credentials(context)
        if caller is not None:
            check_call(method, caller)
            return
        super()._check(method, context)
        check_local_call(method)

    def _check_credentials(self, context: grpc.aio.ServicerContext[Any, Any]) -> CallerIdentity | None:
        """Return the identity of a caller over TLS; None of one without."""
        shown = _certificate_in(context)
        if shown is None:
            return token_holder(context, self._holder_of) if _is_tls(context) else None
        self._revocations.check(shown)
        return shown.identity


class Callers:
    """The identity of callers, for handlers. Without certificates it is always `local`, at no cost. `holder_of`: as of
    `make_server`."""

    def __init__(self, local: CallerIdentity, *, by_role: bool = False, holder_of: HolderOfToken | None = None) -> None:
        self._local = local
        self._by_role = by_role
        self._holder_of = holder_of

    def of(self, context: grpc.aio.ServicerContext[Any, Any]) -> CallerIdentity:
        """Return the caller. Raises CertificateInvalid, and as `holder_of`."""
        return (self.remote(context) or self._local) if self._by_role else self._local

    def remote(self, context: grpc.aio.ServicerContext[Any, Any]) -> CallerIdentity | None:
        """Return the caller over TLS; None without. Raises as `of`."""
        shown = _certificate_in(context)
        if shown is not None:
            return shown.identity
        return token_holder(context, self._holder_of) if _is_tls(context) else None


def token_holder(context: grpc.aio.ServicerContext[Any, Any], holder_of: HolderOfToken | None) -> CallerIdentity:
    """Return the holder of the access token that comes with a call. Raises TokenInvalid, and as `holder_of`."""
    if holder_of is None:
        raise TokenInvalid("there are no access tokens here: come with a certificate")
    scheme, _, text = _authorization(context)[:_LONGEST_TOKEN].partition(b" ")
    if scheme.lower() != b"bearer" or not text:
        raise TokenInvalid("no access token came with the call: name it by $GANGER_TOKEN or a file (`ganger tokens`)")
    return holder_of(text)


def _authorization(context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    """Return the first header of authorization; empty without one."""
    for key, value in context.invocation_metadata() or ():
        if key == TOKEN_KEY:
            return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    return b""


def _is_tls(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    return _SSL in context.auth_context().get("transport_security_type", ())


def certificate_of(context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    """Return the caller's verified certificate in PEM form; empty without TLS, or with an access token."""
    return b"".join(context.auth_context().get("x509_pem_cert", ())) if _is_tls(context) else b""


def _certificate_in(context: grpc.aio.ServicerContext[Any, Any]) -> ShownCertificate | None:
    # Not its "peer_uri": that ends at a NUL, so a forged URI would pass for a valid identity.
    shown = certificate_of(context)
    return read_certificate(shown) if shown else None


async def _abort(method: str, context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    # Raised by context.abort: the handler has answered already.
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, NotImplementedError):
        # What generated code raises for a method without an implementation.
        error = NotSupported(f"{method} is not offered here")
    if not isinstance(error, ApiError):
        number = uuid.uuid4().hex[:12]
        log.error("request failed", extra={"method": method, "error_id": number}, exc_info=error)
        error = Internal(f"internal error {number}: the server's log has the details", id=number)
    await context.abort(error.code, error.message[:1_000], to_trailing_metadata(error))


def _reader(method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[[bytes], Any]:
    """Reads requests. grpc.aio answers UNKNOWN with a traceback in the log where the reader of a single request raises,
    so that one hands the error on; messages of a stream are read inside the handler, which sees what is raised."""
    read = handler.request_deserializer
    assert read is not None, "a handler that reads nothing"
    most = largest_bytes(method)

    def streamed(raw: bytes) -> Any:
        if len(raw) > most:
            raise MessageTooLarge(f"the request is {len(raw)} bytes, {method} takes {most}: send less at once")
        try:
            return read(raw)
        except DecodeError as error:
            log.warning("request cannot be read", extra={"method": method})
            text = f"what was sent is no message of {method}: use a client made from this version's protos"
            raise RequestInvalid(text) from error

    def single(raw: bytes) -> Any:
        try:
            return streamed(raw)
        except ApiError as error:
            return error

    return streamed if handler.request_streaming else single


def behaviour_of(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[..., Any]:
    """Return the coroutine function or async generator function that answers; plain functions run in a thread."""
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert behaviour is not None, "a handler without a function"
    # grpc.aio also runs plain functions, in threads; our interceptors would not see what they raise.
    if not (inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)):
        is_stream = handler.request_streaming or handler.response_streaming
        assert not is_stream, "streams must be async here"
        return lambda request, context: asyncio.to_thread(behaviour, request, context)
    return behaviour


def guarded(
    handler: grpc.RpcMethodHandler[Any, Any],
    check: Callable[[Any, grpc.aio.ServicerContext[Any, Any]], None],
    refuse: Callable[[grpc.aio.ServicerContext[Any, Any], Exception], Awaitable[None]] | None = None,
    reader: Callable[[bytes], Any] | None = None,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that answers requests which pass `check`. ``refuse``: answers what is raised."""
    behaviour = behaviour_of(handler)

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            check(request, context)
            return await behaviour(request, context)
        except Exception as error:
            if refuse is None:
                raise
            return await refuse(context, error)

    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            check(request, context)
            async for response in behaviour(request, context):
                yield response
        except Exception as error:
            if refuse is None:
                raise
            await refuse(context, error)

    return rebuilt(handler, stream if inspect.isasyncgenfunction(behaviour) else answer, reader)


def _checked(
    handler: grpc.RpcMethodHandler[Any, Any], check: Callable[[grpc.aio.ServicerContext[Any, Any]], object]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a stream that checks at each message, either way."""
    behaviour = behaviour_of(handler)

    def received(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return each(requests, context) if handler.request_streaming else requests

    async def each(messages: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async for message in messages:
            check(context)
            yield message

    async def answer(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await behaviour(received(requests, context), context)

    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async for response in each(behaviour(received(request, context), context), context):
            yield response

    return rebuilt(handler, stream if inspect.isasyncgenfunction(behaviour) else answer)


def rebuilt(
    handler: grpc.RpcMethodHandler[Any, Any],
    behaviour: Callable[..., Any],
    reader: Callable[[bytes], Any] | None = None,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler of the same kind that answers by ``behaviour``. ``reader``: replaces its deserializer."""
    makers: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(
        behaviour,
        request_deserializer=reader or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
