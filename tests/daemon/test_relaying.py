"""A member's link to its leader lasts until it is closed, whatever becomes of its streams and messages."""

from __future__ import annotations

import asyncio
import errno
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
        link = Link(lambda: leader, hello, lambda heard: None)  # type: ignore[arg-type,return-value]  # its one method
        await leader.is_opening.wait()
        await link.close()
        return leader.opened

    assert asyncio.run(story()) == 1


class Leader:
    """A leader that sends one message in each stream, and ends it."""

    async def RelayBoundary(self, messages: AsyncIterator[peer_pb2.RankPoints]) -> AsyncIterator[peer_pb2.RankPoints]:  # noqa: N802 - gRPC's name
        yield peer_pb2.RankPoints(stop_sequence=6)


@pytest.mark.timeout(20)
def test_a_message_that_cannot_be_taken_comes_again() -> None:
    async def story() -> list[int]:
        taken: list[int] = []
        is_full, is_done = [True], asyncio.Event()

        def take(message: peer_pb2.RankPoints) -> None:
            if is_full:
                is_full.clear()
                raise OSError(errno.ENOSPC, "No space left on device")
            taken.append(message.stop_sequence)
            is_done.set()

        link = Link(Leader, peer_pb2.RankPoints(), take)  # type: ignore[arg-type]  # it has the one method
        await is_done.wait()
        await link.close()
        return taken

    assert asyncio.run(story()) == [6]


class Closed:
    """A leader whose channel is closed, for its certificate was renewed: gRPC cancels the call, and not the task."""

    async def RelayBoundary(self, messages: AsyncIterator[peer_pb2.RankPoints]) -> AsyncIterator[peer_pb2.RankPoints]:  # noqa: N802 - gRPC's name
        raise asyncio.CancelledError
        yield


@pytest.mark.timeout(20)
def test_a_link_goes_on_by_another_channel_when_its_own_was_closed() -> None:
    async def story() -> list[int]:
        taken: list[int] = []
        is_done = asyncio.Event()
        leaders = [Closed(), Leader(), Leader()]

        def take(message: peer_pb2.RankPoints) -> None:
            taken.append(message.stop_sequence)
            is_done.set()

        link = Link(lambda: leaders.pop(0), peer_pb2.RankPoints(), take)  # type: ignore[arg-type,return-value]
        await is_done.wait()
        await link.close()
        return taken

    assert asyncio.run(story()) == [6]
