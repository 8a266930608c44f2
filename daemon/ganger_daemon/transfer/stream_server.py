"""What the stream port may serve: arenas of gangs that are here, of the stop they rest in, as far as they are
filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ganger.agent.v1 import agent_pb2
from ganger.injob.page import PageState

from ganger_daemon.core.orders import PartPhase
from ganger_daemon.transfer.request import StreamError, StreamRequest

if TYPE_CHECKING:
    from ganger_daemon.gang.gang import LocalGang
    from ganger_daemon.node.gang_set import GangSet

_FILLING = (PageState.SAVING, PageState.HANDED_OVER, PageState.OFFLOADED)


class ParkedArenas:
    """Called from threads of the stream server; reads only."""

    def __init__(self, gangs: GangSet) -> None:
        self._gangs = gangs

    def find(self, request: StreamRequest) -> ParkedArena:
        gang = self._gangs.find(request.job_uid, request.epoch)
        if gang is None:
            raise StreamError(f"epoch {request.epoch} of {request.job_uid} is not here", retry=True)
        if request.rank not in gang.part.ranks:
            raise StreamError(f"rank {request.rank} is not on this node", retry=False)
        return ParkedArena(gang, request.rank, request.stop_sequence)


class ParkedArena:
    """One rank's arena. Bound to the first stop in which it is seen filling."""

    def __init__(self, gang: LocalGang, rank: int, stop_sequence: int) -> None:
        self._gang = gang
        self._rank = rank
        self._stop = stop_sequence

    def progress(self) -> tuple[int, int]:
        gang = self._gang
        # who only rests for another's turn will go on: what it has in its arena is not what it moves with
        if not gang.pages.readable or not gang.wanted.stop_sequence or gang.told.intent == agent_pb2.INTENT_RUN:
            return 0, 0
        progress = gang.pages.progress(self._rank)
        # before the rank rests in this stop, the numbers may be those of an earlier one
        if progress.ack_seq != gang.wanted.stop_sequence or progress.state not in _FILLING:
            return 0, 0
        if progress.arena_size and progress.arena_filled and not self._stop:
            self._stop = gang.wanted.stop_sequence
        return progress.arena_size, min(progress.arena_filled, progress.arena_size)

    def valid(self) -> bool:
        gang = self._gang
        if gang.forgotten or gang.phase is PartPhase.ENDED:
            return False
        return not self._stop or gang.wanted.stop_sequence == self._stop

    def open_arena(self) -> int:
        return self._gang.launching.open_arena(self._rank)
