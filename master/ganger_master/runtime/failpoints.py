"""Named places at which a test may kill this process with SIGKILL.

Off unless the environment variable GANGER_FAILPOINTS names one: `before-commit` dies at the first passage,
`before-commit:3` at the third; several are separated by commas. The names are the constants below, so that a test can
list them; names of other programs are passed over, because programs started together share the variable.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Final

BEFORE_COMMIT: Final = "before-commit"
AFTER_COMMIT: Final = "after-commit"
COMMIT_BEFORE_REPLY: Final = "commit-before-reply"
BEFORE_MOVE_COMMIT: Final = "before-move-commit"
AFTER_MOVE_COMMIT: Final = "after-move-commit"
BEFORE_DESIRED: Final = "before-desired"
MID_LOAD: Final = "mid-load"

NAMES: Final = frozenset(
    {BEFORE_COMMIT, AFTER_COMMIT, COMMIT_BEFORE_REPLY, BEFORE_MOVE_COMMIT, AFTER_MOVE_COMMIT, BEFORE_DESIRED, MID_LOAD}
)

VARIABLE: Final = "GANGER_FAILPOINTS"


def parse(text: str, names: frozenset[str] = NAMES) -> dict[str, int]:
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
    """The failpoints of one process and how often each is still to be passed."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._left = dict(counts)

    @classmethod
    def of_environment(cls) -> Failpoints:
        return cls(parse(os.environ.get(VARIABLE, "")))

    def passing(self, name: str) -> None:
        """Kills this process if `name` is due; costs one look into an empty dictionary otherwise."""
        left = self._left.get(name)
        if left is None:
            return
        if left <= 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left[name] = left - 1
