"""Exchange of boundary points between the daemons of one gang while its ranks agree on a boundary."""

from __future__ import annotations

from collections.abc import Callable

from ganger.agent.v1 import agent_pb2
from ganger.injob.page import CHECKPOINT_BIT
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent

from ganger_daemon.core.outcomes import PartPhase
from ganger_daemon.core.relay import merge_all
from ganger_daemon.gang.boundary_relay import Hub, Link, Peers, RelayMessage, to_wire
from ganger_daemon.gang.checkpointing import Saving
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.gang.desired_messages import LocalPart, order_key_to_wire
from ganger_daemon.node.directories import GangPaths


class Agreeing:
    """The leader's hub, or a member's link to it. A gang on one node exchanges nothing."""

    def __init__(self, peers: Peers, paths: GangPaths, part: LocalPart, pages: ControlPages, saving: Saving) -> None:
        self._peers = peers
        self._paths = paths
        self._part = part
        self._pages = pages
        self._saving = saving
        self._link: Link | None = None
        self.hub = Hub()

    def begin(self, leader: agent_pb2.Member, wanted: DesiredOrder, received: Callable[[RelayMessage], None]) -> None:
        """Open a member's link to the leader, once."""
        if self._link is None and not self._part.leads:
            self._link = self._peers.link(leader.peer_address, received)
            key = order_key_to_wire(wanted.order)
            self._link.start(to_wire(self._paths.job_uid, self._paths.epoch, key, RelayMessage(0, ())))

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()

    def receive(self, received: RelayMessage) -> None:
        """Mirror the points of another daemon, and request here a checkpoint that the leader has requested."""
        known = self._pages.points()
        merged = merge_all(known, received.points, frozenset(self._part.ranks))
        self._pages.mirror(point for rank, point in merged.items() if point != known[rank])
        asked = bool(received.agreement & CHECKPOINT_BIT) and received.agreement > self._pages.checkpoint_sequence()
        if asked and not self._part.leads:
            self._saving.request(received.agreement & ~CHECKPOINT_BIT)

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
        """Send the points known here while an agreement is in flight."""
        agreement = self.in_flight(wanted, phase)
        if not agreement:
            return
        points = self._pages.points()
        own = tuple(points[rank] for rank in self._part.ranks)
        sent = RelayMessage(agreement, tuple(points.values()) if self._part.leads else own)
        message = to_wire(self._paths.job_uid, self._paths.epoch, order_key_to_wire(wanted.order), sent)
        if self._part.leads:
            self.hub.send(message)
        elif self._link is not None:
            self._link.send(message)
