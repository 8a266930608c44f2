"""Virtual time: a heap of things to do, one source of chance. The same seed gives the same run, to the last step."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count


class Engine:
    """`now` in seconds; callbacks of one instant run in the order in which they were asked for."""

    def __init__(self, seed: int, start: float = 1_000_000.0) -> None:
        self.now = start
        self.random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + max(0.0, seconds), next(self._order), callback))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Runs everything up to a time, or until `stop` holds."""
        while self._heap and self._heap[0][0] <= until and not stop():
            self.now, _, callback = heapq.heappop(self._heap)
            callback()
        if not stop():
            self.now = max(self.now, until)

    def chance(self, probability: float) -> bool:
        # Asked even when impossible, so that a probability changes outcomes and not the sequence of dice.
        return self.random.random() < probability

    def between(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)
