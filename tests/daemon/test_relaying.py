"""A member's link to its leader lasts until it is closed, whatever becomes of its streams and messages."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterable, Mapping
from types import SimpleNamespace

import grpc
import pytest
from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.injob.page_layout import CHECKPOINT_BIT
from ganger.protocol.stop_rules import RankPoint, RelayedPoint, decide
from ganger.wire.errors import DETAILS_KEY, ApiError, GangNotFound, to_status
from ganger_daemon.gang.boundary_relay import BoundaryExchange, Link
from ganger_daemon.gang.gang_context import LocalPart, wanted_of

ORDER = wanted_of(
    agent_pb2.DesiredGang(job_uid="uid", epoch=1, order=agent_pb2.OrderKey(epoch=1), intent=agent_pb2.INTENT_RUN)
)


def lives() -> None:
    pytest.fail("the leader's part of the gang has not ended")


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
        link = Link(lambda: leader, hello, lambda heard: None, lives)  # type: ignore[arg-type,return-value]  # its one method
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

        link = Link(Leader, peer_pb2.RankPoints(), take, lives)  # type: ignore[arg-type]  # it has the one method
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

        link = Link(lambda: leaders.pop(0), peer_pb2.RankPoints(), take, lives)  # type: ignore[arg-type,return-value]
        await is_done.wait()
        await link.close()
        return taken

    assert asyncio.run(story()) == [6]


class Forgetful:
    """A daemon that has forgotten its part of the gang, as the service refuses a stream then."""

    def __init__(self, error: ApiError) -> None:
        self._status = to_status(error)

    async def RelayBoundary(self, messages: AsyncIterator[peer_pb2.RankPoints]) -> AsyncIterator[peer_pb2.RankPoints]:  # noqa: N802 - gRPC's name
        trailing = grpc.aio.Metadata((DETAILS_KEY, self._status.SerializeToString()))
        raise grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing)
        yield


@pytest.mark.timeout(20)
def test_a_link_ends_once_the_leader_s_part_has_ended_and_goes_on_while_its_daemon_does_not_know_the_gang_yet() -> None:
    async def story() -> int:
        has_ended = asyncio.Event()
        leaders = [GangNotFound("not on this node"), GangNotFound("it has ended", ended=True)]
        link = Link(
            lambda: Forgetful(leaders.pop(0)),  # type: ignore[arg-type,return-value]
            peer_pb2.RankPoints(),
            lambda message: None,
            has_ended.set,
        )
        await has_ended.wait()
        await link._task
        await link.close()
        return len(leaders)

    assert asyncio.run(story()) == 0


class Pages:
    """The points of all ranks as their pages have them."""

    def __init__(self, world: int) -> None:
        self.known = {rank: RelayedPoint(rank) for rank in range(world)}

    def points(self) -> dict[int, RelayedPoint]:
        return dict(self.known)

    def mirror(self, points: Iterable[RelayedPoint]) -> None:
        self.known.update({point.rank: point for point in points})

    def checkpoint_sequence(self) -> int:
        return 0


def exchange(rank: int, world: int = 3) -> tuple[BoundaryExchange, Pages]:
    """The exchange of the daemon that has this rank; rank 0 leads."""
    pages, part = Pages(world), LocalPart((rank,), (1,), world, leads=rank == 0)
    paths = SimpleNamespace(group="", job_uid="uid", epoch=1)
    context = SimpleNamespace(host=None, paths=paths, part=part, pages=pages)
    return BoundaryExchange(context, None), pages  # type: ignore[arg-type]


def sent_by(rank: int, sequence: int, ack_sequence: int, step: int = 7) -> peer_pb2.RankPoints:
    point = peer_pb2.RankPoint(rank=rank, step=step, ack_sequence=ack_sequence, ack_step=step)
    return peer_pb2.RankPoints(stop_sequence=ack_sequence, points=[point], sequence=sequence)


def test_a_message_of_a_broken_stream_that_comes_after_one_of_the_new_stream_undoes_no_acknowledgement() -> None:
    leader, pages = exchange(0)
    # Both acknowledgements are at one step, and a stop may have a smaller number than the checkpoint before it.
    late, newer = sent_by(1, 100, ack_sequence=CHECKPOINT_BIT | 3), sent_by(1, 101, ack_sequence=9)
    assert leader.receive(newer)
    assert not leader.receive(late)
    assert (pages.known[1].ack_sequence, leader.peer_agreement) == (9, 9)
    leader.receive(sent_by(2, 50, ack_sequence=9))
    assert pages.known[2].ack_sequence == 9, "each node counts its own messages"
    leader.receive(sent_by(1, 101, ack_sequence=9))
    leader.receive(sent_by(1, 102, ack_sequence=12))
    assert pages.known[1].ack_sequence == 12


def test_ranks_of_a_leader_that_has_ended_and_is_forgotten_hold_no_other_rank_at_a_boundary() -> None:
    async def story() -> Mapping[int, RelayedPoint]:
        member, pages = exchange(1)
        has_ended, ended = asyncio.Event(), GangNotFound("it has ended", ended=True)

        def receive(message: peer_pb2.RankPoints) -> None:
            member.receive(message)
            has_ended.set()

        peers = SimpleNamespace(stub=lambda address: Forgetful(ended))
        member._context.peers = peers  # type: ignore[misc]
        member.begin(agent_pb2.Member(ranks=[0]), ORDER, receive)
        await has_ended.wait()
        await member.close()
        return pages.known

    points = asyncio.run(story())
    assert points[0].done
    # It has acknowledged the stop at step 7, and has heard nothing of rank 2, which the leader would have relayed.
    known = [RankPoint(points[0].step, None, points[0].done), RankPoint(7, 7), RankPoint(5, None)]
    assert decide(known, 1).finished, "training ends before the stop: every rank runs to its end"
