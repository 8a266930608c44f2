"""Observed sets that a daemon sends in several calls, because they do not fit into one message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ganger.agent.v1 import agent_pb2
from ganger.wire import errors

# Most bytes of one node's parts: more than any node has, and little enough to keep.
_MOST_BYTES: Final = 64 * 1024 * 1024


@dataclass(slots=True)
class _Collected:
    session: str
    observation: int
    gangs: list[agent_pb2.ObservedGang] = field(default_factory=list)
    size_bytes: int = 0


class ObservedParts:
    """The parts that each node has sent so far."""

    def __init__(self) -> None:
        self._by_node: dict[str, _Collected] = {}

    def complete(self, node: str, request: agent_pb2.ReconcileRequest) -> bool:
        """Return whether the observed set of a call is complete; then its earlier parts are merged into the request.
        Parts of another observation are dropped. Raises RequestInvalid for a set that is too large."""
        known = self._by_node.pop(node, None)
        if known is not None and (known.session, known.observation) != (request.session, request.observation):
            known = None
        if not request.continues:
            if known is not None:
                request.gangs.MergeFrom(known.gangs)
            return True
        part = known or _Collected(request.session, request.observation)
        part.gangs.extend(request.gangs)
        part.size_bytes += request.ByteSize()
        if part.size_bytes > _MOST_BYTES:
            raise errors.RequestInvalid(f"the observed set of nodes/{node} takes more than {_MOST_BYTES} bytes")
        self._by_node[node] = part
        return False
