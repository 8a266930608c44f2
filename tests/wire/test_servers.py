"""Servers bind where they should, keep their socket private, and say what is wrong otherwise."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from ganger.wire.endpoints import EndpointError
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
