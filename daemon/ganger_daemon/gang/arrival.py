"""Destination of a migration. It makes room for the state of all local ranks while the source still trains, fetches
each rank's state in a thread, and raises ARENA_AVAILABLE as bytes arrive."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ganger_daemon.transfer.receiver import Landing, fetch, wait_for_pages
from ganger_daemon.transfer.stream_messages import StreamError, StreamRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankTransfer:
    """Transfer of one rank's state: source, arena, and `available`, which takes the bytes received so far.

    `bytes_ahead`: bytes of the arena that the job itself allocates; the transfer waits for them."""

    rank: int
    address: str
    request: StreamRequest
    open_arena: Callable[[], int]
    arena_bytes: int
    bytes_ahead: int
    available: Callable[[int], None]
    # Directory of the certificate to show; empty: the token in the request does.
    tls: str = ""


class Arrival:
    """Transfers of all local ranks of one migrating gang."""

    def __init__(self, legs: tuple[RankTransfer, ...], changed: Callable[[], None]) -> None:
        self._legs = legs
        self._changed = changed
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._without_room = {leg.rank for leg in legs}
        self._trouble = ""
        self._threads = [
            threading.Thread(target=self._travel, args=(leg,), name=f"state-stream-in-{leg.rank}", daemon=True)
            for leg in legs
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def trouble(self) -> str:
        with self._lock:
            return self._trouble

    @property
    def has_room(self) -> bool:
        """Whether there is room for every rank's state."""
        with self._lock:
            return not self._without_room

    def _travel(self, leg: RankTransfer) -> None:
        try:
            fd = leg.open_arena()
        except Exception as error:  # the launcher may be gone: whatever the cause, the migration cannot continue
            self._fail(f"rank {leg.rank}: the arena cannot be had: {error}")
            return
        try:
            if leg.bytes_ahead:
                wait_for_pages(fd, leg.bytes_ahead, self._cancelled)
            with Landing(fd, leg.arena_bytes) as landing:
                landing.enter(leg.bytes_ahead)
                with self._lock:
                    self._without_room.discard(leg.rank)
                self._changed()
                fetch(leg.address, leg.request, landing, leg.available, self._cancelled, tls=leg.tls)
        except (StreamError, OSError, ValueError) as error:
            if not self._cancelled.is_set():
                self._fail(f"rank {leg.rank}: {error}")
            return
        finally:
            os.close(fd)
        self._changed()

    def _fail(self, why: str) -> None:
        log.warning("move cannot go on", extra={"why": why})
        with self._lock:
            self._trouble = self._trouble or why
        self._changed()
