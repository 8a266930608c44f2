"""Streams of placement leases: a bounded queue per WatchTurns call. A lease that does not fit expires unused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ganger_master.core.commands import ClaimTurns
from ganger_master.core.queue import GrantedLease

# Turns given at once are few; a stream this far behind has missed the leases of the oldest ones anyway.
_LONGEST_QUEUE: Final = 1_000


class TurnStreams:
    """Live streams by the name of their scheduler."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[GrantedLease | None]] = {}
        self._claims: dict[str, tuple[int, ...]] = {}

    def claims(self) -> list[ClaimTurns]:
        """What the open streams claim, to be said again after the core has started over."""
        return [ClaimTurns(scheduler, jobs) for scheduler, jobs in self._claims.items()]

    def is_of(self, scheduler: str, queue: asyncio.Queue[GrantedLease | None]) -> bool:
        """Whether the stream with this queue still has the name."""
        return self._queues.get(scheduler) is queue

    def has_other_host(self, scheduler: str) -> bool:
        """Whether another default host than this one listens."""
        return any(not jobs and other != scheduler for other, jobs in self._claims.items())

    @contextmanager
    def opened(self, scheduler: str, jobs: tuple[int, ...]) -> Iterator[asyncio.Queue[GrantedLease | None]]:
        """The queue of a stream; a later stream of the same name takes the name over, and None ends this
        one."""
        queue: asyncio.Queue[GrantedLease | None] = asyncio.Queue(_LONGEST_QUEUE)
        former = self._queues.get(scheduler)
        if former is not None:
            _put(former, None)
        self._queues[scheduler] = queue
        self._claims[scheduler] = jobs
        try:
            yield queue
        finally:
            if self._queues.get(scheduler) is queue:
                del self._queues[scheduler]
                del self._claims[scheduler]

    def give(self, turn: GrantedLease) -> None:
        """To the stream that claimed its job, else to the default hosts, the least busy of them."""
        queue = self._queues.get(turn.scheduler)
        if queue is None and not turn.scheduler:
            hosts = [self._queues[scheduler] for scheduler, jobs in self._claims.items() if not jobs]
            queue = min(hosts, key=lambda host: host.qsize(), default=None)
        if queue is not None:
            _put(queue, turn)


def _put(queue: asyncio.Queue[GrantedLease | None], turn: GrantedLease | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(turn)
