"""Virtual time: what is to happen, in order of time and then of asking."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """`now` in seconds."""

    def __init__(self, start: float) -> None:
        self.now = start
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), act))

    def next_time(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def run_instant(self) -> int:
        """Everything that is due at the next instant, which becomes now; how much that was."""
        self.now = self._heap[0][0]
        done = 0
        while self._heap and self._heap[0][0] == self.now:
            heapq.heappop(self._heap)[2]()
            done += 1
        return done
