"""Transport of boundary points between the daemons of one gang: the leader's hub, and a member's link to it;
and the interface to the daemons of a gang's other nodes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import grpc
from ganger.agent.v1 import agent_pb2, peer_pb2

from ganger_daemon.checkpoints.manifest import ShardReport
from ganger_daemon.core.relay import RelayedPoint

if TYPE_CHECKING:
    from ganger.agent.v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05
_RETRY_LIMIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RelayMessage:
    """Boundary points of one agreement, as one daemon sends them to another."""

    agreement: int
    points: tuple[RelayedPoint, ...]


def to_wire(job_uid: str, epoch: int, order: agent_pb2.OrderKey, sent: RelayMessage) -> peer_pb2.RankPoints:
    return peer_pb2.RankPoints(
        job_uid=job_uid,
        epoch=epoch,
        order=order,
        stop_sequence=sent.agreement,
        points=[
            peer_pb2.RankPoint(
                rank=point.rank,
                step=point.step,
                ack_sequence=point.ack_sequence,
                ack_step=point.ack_step,
                done=point.done,
            )
            for point in sent.points
        ],
    )


def from_wire(message: peer_pb2.RankPoints) -> RelayMessage:
    points = tuple(
        RelayedPoint(point.rank, point.step, point.ack_sequence, point.ack_step, point.done) for point in message.points
    )
    return RelayMessage(message.stop_sequence, points)


class Outbox:
    """The newest message to send. It replaces one that was not sent yet, since points only advance."""

    def __init__(self) -> None:
        self._newest: peer_pb2.RankPoints | None = None
        self._ready = asyncio.Event()
        self._has_ended = False

    def put(self, message: peer_pb2.RankPoints) -> None:
        self._newest = message
        self._ready.set()

    def end(self) -> None:
        """End `messages`: the receiver is gone."""
        self._has_ended = True
        self._ready.set()

    async def messages(self) -> AsyncIterator[peer_pb2.RankPoints]:
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self._has_ended:
                return
            if self._newest is not None:
                yield self._newest


@dataclass(slots=True)
class Hub:
    """Leader's side: one outbox per member whose stream is open."""

    outboxes: set[Outbox] = field(default_factory=set)
    newest: peer_pb2.RankPoints | None = None

    def send(self, message: peer_pb2.RankPoints) -> None:
        if message == self.newest:
            return
        self.newest = message
        for outbox in self.outboxes:
            outbox.put(message)

    def join(self) -> Outbox:
        outbox = Outbox()
        if self.newest is not None:
            outbox.put(self.newest)
        self.outboxes.add(outbox)
        return outbox

    def leave(self, outbox: Outbox) -> None:
        self.outboxes.discard(outbox)


class Link:
    """Member's side: keeps a stream to the leader open for as long as the gang lives here."""

    def __init__(self, stub: PeerServiceAsyncStub, received: Callable[[RelayMessage], None]) -> None:
        self._stub = stub
        self._received = received
        self._newest: peer_pb2.RankPoints | None = None
        self._outbox = Outbox()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self, hello: peer_pb2.RankPoints) -> None:
        self._newest = hello
        self._task = asyncio.create_task(self._keep())

    def send(self, message: peer_pb2.RankPoints) -> None:
        if message == self._newest:
            return
        self._newest = message
        self._outbox.put(message)

    async def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        wait = _RETRY_SECONDS
        # gRPC (1.85) swallows a cancellation that comes while it opens a stream to a leader that is away
        while not self._is_closed:
            self._outbox = Outbox()
            if self._newest is not None:
                self._outbox.put(self._newest)
            try:
                call = self._stub.RelayBoundary(self._outbox.messages())
                async for message in call:
                    wait = _RETRY_SECONDS
                    self._received(from_wire(message))
            except grpc.aio.AioRpcError as error:
                log.debug("relay broke off", extra={"code": error.code().name})
            finally:
                # so that the request iterator, which gRPC may still read, ends
                self._outbox.end()
            if not self._is_closed:
                await asyncio.sleep(wait * (0.5 + random.random()))
            wait = min(_RETRY_LIMIT_SECONDS, wait * 2)


class Peers(Protocol):
    async def rendezvous(self, address: str, job_uid: str, epoch: int) -> tuple[str, int]:
        """Return host and port of the ranks' rendezvous. Raises OSError."""
        ...

    async def shard_written(self, address: str, job_uid: str, epoch: int, report: ShardReport) -> bool:
        """Send the leader at `address` a report. Return whether the whole checkpoint is published by now."""
        ...

    async def switch_row(self, address: str, order: peer_pb2.RowOrder) -> peer_pb2.RowState | None:
        """Send a slice order to a member of a time-slice group. Return its state after it; None without an answer."""
        ...

    def link(self, address: str, received: Callable[[RelayMessage], None]) -> Link:
        """Return a stream of boundary points to the leader, not started yet."""
        ...
