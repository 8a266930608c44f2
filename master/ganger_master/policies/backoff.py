"""What was tried and did not help, so that it is not tried again at once: jobs change, so it is later."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

# Left alone for an hour, then for two, then for four; so many are remembered.
_RETRY_S: Final = 3600.0
_MOST_DOUBLINGS: Final = 8
_MOST: Final = 4096

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class FailedTrials(Generic[K]):
    """By what was tried: how often, and until when it is left alone."""

    notes: Mapping[K, tuple[int, float]] = field(default_factory=dict)

    def noted(self, tried: K, now: float) -> FailedTrials[K]:
        times = self.notes.get(tried, (0, 0.0))[0] + 1
        until = now + _RETRY_S * 2.0 ** min(times - 1, _MOST_DOUBLINGS)
        notes: dict[Any, tuple[int, float]] = {**self.notes, tried: (times, until)}
        if len(notes) > _MOST:
            # Of equal ones the oldest.
            del notes[min(notes, key=lambda known: notes[known][1])]
        return FailedTrials(notes)

    def forgotten(self, tried: K) -> FailedTrials[K]:
        """It helped after all."""
        if tried not in self.notes:
            return self
        notes = {**self.notes}
        del notes[tried]
        return FailedTrials(notes)

    def holds(self, tried: K, now: float) -> bool:
        return now < self.notes.get(tried, (0, float("-inf")))[1]
