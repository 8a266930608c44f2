"""Virtual time: what is to happen, in order of time and then of asking."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


def _never() -> bool:
    return False


class Clock:
    """`now` in seconds."""

    def __init__(self, start: float) -> None:
        self.now = start
        self._heap: list[tuple[float, int, Callable[[], None], Callable[[], bool]]] = []
        self._order = count()

    def at(self, time: float, act: Callable[[], None], is_void: Callable[[], bool] = _never) -> None:
        """`is_void`: whether it is not to happen after all. Then nothing is: not even its time comes, for that a job
        would have ended then is something that nobody may see."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), act, is_void))

    def next_time(self) -> float | None:
        while self._heap and self._heap[0][3]():
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run_instant(self) -> int:
        """Everything that is due at the next instant, which becomes now; how much that was."""
        time = self.next_time()
        assert time is not None, "nothing is to happen"
        self.now = time
        done = 0
        while self.next_time() == self.now:
            heapq.heappop(self._heap)[2]()
            done += 1
        return done
