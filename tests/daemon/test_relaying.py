"""A member's link to its leader ends when it is to, whatever becomes of the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from ganger.agent.v1 import peer_pb2
from ganger_daemon.gang.boundary_relay import Link


class Away:
    """A leader that does not answer. A task that is cancelled while it opens a stream may get UNAVAILABLE instead, as
    from gRPC."""

    def __init__(self) -> None:
        self.opened = 0
        self.is_opening = asyncio.Event()

    async def RelayBoundary(self, messages: AsyncIterator[peer_pb2.RankPoints]) -> AsyncIterator[peer_pb2.RankPoints]:  # noqa: N802 - gRPC's name
        self.opened += 1
        self.is_opening.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing) from None
        yield peer_pb2.RankPoints()


@pytest.mark.timeout(20)
def test_a_link_is_closed_though_its_cancellation_is_swallowed() -> None:
    async def story() -> int:
        leader = Away()
        hello = peer_pb2.RankPoints(job_uid="a", epoch=1)
        link = Link(leader, hello, lambda heard: None)  # type: ignore[arg-type]  # it has the one method that is called
        await leader.is_opening.wait()
        await link.close()
        return leader.opened

    assert asyncio.run(story()) == 1
