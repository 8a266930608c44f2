"""Channels towards a server, or the one of several masters that leads, with deadlines, keepalive and bounded messages,
and the version of the wire they use.

A channel carries a token on loopback TCP or a Unix socket, a certificate anywhere. It puts the token and the supported
versions of the wire on every call, and the method's default deadline on every call without a deadline.

Both sides state the oldest and the newest version that they speak: a daemon and its master in CreateSession, every
other caller in the metadata of each call. The highest common version is used. A caller of Ganger 0.1 states nothing: it
speaks version 1.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import grpc
import grpc.aio

from ganger.wire.endpoints import Endpoint, MasterList, check_dial_address, host_of
from ganger.wire.errors import (
    ApiError,
    DeadlineExceeded,
    LeaseLost,
    NotLeader,
    NotReady,
    RequestInvalid,
    Unreachable,
    WireVersionUnsupported,
    from_rpc_error,
)
from ganger.wire.methods import METHODS, CallerRole, deadline_s, retry_service_config, served_name

if TYPE_CHECKING:
    from ganger.agent.v1 import agent_pb2
    from ganger.wire.tls import Renewed

# Raised with the first change of a message after a release; `make wire` records the messages of each version.
NEWEST_VERSION = 2
# Of each call: "OLDEST-NEWEST".
VERSIONS_KEY = "ganger-wire-versions"

_RANGE = re.compile(r"(\d{1,6})-(\d{1,6})", re.ASCII)


class WireVersions(NamedTuple):
    """A range of versions of the wire, both ends included."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"{self.oldest}-{self.newest}"


SUPPORTED_VERSIONS = WireVersions(1, NEWEST_VERSION)
UNSTATED_VERSIONS = WireVersions(1, 1)


def read_versions(text: str) -> WireVersions:
    """Return the range that `text` states as "OLDEST-NEWEST". Raises RequestInvalid for any other text."""
    match = _RANGE.fullmatch(text)
    versions = WireVersions(*map(int, match.groups())) if match else None
    if versions is None or not 1 <= versions.oldest <= versions.newest:
        raise RequestInvalid(f"{VERSIONS_KEY} is {text[:40]!r}: state the range of versions as OLDEST-NEWEST")
    return versions


def stated_versions(message: agent_pb2.CreateSessionRequest | agent_pb2.Session) -> WireVersions:
    """Return the range that a daemon or its master states in CreateSession."""
    if not message.HasField("wire_versions"):
        return UNSTATED_VERSIONS
    return WireVersions(message.wire_versions.oldest, message.wire_versions.newest)


def common_version(
    caller: WireVersions, server: WireVersions = SUPPORTED_VERSIONS, *, names: tuple[str, str] = ("client", "server")
) -> int:
    """Return the highest version that both speak. `names`: of the caller and the server, for people.

    Raises WireVersionUnsupported where there is none; it names both ranges and the side to upgrade."""
    common = min(caller.newest, server.newest)
    if common >= max(caller.oldest, server.oldest):
        return common
    older = names[0] if caller.newest < server.oldest else names[1]
    raise WireVersionUnsupported(
        f"the {names[0]} speaks versions {caller} of the wire, the {names[1]} {server}: upgrade the {older}",
        caller=caller,
        server=server,
    )


MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Lists and sets are sent in parts of at most this: room is left for what comes with a part.
PART_BYTES = 3 * 1024 * 1024
TOKEN_KEY = "authorization"

_CLIENT_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # A restarted master must be found again within a second or two, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Programs on one machine never go through a proxy.
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config", retry_service_config()),
    ("grpc.service_config_disable_resolution", 1),
)

# To one of several masters. One that hangs is left within two seconds. (`keepalive_timeout_ms` alone has no effect on a
# peer that hangs, as of gRPC 1.85.) Another one is tried at once, rather than the same one again.
_LISTED_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
)


def open_channel(
    endpoint: Endpoint, options: Sequence[tuple[str, int | str]] = (), role: CallerRole = CallerRole.MASTER
) -> grpc.Channel:
    """A blocking channel to a server of this role. Close it. Raises EndpointError for an address that cannot be
    dialled, or a certificate that cannot be read. Where the endpoint is of a list of masters, calls go to the one that
    leads, also after another one has taken over."""
    if endpoint.masters is not None:

        def open_one(one: Endpoint) -> _Channel:
            return _opened(grpc, one, options, CallerRole.MASTER, _credentials(one))

        return cast(grpc.Channel, LeaderChannel(endpoint.masters, open_one))
    return cast(grpc.Channel, _opened(grpc, endpoint, options, role, _credentials(endpoint)))


def open_aio_channel(
    endpoint: Endpoint, options: Sequence[tuple[str, int | str]] = (), role: CallerRole = CallerRole.MASTER
) -> grpc.aio.Channel:
    """A channel of the running event loop. Close it. Raises EndpointError as `open_channel`."""
    return cast(grpc.aio.Channel, _opened(grpc.aio, endpoint, options, role, _credentials(endpoint)))


def _opened(
    module: Any,
    endpoint: Endpoint,
    options: Sequence[tuple[str, int | str]],
    role: CallerRole,
    credentials: grpc.ChannelCredentials | None,
) -> _Channel:
    all_options = _options(endpoint, options, role)
    target = endpoint.address if endpoint.address.startswith("unix:") else f"dns:///{endpoint.address}"
    if credentials is None:
        return _Channel(module.insecure_channel(target, options=all_options), endpoint.token)
    return _Channel(module.secure_channel(target, credentials, options=all_options), endpoint.token)


def _credentials(endpoint: Endpoint) -> grpc.ChannelCredentials | None:
    check_dial_address(endpoint.address, has_certificate=bool(endpoint.tls))
    if not endpoint.tls:
        return None
    # Loaded here: most clients are on their master's machine.
    from ganger.wire.tls import channel_credentials

    return channel_credentials(Path(endpoint.tls), has_token=bool(endpoint.token))


def _options(
    endpoint: Endpoint, options: Sequence[tuple[str, int | str]], role: CallerRole
) -> tuple[tuple[str, int | str], ...]:
    if endpoint.masters is not None:
        options = (*_LISTED_OPTIONS, *options)
    if endpoint.tls and not endpoint.address.startswith("unix:"):
        # The certificate has to state the role, too: certificates of other roles name the same host.
        options = (("grpc.ssl_target_name_override", served_name(role, host_of(endpoint.address))), *options)
    # A later option of the same name wins.
    return tuple(dict((*_CLIENT_OPTIONS, *options)).items())


# For calls under way on a channel that is replaced: some last as long as a job.
_GRACE_S = 24 * 3600.0


class DaemonChannels:
    """Channels of the running event loop to daemons, by address, for as long as the certificate shown there is the
    present one. `tls`: directory of the certificate; empty for none. `most`: so many, the oldest goes first."""

    def __init__(self, token: str, tls: str = "", most: int = sys.maxsize) -> None:
        self._token, self._tls, self._most = token, tls, most
        self._renewed: Renewed[grpc.ChannelCredentials] | None = None
        self._channels: dict[str, tuple[grpc.aio.Channel, grpc.ChannelCredentials | None]] = {}
        # Kept until they are done: the loop itself keeps no task.
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> grpc.aio.Channel:
        """Return the channel to a daemon, for one call: the next one may need another. Raises EndpointError as
        `open_channel`."""
        credentials = self._credentials()
        known = self._channels.get(address)
        if known is not None and known[1] is credentials:
            return known[0]
        endpoint = Endpoint(address, self._token, self._tls)
        check_dial_address(address, has_certificate=credentials is not None)
        channel = cast(grpc.aio.Channel, _opened(grpc.aio, endpoint, (), CallerRole.DAEMON, credentials))
        if known is not None or len(self._channels) >= self._most:
            former, _ = self._channels.pop(address if known is not None else next(iter(self._channels)))
            closing = asyncio.get_running_loop().create_task(former.close(grace=_GRACE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._channels[address] = channel, credentials
        return channel

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if not self._tls:
            return None
        if self._renewed is None:
            from ganger.wire.tls import Renewed, channel_credentials

            self._renewed = Renewed(Path(self._tls), channel_credentials)
        return self._renewed.current()

    async def close(self) -> None:
        """Close all of them; calls under way are cancelled."""
        channels, self._channels = self._channels, {}
        for closing in self._closing:
            closing.cancel()
        for channel, _ in channels.values():
            await channel.close(None)


_CALLS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


# gRPC's interceptors cost tens of microseconds a call and change the call's type; wrapping the multi-callables costs
# neither, and sync and aio need only one wrapper.
class _Channel:
    def __init__(self, channel: Any, token: str) -> None:
        self._channel = channel
        versions = (VERSIONS_KEY, str(SUPPORTED_VERSIONS))
        self._metadata = (versions, (TOKEN_KEY, f"Bearer {token}")) if token else (versions,)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name not in _CALLS:
            return found
        return lambda method, *more, **named: _MultiCallable(
            found(method, *more, **named), self._metadata, deadline_s(method)
        )

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


class _MultiCallable:
    def __init__(self, call: Any, metadata: tuple[tuple[str, str], ...], deadline: float | None) -> None:
        self._call = call
        self._metadata = metadata
        self._deadline = deadline

    def __call__(self, request: Any = None, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        return self._start(self._call, request, timeout, metadata, more)

    def future(self, request: Any = None, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        return self._start(self._call.future, request, timeout, metadata, more)

    def with_call(self, request: Any = None, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        return self._start(self._call.with_call, request, timeout, metadata, more)

    def _start(
        self, start: Callable[..., Any], request: Any, timeout: float | None, metadata: Any, more: dict[str, Any]
    ) -> Any:
        metadata = (*self._metadata, *metadata) if metadata is not None else self._metadata
        return start(request, timeout=self._deadline if timeout is None else timeout, metadata=metadata, **more)


# -- the one of several masters that leads (`endpoints.MasterList`) ----------------------------------------------------

# A call that a stand-by refused is repeated at the next master. One that may have been carried out (it has no answer,
# or the master lost its lease meanwhile) is repeated only if that changes nothing: a submission has a request id.
# That holds for blocking calls. An asynchronous caller connects anew, to the master that leads then.

# Between two attempts of a call.
_PAUSE_S: Final = 0.1


def note_failure(endpoint: Endpoint | None, error: Exception) -> None:
    """Let the next connection go to another master, if the endpoint is of a list and the error shows that it does not
    lead."""
    if endpoint is not None and isinstance(error, grpc.RpcError):
        _note(endpoint, from_rpc_error(error))


def _note(endpoint: Endpoint, error: ApiError) -> None:
    if endpoint.masters is None:
        return
    if isinstance(error, NotLeader | LeaseLost):
        endpoint.masters.note(endpoint, error.metadata.get("leader", ""), has_answered=True)
    elif isinstance(error, Unreachable | DeadlineExceeded):
        endpoint.masters.note(endpoint, has_answered=False)


def may_repeat(error: ApiError, *, is_idempotent: bool) -> bool:
    """Return whether a call that failed with the error may be made again."""
    return isinstance(error, NotLeader) or (is_idempotent and isinstance(error, Unreachable | NotReady))


class LeaderChannel:
    """A blocking channel to the master of a list that leads. `open_one` opens a channel to one of them."""

    def __init__(self, masters: MasterList, open_one: Callable[[Endpoint], Any]) -> None:
        self._masters = masters
        self._open_one = open_one
        self._lock = threading.Lock()
        self._channels: dict[Endpoint, Any] = {}
        # The master to call; None after a call has failed.
        self._chosen: Endpoint | None = None

    def call(self, kind: str, path: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Endpoint, Any]:
        """Return the master to call now, and what calls it."""
        with self._lock:
            endpoint = self._chosen
        if endpoint is None:
            endpoint = self._masters.endpoint()
        with self._lock:
            self._chosen = endpoint
            channel = self._channels.get(endpoint)
            if channel is None:
                channel = self._channels[endpoint] = self._open_one(endpoint)
        return endpoint, getattr(channel, kind)(path, *arguments, **named)

    def note(self, tried: Endpoint, error: ApiError) -> None:
        """Let the next call find the leader anew."""
        _note(tried, error)
        with self._lock:
            self._chosen = None

    def unary_unary(self, path: str, *arguments: Any, **named: Any) -> Any:
        return _Repeated(self, path, arguments, named)

    def unary_stream(self, path: str, *arguments: Any, **named: Any) -> Any:
        return _Reopened(self, "unary_stream", path, arguments, named)

    def stream_stream(self, path: str, *arguments: Any, **named: Any) -> Any:
        return _Reopened(self, "stream_stream", path, arguments, named)

    def close(self) -> None:
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def __enter__(self) -> LeaderChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Repeated:
    """A method with one answer."""

    def __init__(self, channel: LeaderChannel, path: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._channel = channel
        self._make = (path, arguments, named)
        method = METHODS.get(path)
        self._is_idempotent = method is not None and method.is_idempotent
        self._deadline_s = 10.0 if method is None else method.deadline_s

    def __call__(self, request: Any = None, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        limit_s = self._deadline_s if timeout is None else timeout
        end = time.monotonic() + limit_s if limit_s is not None else None
        while True:
            left_s = None if end is None else max(0.0, end - time.monotonic())
            tried, call = self._channel.call("unary_unary", *self._make)
            try:
                return call(request, timeout=left_s, metadata=metadata, **more)
            except grpc.RpcError as error:
                found = from_rpc_error(error)
                self._channel.note(tried, found)
                is_late = end is not None and time.monotonic() + _PAUSE_S >= end
                if is_late or not may_repeat(found, is_idempotent=self._is_idempotent):
                    raise
            time.sleep(_PAUSE_S)


class _Reopened:
    """A method with a stream of answers. Its reader opens it again."""

    def __init__(
        self, channel: LeaderChannel, kind: str, path: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._make = (kind, path, arguments, named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        tried, call = self._channel.call(*self._make)
        stream = call(*arguments, **named)

        def note(done: Any) -> None:
            if isinstance(done, grpc.RpcError):
                self._channel.note(tried, from_rpc_error(done))

        stream.add_done_callback(note)
        return stream
