"""The device time that each running job has received, from its progress reports: a time-sliced job steps only in its
slices.

A job reports about once a second while it steps, and not while it is parked. Between two close reports it stepped all
the time; between two distant ones its steps count, each with the job's time per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

# Seconds between two reports of a job that steps all the time, at most.
_STEADY_S: Final = 2.5
# The time per step grows at most by this factor; it shrinks at once.
_SLOWER: Final = 1.1


@dataclass(slots=True)
class _Known:
    step: int
    time_s: float
    step_s: float = float("inf")
    received_s: float = 0.0


Remembered: TypeAlias = Mapping[int, _Known]


class AttainedService:
    """Received seconds by job number, by the clocks of nodes, of which only differences count."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Known] = {}

    def record(self, number: int, step: int, time_s: float) -> None:
        """Record a report: `step` was done at `time_s`."""
        known = self._jobs.get(number)
        if known is None:
            self._jobs[number] = _Known(step, time_s)
            return
        steps, span_s = step - known.step, time_s - known.time_s
        known.step, known.time_s = step, time_s
        if steps <= 0 or span_s <= 0.0:
            return
        if span_s <= _STEADY_S:
            known.received_s += span_s
            known.step_s = span_s / steps
            return
        known.step_s = min(_SLOWER * known.step_s, span_s / steps)
        known.received_s += min(span_s, steps * known.step_s)

    def forget(self, number: int) -> None:
        self._jobs.pop(number, None)

    def keep(self, is_live: Callable[[int], bool]) -> None:
        """Drop the jobs that are not live."""
        for number in [number for number in self._jobs if not is_live(number)]:
            del self._jobs[number]

    @property
    def remembered(self) -> Remembered:
        """The measurements, for a planner that continues from them."""
        return self._jobs

    def recall(self, remembered: Remembered) -> None:
        """Take over the measurements of an earlier planner."""
        self._jobs = dict(remembered)

    @property
    def received_s(self) -> dict[int, float]:
        """The seconds received since each job's first report."""
        return {number: known.received_s for number, known in self._jobs.items()}
