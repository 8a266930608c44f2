"""Servers bind where they should, keep their socket private, and say what is wrong otherwise."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from ganger.v1 import node_pb2
from ganger.wire.endpoints import EndpointError
from ganger.wire.errors import RequestInvalid, from_rpc_error
from ganger.wire.servers import bind, make_server


def in_loop(body: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await body()

    asyncio.run(run())


def test_a_free_port_is_chosen_and_told() -> None:
    async def body() -> None:
        server = make_server()
        address = bind(server, "127.0.0.1:0")
        assert int(address.removeprefix("127.0.0.1:")) > 0
        await server.start()
        await server.stop(None)

    in_loop(body)


def test_a_port_in_use_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            address = f"127.0.0.1:{other.getsockname()[1]}"
            server = make_server()
            with pytest.raises(EndpointError, match="in use"):
                bind(server, address)
            await server.stop(None)

    in_loop(body)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("no-such-host.invalid:7070", "the host name no-such-host.invalid is not known"),
        ("192.0.2.1:7070", "192.0.2.1 is not an address of this machine"),
        ("unix:/proc/s", "cannot listen on unix:/proc/s"),
    ],
)
def test_an_address_where_none_can_listen_is_refused_with_the_reason(address: str, reason: str) -> None:
    async def body() -> None:
        server = make_server()
        credentials = None if address.startswith("unix:") else grpc.ssl_server_credentials([(b"key", b"certificate")])
        with pytest.raises(EndpointError, match=reason):
            bind(server, address, credentials)
        await server.stop(None)

    in_loop(body)


def test_a_socket_is_its_owners_alone_and_not_taken_over(tmp_path: Path) -> None:
    async def body() -> None:
        address = f"unix:{tmp_path}/deep/s"
        server, thief = make_server(), make_server()
        assert bind(server, address) == address
        await server.start()
        path = tmp_path / "deep" / "s"
        assert path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o077 == 0
        with pytest.raises(EndpointError, match="in use"):
            bind(thief, address)
        await thief.stop(None)
        await server.stop(None)

    in_loop(body)


# Field 1 as a number where a text belongs, and then no more bytes.
NO_MESSAGE = b"\x08"


async def one(request: node_pb2.Node, context: Any) -> node_pb2.Node:
    return request


async def several(request: node_pb2.Node, context: Any) -> AsyncIterator[node_pb2.Node]:
    yield request


async def last(requests: AsyncIterator[node_pb2.Node], context: Any) -> node_pb2.Node:
    found = node_pb2.Node()
    async for request in requests:
        found = request
    return found


async def each(requests: AsyncIterator[node_pb2.Node], context: Any) -> AsyncIterator[node_pb2.Node]:
    async for request in requests:
        yield request


ECHOES: dict[str, tuple[Callable[..., Any], Callable[..., Any], str, bool]] = {
    "One": (one, grpc.unary_unary_rpc_method_handler, "unary_unary", False),
    "Several": (several, grpc.unary_stream_rpc_method_handler, "unary_stream", False),
    "Last": (last, grpc.stream_unary_rpc_method_handler, "stream_unary", True),
    "Each": (each, grpc.stream_stream_rpc_method_handler, "stream_stream", True),
}


@pytest.mark.parametrize("name", sorted(ECHOES))
def test_what_is_no_message_of_a_method_is_refused_in_one_line_of_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    behaviour, make, kind, is_streamed = ECHOES[name]
    method = f"/test.Echo/{name}"

    async def body() -> None:
        server = make_server()
        handler = make(behaviour, node_pb2.Node.FromString, node_pb2.Node.SerializeToString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {name: handler}),))
        address = bind(server, "127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                call = getattr(channel, kind)(method, response_deserializer=node_pb2.Node.FromString)
                sent = node_pb2.Node(name="nodes/n1").SerializeToString()
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await answers(call, [sent, NO_MESSAGE] if is_streamed else NO_MESSAGE)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                error = from_rpc_error(refused.value)
                assert isinstance(error, RequestInvalid)
                assert method in error.message
                good = await answers(call, [sent] if is_streamed else sent)
                assert [node.name for node in good] == ["nodes/n1"]
        finally:
            await server.stop(None)

    with caplog.at_level(logging.INFO):
        in_loop(body)
    assert [(record.message, record.exc_info) for record in caplog.records] == [("request cannot be read", None)]


async def answers(call: Any, request: Any) -> list[node_pb2.Node]:
    outcome = call(iter(request) if isinstance(request, list) else request, timeout=10)
    return [each async for each in outcome] if hasattr(outcome, "__aiter__") else [await outcome]
