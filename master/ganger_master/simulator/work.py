"""What jobs really are and nobody may know: the work they hold, how fast they go, and when they will end.

Work is seconds at the recorded pace: at rate 1 a job ends after the duration of its trace.
"""

from __future__ import annotations

from array import array

import numpy as np

from ganger_master.policies.job_facts import Floats, Integers


class Work:
    """By position in the workload."""

    def __init__(self, duration_s: Floats) -> None:
        # Asked for job by job nearly always, which arrays of NumPy take several times as long for.
        self._left: array[float] = array("d", duration_s.tolist())
        # Counted by itself: what is left would tell of the end, by its rounding at least.
        self._done, self._since, self._rate = (array("d", bytes(8 * len(self._left))) for _ in range(3))
        # The same memory, for oracles.
        self._columns = [np.frombuffer(one) for one in (self._left, self._since, self._rate)]

    def begin(self, job: int, now: float, rate: float = 1.0) -> float:
        """It trains from now on; when it will end if nothing changes."""
        self._since[job], self._rate[job] = now, rate
        return now + self._left[job] / rate

    def change(self, job: int, now: float, rate: float) -> float:
        """It goes on at another rate; when it will end now."""
        self.stop(job, now)
        return self.begin(job, now, rate)

    def stop(self, job: int, now: float) -> float:
        """It trains no more; seconds of work left."""
        done = (now - self._since[job]) * self._rate[job]
        self._left[job] -= done
        self._done[job] += done
        self._rate[job] = 0.0
        return self._left[job]

    def done(self, job: int, now: float) -> float:
        """Seconds of work behind it: what it has reported."""
        return self._done[job] + (now - self._since[job]) * self._rate[job]

    def remaining(self, jobs: Integers, now: float) -> Floats:
        """Seconds of work left; for oracles."""
        left, since, rate = (column[jobs] for column in self._columns)
        return np.maximum(left - (now - since) * rate, 0.0)
