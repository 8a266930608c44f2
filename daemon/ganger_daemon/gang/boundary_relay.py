"""Exchange of boundary points between the daemons of one gang while its ranks agree on a boundary.

The leader has an outbox for each member, every other daemon a link to it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import grpc
from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.injob.page_layout import CHECKPOINT_BIT
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent
from ganger.protocol.stop_rules import RelayedPoint, merge_points

from ganger_daemon.core.gang_judgement import PartPhase
from ganger_daemon.gang.checkpointing import CheckpointCoordinator
from ganger_daemon.gang.gang_context import GangContext, OfGang, order_key_to_wire

if TYPE_CHECKING:
    from ganger.agent.v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

_RETRY_S = 0.05
_RETRY_LIMIT_S = 1.0


class Outbox:
    """The newest message to send. It replaces one that was not sent yet, since points only advance."""

    def __init__(self, newest: peer_pb2.RankPoints | None = None) -> None:
        self._newest = newest
        self._ready = asyncio.Event()
        self._has_ended = False
        if newest is not None:
            self._ready.set()

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


class Link:
    """Member's side: keeps a stream to the leader open for as long as the gang lives here."""

    def __init__(
        self,
        find_stub: Callable[[], PeerServiceAsyncStub],
        hello: peer_pb2.RankPoints,
        received: Callable[[peer_pb2.RankPoints], None],
    ) -> None:
        """`find_stub`: a channel is replaced when its certificate is renewed."""
        self._find_stub = find_stub
        self._received = received
        self._newest = hello
        self._outbox = Outbox()
        self._is_closed = False
        self._task = asyncio.create_task(self._keep())

    def send(self, message: peer_pb2.RankPoints) -> None:
        if message != self._newest:
            self._newest = message
            self._outbox.put(message)

    async def close(self) -> None:
        self._is_closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        wait = _RETRY_S
        # gRPC (1.85) swallows a cancellation that comes while it opens a stream to a leader that is away
        while not self._is_closed:
            self._outbox = Outbox(self._newest)
            try:
                call = self._find_stub().RelayBoundary(self._outbox.messages())
                async for message in call:
                    wait = _RETRY_S
                    self._received(message)
            except grpc.aio.AioRpcError as error:
                log.debug("relay broke off", extra={"code": error.code().name})
            except asyncio.CancelledError:
                # Where the channel was closed, gRPC cancels the call and not this task.
                if self._is_closed or self._task.cancelling():
                    raise
            except Exception:  # The leader sends its newest message again
                log.exception("message of the leader not taken", extra={"gang": self._newest.job_uid})
            finally:
                # So that the request iterator, which gRPC may still read, ends.
                self._outbox.end()
            if not self._is_closed:
                await asyncio.sleep(wait * (0.5 + random.random()))
            wait = min(_RETRY_LIMIT_S, wait * 2)


class BoundaryExchange(OfGang):
    """The leader's outboxes, one per member whose stream is open, or a member's link to it. A gang on one node
    exchanges nothing. `peer_agreement`: the agreement that a peer has relayed last; 0 before."""

    def __init__(self, context: GangContext, saving: CheckpointCoordinator) -> None:
        super().__init__(context)
        self._saving = saving
        self._link: Link | None = None
        self.outboxes: set[Outbox] = set()
        self._newest: peer_pb2.RankPoints | None = None
        self._last_rest: tuple[PartPhase, int] | None = None  # Phase and agreement in which points were sent at rest
        self.peer_agreement = 0

    def begin(
        self, leader: agent_pb2.Member, wanted: DesiredOrder, received: Callable[[peer_pb2.RankPoints], None]
    ) -> None:
        """Open a member's link to the leader, once."""
        if self._link is None and not self._part.leads:
            find_stub = partial(self._context.peers.stub, leader.peer_address)
            self._link = Link(find_stub, self._message(wanted, 0, ()), received)

    def join(self) -> Outbox:
        outbox = Outbox(self._newest)
        self.outboxes.add(outbox)
        return outbox

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()

    def receive(self, received: peer_pb2.RankPoints) -> bool:
        """Mirror the points of another daemon, and request here a checkpoint that the leader has requested. Return
        whether the peer has begun another agreement."""
        points = [
            RelayedPoint(point.rank, point.step, point.ack_sequence, point.ack_step, point.done)
            for point in received.points
        ]
        known, agreement = self._pages.points(), received.stop_sequence
        merged = merge_points(known, points, frozenset(self._part.ranks))
        self._pages.mirror(point for rank, point in merged.items() if point != known[rank])
        is_request = bool(agreement & CHECKPOINT_BIT)
        if is_request and agreement > self._pages.checkpoint_sequence() and not self._part.leads:
            self._saving.request(agreement & ~CHECKPOINT_BIT)
        if agreement in (0, self.peer_agreement):
            return False
        self.peer_agreement = agreement
        return True

    def in_flight(self, wanted: DesiredOrder, phase: PartPhase) -> int:
        """Return the agreement that is not settled yet; 0 while there is none, and for a gang on one node."""
        if len(self._part.ranks) == self._part.world:
            return 0
        if wanted.stop_sequence and phase in (PartPhase.STOPPING, PartPhase.RUNNING, PartPhase.STARTING):
            return wanted.stop_sequence
        sequence = self._pages.checkpoint_sequence()
        if sequence and wanted.intent is OrderIntent.RUN and not self._saving.keeper.is_settled(sequence):
            return sequence
        return 0

    def relay(self, wanted: DesiredOrder, phase: PartPhase) -> None:
        """Send the points known here while an agreement is in flight, and once more when the local ranks are parked or
        gone: they may have acknowledged, and even ended, since the last look at their pages."""
        if len(self._part.ranks) == self._part.world:
            return
        rest = (phase, wanted.stop_sequence) if phase in (PartPhase.PARKED, PartPhase.ENDED) else None
        is_due = rest is not None and rest != self._last_rest
        self._last_rest = rest
        agreement = self.in_flight(wanted, phase)
        if not agreement and not is_due:
            return
        points = self._pages.points()
        sent = points.values() if self._part.leads else [points[rank] for rank in self._part.ranks]
        message = self._message(wanted, agreement or wanted.stop_sequence, sent)
        if self._part.leads and message != self._newest:
            self._newest = message
            for outbox in self.outboxes:
                outbox.put(message)
        elif self._link is not None:
            self._link.send(message)

    def _message(self, wanted: DesiredOrder, agreement: int, points: Iterable[RelayedPoint]) -> peer_pb2.RankPoints:
        return peer_pb2.RankPoints(
            job_uid=self._context.paths.job_uid,
            epoch=self._context.paths.epoch,
            order=order_key_to_wire(wanted.order),
            stop_sequence=agreement,
            points=[peer_pb2.RankPoint(**point._asdict()) for point in points],
        )
