"""What the ranks of a gang said went wrong under the present order: their rank-K.error.json, newer than the order's
details. Nothing is remembered here, so a restarted daemon finds the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from .directories import GangPaths, read_json

_LIMIT = 1000
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt): ")


class Complaint(NamedTuple):
    """`reason` is the control page's word (STORAGE_FULL, ...), `text` one line for a person."""

    rank: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.reason}: rank {self.rank}: {self.text}"[:_LIMIT]


def complaint_of(paths: GangPaths, rank: int, sequence: int) -> Complaint | None:
    """What a rank reported since the order of this number was written; None if nothing, or there is no such order."""
    written, reported = _time_of(paths.orders / f"{sequence}.json"), _time_of(paths.error(rank))
    if not 0 < written <= reported:
        return None
    fields = read_json(paths.error(rank))
    return Complaint(rank, str(fields.get("reason", "UNKNOWN")), summary_of(str(fields.get("message", ""))))


def summary_of(message: str) -> str:
    """Of a traceback the line that says what happened, without the name of the exception."""
    lines = [line for line in message.splitlines() if line.strip()]
    return _EXCEPTION.sub("", lines[-1]) if lines else "it did not say why"


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
