"""Named places at which a test may have a service killed with SIGKILL, or stopped while the test kills another process.

Off unless the environment variable GANGER_FAILPOINTS is set. `before-commit` dies at the first passage,
`before-commit:3` at the third, `before-commit=stop` stops there with SIGSTOP until a SIGCONT; several are separated by
commas; names of other programs are passed over, because programs started together share the variable. `@PATH` names a
file with such a text instead, which may come and go while the process runs and is removed by the passage that is due.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

VARIABLE = "GANGER_FAILPOINTS"

OF_DEVICES: Final = frozenset({"devices-locked", "devices-saved", "devices-restored"})
OF_IMAGES: Final = OF_DEVICES | frozenset({"image-dumped", "image-packed", "image-unpacked", "image-restored"})
OF_DAEMON: Final = OF_IMAGES | frozenset(
    {
        "after-prepare",
        "partial-acks",
        "mid-stream",
        "before-move-commit",
        "parked-before-report",
        "between-fork-and-page",
        "mid-fsync",
        "before-rename",
        "after-rename",
        "order-half-written",
        "before-reap",
    }
)


class Due(NamedTuple):
    """At which passage, and the signal the process then sends itself."""

    passage: int = 1
    signal: signal.Signals = signal.SIGKILL


def parse(text: str, names: Set[str]) -> dict[str, Due]:
    """Return the actions at each failpoint of `names`. Raises ValueError for a wrong count or action."""
    found: dict[str, Due] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        place, _, action = part.partition("=")
        name, _, count = place.partition(":")
        if count and (not count.isdigit() or int(count) == 0):
            raise ValueError(f"failpoint {part!r}: the count must be a positive number")
        if action not in ("", "stop"):
            raise ValueError(f"failpoint {part!r}: the action must be stop or left out")
        if name in names:
            found[name] = Due(int(count or 1), signal.SIGSTOP if action else signal.SIGKILL)
    return found


class Failpoints:
    """The failpoints of one process, of those called `names`."""

    def __init__(self, names: Set[str], text: str | None = None) -> None:
        text = os.environ.get(VARIABLE, "") if text is None else text
        self._names = names
        self._file = Path(text[1:]) if text.startswith("@") else None
        self._due = {} if self._file else parse(text, names)
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def passing(self, name: str) -> None:
        """Kills or stops this process if `name` is due; otherwise costs one look into an empty dictionary."""
        assert name in self._names, f"failpoint {name} is not in the table"
        if self._file is None and name not in self._due:
            return
        with self._lock:
            if self._file is not None:
                try:
                    self._due = parse(self._file.read_text(), self._names)
                except OSError:
                    return
            due = self._due.get(name)
            if due is None:
                return
            self._passed[name] += 1
            if self._passed[name] < due.passage:
                return
            del self._due[name]
            if self._file is not None:
                self._passed.clear()
                self._file.unlink(missing_ok=True)
            os.kill(os.getpid(), due.signal)


def hit(name: str) -> None:
    """Kill or stop this daemon if the environment names this failpoint, of `OF_DAEMON`."""
    _of_daemon().passing(name)


@cache
def _of_daemon() -> Failpoints:
    return Failpoints(OF_DAEMON)
