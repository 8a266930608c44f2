"""Why a program beside the master does not reach it, in words for its log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from ganger.wire.endpoints import Endpoint, EndpointError
from ganger.wire.errors import Unreachable, from_rpc_error

_FOR_A_PERSON = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)


def why(error: Exception) -> str:
    """The reason of what a call came to; in full where a person has to do something."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    found = from_rpc_error(error)
    return str(found) if found.code in _FOR_A_PERSON else found.reason


async def why_away(error: Exception, find: Callable[[], Endpoint]) -> str:
    """The same, and what is wrong with certificates where they are why nobody answers: gRPC does not tell."""
    if isinstance(error, grpc.aio.AioRpcError) and isinstance(from_rpc_error(error), Unreachable):
        try:
            endpoint = find()
        except EndpointError as unknown:
            return str(unknown)
        if endpoint.tls:
            from ganger.wire.tls import trouble_with

            return await asyncio.to_thread(trouble_with, endpoint) or why(error)
    return why(error)
