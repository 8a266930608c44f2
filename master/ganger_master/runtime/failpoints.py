"""The places at which a test may have the master killed; see ganger.failpoints."""

from __future__ import annotations

from typing import Final

from ganger.failpoints import Failpoints

BEFORE_COMMIT: Final = "before-commit"
AFTER_COMMIT: Final = "after-commit"
COMMIT_BEFORE_REPLY: Final = "commit-before-reply"
BEFORE_MOVE_COMMIT: Final = "before-move-commit"
AFTER_MOVE_COMMIT: Final = "after-move-commit"
MID_LOAD: Final = "mid-load"

NAMES: Final = frozenset(
    {BEFORE_COMMIT, AFTER_COMMIT, COMMIT_BEFORE_REPLY, BEFORE_MOVE_COMMIT, AFTER_MOVE_COMMIT, MID_LOAD}
)


def of_environment() -> Failpoints:
    return Failpoints(NAMES)
