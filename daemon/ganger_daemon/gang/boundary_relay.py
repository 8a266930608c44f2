"""Exchange of boundary points between the daemons of one gang while its ranks agree on a boundary.

The leader has an outbox for each member, every other daemon a link to it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import grpc
from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.injob.page_layout import CHECKPOINT_BIT
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent
from ganger.protocol.stop_rules import RelayedPoint, merge_points
from ganger.wire.errors import from_rpc_error

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
    """Member's side: keeps a stream to the leader open for as long as the gang lives here, and on the leader's node."""

    def __init__(
        self,
        find_stub: Callable[[], PeerServiceAsyncStub],
        hello: peer_pb2.RankPoints,
        received: Callable[[peer_pb2.RankPoints], None],
        leader_ended: Callable[[], None],
    ) -> None:
        """`find_stub`: a channel is replaced when its certificate is renewed. `leader_ended`: called once the leader's
        daemon has forgotten its part of the gang, for that has ended."""
        self._find_stub = find_stub
        self._received = received
        self._leader_ended = leader_ended
        self._sequence = 0
        self._sent = hello
        self._newest = self._numbered(hello)
        self._outbox = Outbox()
        self._is_closed = False
        self._task = asyncio.create_task(self._keep())

    def send(self, message: peer_pb2.RankPoints) -> None:
        if message != self._sent:
            self._sent, self._newest = message, self._numbered(message)
            self._outbox.put(self._newest)

    def _numbered(self, message: peer_pb2.RankPoints) -> peer_pb2.RankPoints:
        """Return the message with a number above all before, also of former daemons: a gang does not survive a boot."""
        self._sequence = max(self._sequence + 1, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        numbered = peer_pb2.RankPoints(sequence=self._sequence)
        numbered.MergeFrom(message)
        return numbered

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
                if "ended" in from_rpc_error(error).metadata:
                    self._leader_ended()
                    return
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
        # By rank of another node: the number of the newest message of its node.
        self._sequences: dict[int, int] = {}

    def begin(
        self, leader: agent_pb2.Member, wanted: DesiredOrder, received: Callable[[peer_pb2.RankPoints], None]
    ) -> None:
        """Open a member's link to the leader, once."""
        if self._link is None and not self._part.leads:
            find_stub = partial(self._context.peers.stub, leader.peer_address)
            ended = peer_pb2.RankPoints(points=[peer_pb2.RankPoint(rank=rank, done=True) for rank in leader.ranks])
            self._link = Link(find_stub, self._message(wanted, 0, ()), received, partial(received, ended))

    def join(self) -> Outbox:
        outbox = Outbox(self._newest)
        self.outboxes.add(outbox)
        return outbox

    async def close(self) -> None:
        # A member calls again, and is told that this part has ended.
        for outbox in self.outboxes:
            outbox.end()
        if self._link is not None:
            await self._link.close()

    def receive(self, received: peer_pb2.RankPoints) -> bool:
        """Mirror the points of another daemon, and request here a checkpoint that the leader has requested. Return
        whether the peer has begun another agreement. A message that was sent before the newest one is dropped."""
        if self._is_late(received):
            return False
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

    def _is_late(self, received: peer_pb2.RankPoints) -> bool:
        if not received.sequence:
            return False
        ranks = [point.rank for point in received.points]
        if any(received.sequence < self._sequences.get(rank, 0) for rank in ranks):
            return True
        self._sequences.update(dict.fromkeys(ranks, received.sequence))
        return False

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
