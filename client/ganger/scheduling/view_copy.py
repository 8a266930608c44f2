"""A scheduler's copy of the view, kept up by deltas and by the fresh rows of rejections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ganger.resources.values import NodeRow
from ganger.resources.view import Mode, View
from ganger.v1 import node_pb2, scheduling_pb2
from ganger.wire import convert, names


class ViewCopy:
    """`view` is always whole; `reached(version)` waits until it is at least that new."""

    def __init__(self) -> None:
        self.view = View()
        self._version = -1
        self._news = asyncio.Condition()

    @property
    def version(self) -> int:
        """Of the last delta; -1 before the first."""
        return self._version

    async def apply(self, delta: scheduling_pb2.ViewDelta) -> None:
        if delta.from_version == 0:
            self.view = View()
        for configuration_set in delta.configuration_sets:
            self.view.put_configuration_set(convert.configuration_set_from_wire(configuration_set))
        for row in delta.nodes:
            self._put(convert.node_row_from_wire(row))
        for name in delta.removed:
            self.view.remove(names.parse_node_name(name))
        self.view.mode = Mode.PACK if delta.mode == scheduling_pb2.View.MODE_PACK else Mode.SPREAD
        async with self._news:
            self._version = delta.version
            self._news.notify_all()

    def refresh(self, rows: Iterable[node_pb2.NodeRow]) -> None:
        """Takes the fresh rows of a rejection."""
        for row in rows:
            if row.configuration_set in self.view.sets:
                self._put(convert.node_row_from_wire(row))

    async def reached(self, version: int, within_seconds: float) -> bool:
        """Whether the copy is as new as `version` in time. A stale view is no error: claims are judged, not it."""
        if self._version >= version:
            return True
        try:
            async with asyncio.timeout(within_seconds), self._news:
                await self._news.wait_for(lambda: self._version >= version)
        except TimeoutError:
            return False
        return True

    def _put(self, row: NodeRow) -> None:
        # Rows of rejections overtake deltas: an older row must not undo a newer one.
        if row.node not in self.view or self.view.row(row.node).version <= row.version:
            self.view.put(row)
