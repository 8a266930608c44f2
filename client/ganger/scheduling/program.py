"""A process beside the master: how long it runs, and why it does not reach the master, in words for its log."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

from ganger.wire.endpoints import Endpoint, EndpointError
from ganger.wire.errors import Unreachable, from_rpc_error

_CODES = grpc.StatusCode
_FOR_A_PERSON = (_CODES.INVALID_ARGUMENT, _CODES.PERMISSION_DENIED, _CODES.UNAUTHENTICATED)


def why(error: Exception) -> str:
    """Return the reason of a failed call; with the full message where a person must act."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    found = from_rpc_error(error)
    return str(found) if found.code in _FOR_A_PERSON else found.reason


async def why_away(error: Exception, find: Callable[[], Endpoint]) -> str:
    """Return the reason as `why` does, or the fault of the certificates if that is the cause: gRPC hides it."""
    if isinstance(error, grpc.aio.AioRpcError) and isinstance(from_rpc_error(error), Unreachable):
        try:
            endpoint = find()
        except EndpointError as unknown:
            return str(unknown)
        if endpoint.tls:
            from ganger.wire.tls import trouble_with

            return await asyncio.to_thread(trouble_with, endpoint) or why(error)
    return why(error)


async def until_stopped(work: Coroutine[Any, Any, None], until_stdin_closes: bool) -> None:
    """Run `work` until it ends or SIGTERM or SIGINT arrives. `until_stdin_closes`: also until standard input closes."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    parts: list[Coroutine[Any, Any, object]] = [work, stop.wait()]
    if until_stdin_closes:
        parts.append(_stdin_closed())
    await first_end(parts)


async def first_end(parts: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Runs all until one ends; its error is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stdin_closed() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with contextlib.closing(transport):
        while await reader.read(4096):
            pass
