"""Virtual time: what is to happen, in order of time and then of asking."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

# A trace's clock begins at zero, and a time of zero means "never" in the core.
EPOCH_S = 1_000_000.0
# Times that are nearer to each other are the same instant: sums of decimals are seldom exact.
INSTANT_S = 1e-6


def instant(time: float) -> float:
    """The time itself, but for what was lost in making it: what is equal in decimals is equal."""
    return round(time, 6)


def rounds_until(time: float, step_s: float) -> float:
    """How many rounds of so many seconds have gone by; a whole number where one begins."""
    rounds = (time - EPOCH_S) / step_s
    nearest = round(rounds)
    return nearest if abs(rounds - nearest) * step_s < INSTANT_S else rounds


def round_start(number: float, step_s: float) -> float:
    return instant(EPOCH_S + step_s * number)


class Clock:
    """`now` in seconds."""

    def __init__(self, start: float) -> None:
        self.now = start
        self._heap: list[tuple[float, int, Callable[[], None], Callable[[], bool] | None]] = []
        self._order = count()

    def at(self, time: float, act: Callable[[], None], is_void: Callable[[], bool] | None = None) -> None:
        """`is_void`: whether it is not to happen after all. Then nothing is: not even its time comes, for that a job
        would have ended then is something that nobody may see."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), act, is_void))

    def next_time(self) -> float | None:
        heap = self._heap
        while heap:
            time, _, _, is_void = heap[0]
            if is_void is None or not is_void():
                return time
            heapq.heappop(heap)
        return None

    def run_instant(self) -> int:
        """Everything that is due at the next instant, which becomes now; how much that was."""
        time = self.next_time()
        assert time is not None, "nothing is to happen"
        self.now = time
        done = 0
        while time == self.now:
            heapq.heappop(self._heap)[2]()
            done += 1
            time = self.next_time()
        return done
