"""Calls to the one of several masters that leads (`endpoints.MasterList`).

A call that a stand-by refused is repeated at the next master. One that may have been carried out (it has no answer, or
the master lost its lease meanwhile) is repeated if twice is once; a submission has a request id. That holds for
blocking calls; an asynchronous caller connects anew, to the master that it finds then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import grpc

from ganger.wire.endpoints import Endpoint, MasterList
from ganger.wire.errors import ApiError, DeadlineExceeded, LeaseLost, NotLeader, NotReady, Unreachable, from_rpc_error
from ganger.wire.methods import METHODS

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
        return _Reopened(self, path, arguments, named)

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

    def __init__(self, channel: LeaderChannel, path: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._channel = channel
        self._make = (path, arguments, named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        tried, call = self._channel.call("unary_stream", *self._make)
        stream = call(*arguments, **named)

        def note(done: Any) -> None:
            if isinstance(done, grpc.RpcError):
                self._channel.note(tried, from_rpc_error(done))

        stream.add_done_callback(note)
        return stream
