"""Jobs without boundaries that write down when they ran, so that two attempts at once are seen."""

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
        """The command of the job; `first` is run by its shell before."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return ["sh", "-c", f'{first}\nwhile :; do date +%s.%N >> "{self.directory}/$$"; sleep 0.1; done']

    def attempts(self) -> list[list[float]]:
        """When each attempt ran, the oldest first. The last line of a killed one may be cut off."""
        found = [
            [float(line) for line in path.read_text().splitlines() if "." in line] for path in self.directory.iterdir()
        ]
        return sorted(times for times in found if times)

    def is_running(self, attempt: int) -> bool:
        """Whether an attempt has ticked ten times, and just now."""
        attempts = self.attempts()
        return len(attempts) > attempt and attempts[attempt][-1] > time.time() - 0.5 and len(attempts[attempt]) >= 10

    def check(self) -> None:
        """No attempt ran once a later one had begun."""
        for earlier, later in pairwise(self.attempts()):
            beside = [tick for tick in earlier if tick >= later[0]]
            assert not beside, f"{len(beside)} ticks in {beside[-1] - later[0]:.1f} s beside the next attempt"
