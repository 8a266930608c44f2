"""Virtual time: scheduled actions, ordered by time and then by the order of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

# A trace's clock begins at zero, and a time of zero means "never" in the core.
EPOCH_S = 1_000_000.0
# Times closer than this are the same instant: sums of decimals are seldom exact.
INSTANT_S = 1e-6


def instant(time: float) -> float:
    """Return the time rounded to microseconds, so that times equal in decimals compare equal."""
    return round(time, 6)


def rounds_until(time: float, step_s: float) -> float:
    """Return the number of rounds of `step_s` seconds since the epoch; a whole number at the start of a round."""
    rounds = (time - EPOCH_S) / step_s
    nearest = round(rounds)
    return nearest if abs(rounds - nearest) * step_s < INSTANT_S else rounds


def round_start(number: float, step_s: float) -> float:
    return instant(EPOCH_S + step_s * number)


class Clock:
    """A clock of virtual time with scheduled actions. `now`: seconds."""

    def __init__(self, start: float) -> None:
        self.now = start
        self._heap: list[tuple[float, int, Callable[[], None], Callable[[], bool] | None]] = []
        self._order = count()

    def at(self, time: float, act: Callable[[], None], is_void: Callable[[], bool] | None = None) -> None:
        """Schedule an action. `is_void`: whether the action is cancelled by then.

        Virtual time skips the instant of a cancelled action: no policy may observe when a job would have ended.
        """
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
        """Advance to the next instant, run all of its actions and return their number."""
        time = self.next_time()
        assert time is not None, "no action is scheduled"
        self.now = time
        done = 0
        while time == self.now:
            heapq.heappop(self._heap)[2]()
            done += 1
            time = self.next_time()
        return done
