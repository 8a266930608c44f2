"""For how long each running job has stepped, by what it reports: who takes turns does so only in its own.

Reports come about once a second while a job steps, none while it rests. Between two that are close together it stepped
all the time; of two that are far apart the steps between them count, as long each as steps of that job are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

# Between two reports of who steps all the time, at most.
_STEADY_S: Final = 2.5
# Steps grow longer at most so fast; shorter at once.
_SLOWER: Final = 1.1


@dataclass(slots=True)
class _Known:
    step: int
    time_s: float
    step_s: float = float("inf")
    received_s: float = 0.0


Remembered: TypeAlias = Mapping[int, _Known]


class AttainedService:
    """By job number. Seconds by the clocks of nodes, of which only differences count."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Known] = {}

    def record(self, number: int, step: int, time_s: float) -> None:
        """A report: when the newest step was done."""
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
        """Forgets all others."""
        for number in [number for number in self._jobs if not is_live(number)]:
            del self._jobs[number]

    @property
    def remembered(self) -> Remembered:
        """For one that goes on from there."""
        return self._jobs

    def recall(self, remembered: Remembered) -> None:
        """What one before this remembered."""
        self._jobs = dict(remembered)

    @property
    def received_s(self) -> dict[int, float]:
        """Since each was first heard of."""
        return {number: known.received_s for number, known in self._jobs.items()}
