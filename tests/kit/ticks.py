"""Jobs without boundaries that record when they ran, so that two attempts at once are found."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Ticks:
    """Each attempt appends the time to a file of its own in `directory`, ten times a second."""

    directory: Path

    def command(self, first: str = "") -> list[str]:
        """Return the command of the job; its shell runs `first` before."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return ["sh", "-c", f'{first}\nwhile :; do date +%s.%N >> "{self.directory}/$$"; sleep 0.1; done']

    def attempts(self) -> list[list[float]]:
        """Return the times at which each attempt ran, the oldest attempt first. A killed one may have cut off its last
        line."""
        found = [
            [float(line) for line in path.read_text().splitlines() if "." in line] for path in self.directory.iterdir()
        ]
        return sorted(times for times in found if times)

    def is_running(self, attempt: int) -> bool:
        """Return whether an attempt has ticked ten times, and just now."""
        attempts = self.attempts()
        return len(attempts) > attempt and attempts[attempt][-1] > time.time() - 0.5 and len(attempts[attempt]) >= 10

    def check(self) -> None:
        """Check that no attempt ran after a later one had begun."""
        for earlier, later in pairwise(self.attempts()):
            beside = [tick for tick in earlier if tick >= later[0]]
            assert not beside, f"{len(beside)} ticks in {beside[-1] - later[0]:.1f} s beside the next attempt"
