"""Pause between commits: none for a single caller, a few milliseconds under load.

The cost of a commit per change depends mostly on the batch size (an order of magnitude between 1 and 32 changes). A
fixed pause would slow a single caller down, so the pause follows the size of the last batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SHORTEST_SECONDS: Final = 0.003
_LONGEST_SECONDS: Final = 0.010
# Batches below this many callers say that the pause buys nothing.
_FEW: Final = 2


@dataclass(slots=True)
class CommitPace:
    """Adapts one number: the seconds between the starts of two commits."""

    pause_seconds: float = 0.0
    _last_begin: float = float("-inf")

    def wait_seconds(self, now: float) -> float:
        """How long to go on collecting before the next commit begins; zero for now."""
        return max(0.0, self._last_begin + self.pause_seconds - now)

    def began(self, now: float) -> None:
        self._last_begin = now

    def ended(self, callers: int, seconds: float) -> None:
        """`callers` waited for the commit that took `seconds`: many callers or a slow disk lengthen the pause."""
        if callers < _FEW:
            self.pause_seconds = 0.0
        else:
            self.pause_seconds = min(_LONGEST_SECONDS, max(_SHORTEST_SECONDS, 2 * seconds))
