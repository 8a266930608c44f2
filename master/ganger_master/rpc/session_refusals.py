"""Refused sessions: the reason why the master does not accept a node's daemon, for the lists of nodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

import grpc
from ganger.wire.errors import ApiError

_NODES_MOST: Final = 1_000
_TEXT_MOST: Final = 500
# A refused daemon tries again within 15 s. One that does not is stopped: its refusal is out of date.
_KEPT_S: Final = 120.0


class SessionRefusal(NamedTuple):
    """Why a daemon is not accepted: the reason of the error and a text. `time`: Unix seconds."""

    time: float
    reason: str
    text: str


_ACCEPTED: Final = SessionRefusal(0.0, "", "")


class SessionRefusals:
    """The newest refusal of each node. `now`: the present in Unix seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # The oldest refusal first.
        self._entries: OrderedDict[str, SessionRefusal] = OrderedDict()

    def note(self, node: str, error: ApiError) -> None:
        """Keep the reason of a refusal; a master that is not ready refuses nothing."""
        if error.code is grpc.StatusCode.UNAVAILABLE:
            return
        self._entries.pop(node, None)
        if len(self._entries) >= _NODES_MOST:
            self._entries.popitem(last=False)
        self._entries[node] = SessionRefusal(self._now(), error.reason, f"not accepted: {error.message}"[:_TEXT_MOST])

    def forget(self, node: str) -> None:
        """Drop the refusal of a node whose daemon is accepted."""
        self._entries.pop(node, None)

    def of(self, node: str) -> SessionRefusal:
        """Return why the node is not accepted; with empty texts if nothing is known."""
        entry = self._entries.get(node, _ACCEPTED)
        return _ACCEPTED if self._now() > entry.time + _KEPT_S else entry

    def nodes(self) -> list[str]:
        """Return the nodes that are not accepted."""
        return [node for node in self._entries if self.of(node).reason]
