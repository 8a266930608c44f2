"""Exponential backoff of changes that were tried and did not help."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

# The delay is an hour, then two, then four. At most `_MOST` failures are kept.
_RETRY_S: Final = 3600.0
_MOST_DOUBLINGS: Final = 8
_MOST: Final = 4096

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class FailedTrials(Generic[K]):
    """Failed trials by what was tried: number of failures, and when the next trial may begin."""

    notes: Mapping[K, tuple[int, float]] = field(default_factory=dict)

    def noted(self, tried: K, now: float) -> FailedTrials[K]:
        """Return these with one more failure."""
        times = self.notes.get(tried, (0, 0.0))[0] + 1
        until = now + _RETRY_S * 2.0 ** min(times - 1, _MOST_DOUBLINGS)
        notes: dict[Any, tuple[int, float]] = {**self.notes, tried: (times, until)}
        if len(notes) > _MOST:
            # Of equal ones the oldest.
            del notes[min(notes, key=lambda known: notes[known][1])]
        return FailedTrials(notes)

    def forgotten(self, tried: K) -> FailedTrials[K]:
        """Return these without the failures of a change that has helped."""
        if tried not in self.notes:
            return self
        notes = {**self.notes}
        del notes[tried]
        return FailedTrials(notes)

    def holds(self, tried: K, now: float) -> bool:
        """Return whether the change must not be tried now."""
        return now < self.notes.get(tried, (0, float("-inf")))[1]
