"""Errors that ranks reported under the present order, and whether the order can still be carried out.

A rank-K.error.json counts if it is newer than the order's details, so a restarted daemon finds the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ganger.protocol.gang_orders import OrderKey

from ganger_daemon.checkpoints.layout import free_bytes
from ganger_daemon.core import gang_judgement
from ganger_daemon.gang.gang_context import GangContext
from ganger_daemon.node.directories import GangPaths
from ganger_daemon.node.safe_files import read_json

_LIMIT = 1000
_REASON_LIMIT = 500
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt): ")


class RankError(NamedTuple):
    """`reason` is the control page's word (STORAGE_FULL, ...), `text` one line for the user."""

    rank: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.reason}: rank {self.rank}: {self.text}"[:_LIMIT]


class RankErrors:
    """Reported errors of one gang's local ranks."""

    def __init__(self, context: GangContext) -> None:
        self._host = context.host
        self._paths = context.paths
        self._part = context.part
        self._pages = context.pages
        self._refused = (0, "")  # (order, why)
        # By rank and capability that is not offered: time of the file, and its text.
        self._reasons: dict[tuple[int, str], tuple[int, str]] = {}

    def under(self, order: OrderKey, saved_request: int = 0) -> str:
        """Return the first error under an order; empty if there is none.

        `saved_request`: number of the newest published checkpoint without a stop, 0 for none. Errors from before its
        request no longer count."""
        if self._refused[0] == order.number:
            return self._refused[1]
        saved = _time_of(self._paths.orders / f"checkpoint-{saved_request}.json") if saved_request else 0
        found = (error_of(self._paths, rank, str(order.number), saved) for rank in self._part.ranks)
        return str(next((error for error in found if error is not None), ""))

    def refusal(self, facts: gang_judgement.GangPart, unpublished: str) -> str:
        """Return why the level of the present order cannot be reached, or an empty text. The first reason found stays
        until the next order. `unpublished`: why the checkpoint cannot be published."""
        sequence = facts.wanted.order.number
        if self._refused[0] == sequence:
            return self._refused[1]
        refusing = (rank.rank for rank in facts.ranks if gang_judgement.refuses(facts, rank))
        reported = (error_of(self._paths, rank, str(sequence)) for rank in refusing)
        error = next((one for one in reported if one is not None), None)
        text = str(error or unpublished)
        if error is not None and error.reason == "STORAGE_FULL":
            text += self._room()
        if text:
            self._refused = (sequence, text)
        return text

    def reason(self, what: str) -> str:
        """Return why the ranks here do not offer `what` (see `GangPaths.reason`): the first reason found, or empty."""
        return next(filter(None, (self._reason_of(rank, what) for rank in self._part.ranks)), "")

    def _reason_of(self, rank: int, what: str) -> str:
        path = self._paths.reason(rank, what)
        written = _time_of(path)
        known = self._reasons.get((rank, what), (0, ""))
        if known[0] != written:
            text = str(read_json(path).get("message", ""))[:_REASON_LIMIT] if written else ""
            known = (written, "".join(sign if sign.isprintable() else " " for sign in text))
            self._reasons[rank, what] = known
        return known[1]

    def _room(self) -> str:
        storage = self._host.storage.path
        free = free_bytes(storage) if storage is not None else None
        if free is None:
            return ""
        found = [self._pages.progress(rank) for rank in self._part.ranks]
        needed = sum(max(progress.device_bytes, progress.arena_size) for progress in found)
        return f"; {storage} has {free} bytes free, this node's part needs about {needed}"


def error_of(paths: GangPaths, rank: int, order: str, since_ns: int = 0) -> RankError | None:
    """Return the error that a rank reported after the order of this name was written and after the file time
    `since_ns`; None without one, or without such an order."""
    written, reported = _time_of(paths.orders / f"{order}.json"), _time_of(paths.error(rank))
    if not 0 < written <= reported or reported < since_ns:
        return None
    fields = read_json(paths.error(rank))
    return RankError(rank, str(fields.get("reason", "UNKNOWN")), summary_of(str(fields.get("message", ""))))


def summary_of(message: str) -> str:
    """Return the last line of a message or traceback, without the name of the exception."""
    lines = [line for line in message.splitlines() if line.strip()]
    return _EXCEPTION.sub("", lines[-1]) if lines else "it did not say why"


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
