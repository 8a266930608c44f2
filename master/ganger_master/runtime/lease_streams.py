"""Streams of placement leases: a bounded queue of batches per call of WatchLeases. What does not fit expires unused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

from ganger_master.core.commands import ClaimTurns
from ganger_master.core.queue import GrantedLease

LeaseBatch: TypeAlias = Sequence[GrantedLease]
# A batch takes one commit; a stream so many batches behind has missed the leases of the oldest ones anyway.
_LONGEST_QUEUE: Final = 1_000


class LeaseStreams:
    """Live streams by the name of their scheduler."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[LeaseBatch | None]] = {}
        self._claims: dict[str, tuple[int, ...]] = {}

    def claims(self) -> list[ClaimTurns]:
        """Return what the open streams claim, to be repeated after the core has started over."""
        return [ClaimTurns(scheduler, jobs) for scheduler, jobs in self._claims.items()]

    def is_of(self, scheduler: str, queue: asyncio.Queue[LeaseBatch | None]) -> bool:
        """Return whether the stream with this queue still has the name."""
        return self._queues.get(scheduler) is queue

    def has_other_host(self, scheduler: str) -> bool:
        """Return whether another default host than this one is connected."""
        return any(not jobs and other != scheduler for other, jobs in self._claims.items())

    @contextmanager
    def opened(self, scheduler: str, jobs: tuple[int, ...]) -> Iterator[asyncio.Queue[LeaseBatch | None]]:
        """Yield the queue of a stream; a later stream of the same name takes the name over, and None ends this one."""
        queue: asyncio.Queue[LeaseBatch | None] = asyncio.Queue(_LONGEST_QUEUE)
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

    def give(self, leases: LeaseBatch) -> None:
        """Send the leases of one commit: each to the stream that claimed its job, all others to the default host that
        is least busy."""
        host = min(
            [scheduler for scheduler, jobs in self._claims.items() if not jobs],
            key=lambda scheduler: self._queues[scheduler].qsize(),
            default="",
        )
        batches: dict[str, list[GrantedLease]] = {}
        for lease in leases:
            batches.setdefault(lease.scheduler or host, []).append(lease)
        for scheduler, batch in batches.items():
            queue = self._queues.get(scheduler)
            if queue is not None:
                _put(queue, batch)


def _put(queue: asyncio.Queue[LeaseBatch | None], batch: LeaseBatch | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(batch)
