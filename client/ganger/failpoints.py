"""Named places at which a test may have a service killed with SIGKILL.

Off unless the environment variable GANGER_FAILPOINTS is set. `before-commit` dies at the first passage,
`before-commit:3` at the third, several are separated by commas; names of other programs are passed over, because
programs started together share the variable. `@PATH` names a file with such a text instead, which may come and go
while the process runs and is removed by the passage that kills.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Set
from pathlib import Path

VARIABLE = "GANGER_FAILPOINTS"


def parse(text: str, names: Set[str]) -> dict[str, int]:
    """Failpoint name to the passage at which it kills. ValueError for a count that is not a positive number."""
    counts: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, count = part.partition(":")
        if count and (not count.isdigit() or int(count) == 0):
            raise ValueError(f"failpoint {part!r}: the count must be a positive number")
        if name in names:
            counts[name] = int(count or 1)
    return counts


class Failpoints:
    """The failpoints of one process, of those called `names`."""

    def __init__(self, names: Set[str], text: str | None = None) -> None:
        text = os.environ.get(VARIABLE, "") if text is None else text
        self._names = names
        self._file = Path(text[1:]) if text.startswith("@") else None
        self._counts = {} if self._file else parse(text, names)
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def passing(self, name: str) -> None:
        """Kills this process if `name` is due; otherwise costs one look into an empty dictionary."""
        assert name in self._names, f"failpoint {name} is not in the table"
        if self._file is None and name not in self._counts:
            return
        with self._lock:
            if self._file is not None:
                try:
                    self._counts = parse(self._file.read_text(), self._names)
                except OSError:
                    return
            if name not in self._counts:
                return
            self._passed[name] += 1
            if self._passed[name] >= self._counts[name]:
                if self._file is not None:
                    self._file.unlink(missing_ok=True)
                os.kill(os.getpid(), signal.SIGKILL)
