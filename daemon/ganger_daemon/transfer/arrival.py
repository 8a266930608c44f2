"""A move's destination: fetches the arenas of all local ranks, each in a thread, and raises ARENA_AVAILABLE as bytes
come."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .frames import StreamError, StreamRequest
from .stream import fetch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leg:
    """One rank's way: from whom, into which arena, and where to say how far it is."""

    rank: int
    address: str
    request: StreamRequest
    open_arena: Callable[[], int]
    arena_bytes: int
    available: Callable[[int], None]


class Arrival:
    """All legs of one gang's move into this node."""

    def __init__(self, legs: tuple[Leg, ...], changed: Callable[[], None]) -> None:
        self._legs = legs
        self._changed = changed
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
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
    def sizes(self) -> Mapping[int, int]:
        """Bytes by rank, of those that are complete."""
        with self._lock:
            return dict(self._sizes)

    def _travel(self, leg: Leg) -> None:
        try:
            fd = leg.open_arena()
        except Exception as error:  # the launcher may be gone: whatever it was, the move cannot go on
            self._fail(f"rank {leg.rank}: the arena cannot be had: {error}")
            return
        try:
            size = fetch(leg.address, leg.request, fd, leg.arena_bytes, leg.available, self._cancelled)
        except StreamError as error:
            if not self._cancelled.is_set():
                self._fail(f"rank {leg.rank}: {error}")
            return
        finally:
            os.close(fd)
        with self._lock:
            self._sizes[leg.rank] = size
        self._changed()

    def _fail(self, why: str) -> None:
        log.warning("move cannot go on", extra={"why": why})
        with self._lock:
            self._trouble = self._trouble or why
        self._changed()
