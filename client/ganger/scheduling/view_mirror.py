"""A job scheduler's copy of the view: what the master said last, with the scheduler's own open requests taken off.

Taking off what was just asked for keeps a host from proposing the same pieces for two jobs. What the master says always
wins; a claim taken off is put back from the last rows heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from ganger.cluster.fit import fit
from ganger.cluster.resources import Claim, GangShape, NodeRow
from ganger.cluster.view import LoadMode, View
from ganger.v1 import scheduling_pb2
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names


class Mirror:
    """`version` is the master's view version that has been applied; -1 before the first message."""

    def __init__(self) -> None:
        self.view = View()
        self.version = -1
        self._heard: dict[str, NodeRow] = {}
        self._news = asyncio.Event()

    def forget(self) -> None:
        """Another master may answer next: its whole view is asked for."""
        self.version = -1

    def apply(self, delta: scheduling_pb2.ViewDelta) -> None:
        """A delta, or the whole view when it starts from nothing."""
        if delta.from_version == 0:
            self.view = View()
            self._heard.clear()
        for configuration_set in delta.configuration_sets:
            self.view.put_configuration_set(convert.configuration_set_from_wire(configuration_set))
        self.view.mode = LoadMode.PACK if delta.mode == scheduling_pb2.View.MODE_PACK else LoadMode.SPREAD
        self.hear(convert.node_row_from_wire(row) for row in delta.nodes)
        for name in delta.removed:
            node = names.parse_node_name(name)
            self._heard.pop(node, None)
            self.view.remove(node)
        self.version = delta.version
        self._news.set()

    def hear(self, rows: Iterable[NodeRow]) -> None:
        """Rows as the master sees them; one older than what was heard of the node is ignored."""
        for row in rows:
            former = self._heard.get(row.node)
            if row.configuration_set in self.view.sets and (former is None or row.version >= former.version):
                self._heard[row.node] = row
                self.view.put(row)

    def take(self, shape: GangShape, claims: Sequence[Claim]) -> None:
        """Takes off a gang that was asked for; one that does not fit the copy (a parked one) is left alone."""
        if not fit(self.view, shape, claims):
            for claim in claims:
                self.view.take(claim, shape.gpus)

    def restore(self, claims: Iterable[Claim]) -> None:
        """The request came to nothing: its nodes are as last heard."""
        for claim in claims:
            row = self._heard.get(claim.node)
            if row is not None:
                self.view.put(row)

    async def reach(self, version: int, timeout_seconds: float | None) -> bool:
        """Waits until the copy is at least that new; whether it is."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.version < version:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True
