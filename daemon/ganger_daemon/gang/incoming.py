"""State of a gang that migrates to this node: when it is fetched, whether there is room, and what failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ganger.agent.v1 import agent_pb2
from ganger.protocol.gang_orders import DesiredOrder, OrderIntent

from ganger_daemon.core import gang_judgement
from ganger_daemon.gang.arrival import Arrival, RankTransfer
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.gang.desired_messages import LocalPart
from ganger_daemon.gang.rank_launch import Launching
from ganger_daemon.node.node_context import NodeContext
from ganger_daemon.transfer.stream_messages import StreamRequest

_RESTING = (gang_judgement.RankState.INIT, gang_judgement.RankState.RESTORING, gang_judgement.RankState.WAITING)


class Incoming:
    """Transfers of all local ranks. `changed` is called as state arrives."""

    def __init__(
        self, host: NodeContext, part: LocalPart, pages: ControlPages, launching: Launching, changed: Callable[[], None]
    ) -> None:
        self._host = host
        self._part = part
        self._pages = pages
        self._launching = launching
        self._changed = changed
        self._arrival: Arrival | None = None

    @property
    def trouble(self) -> str:
        return self._arrival.trouble if self._arrival is not None else ""

    def has_room(self, wanted: DesiredOrder) -> bool:
        """Return whether there is room for every rank's state; true for a gang that awaits none."""
        return not wanted.moves_in if self._arrival is None else self._arrival.has_room

    async def follow(self, desired: agent_pb2.DesiredGang, wanted: DesiredOrder) -> None:
        """Begin the transfers, once, if the ranks await a state and have not used it yet."""
        if (
            self._arrival is not None
            or not wanted.moves_in
            or wanted.intent not in (OrderIntent.PREPARE, OrderIntent.RUN)
        ):
            return
        if any(self._pages.progress(rank).state in _RESTING for rank in self._part.ranks):
            self._arrival = Arrival(await asyncio.to_thread(self._legs, desired), self._changed)
            self._arrival.start()

    def cancel(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()

    def _legs(self, desired: agent_pb2.DesiredGang) -> tuple[RankTransfer, ...]:
        source = desired.restore.parked
        addresses = {rank: member.stream_address for member in source.members for rank in member.ranks}
        requests = []
        for rank in self._part.ranks:
            # after growth several ranks restore from the image of one
            of_rank = rank % max(1, len(addresses))
            request = StreamRequest(self._host.token, desired.job_uid, source.epoch, 0, of_rank)
            requests.append((rank, addresses.get(of_rank, ""), request))
        return self._launching.legs(tuple(requests), self._pages)
