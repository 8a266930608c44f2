"""A job scheduler's copy of the view: the master's last node states, less what open requests of this host claim.

A claim is taken off when it is requested, which keeps a host from proposing the same devices for two jobs. It stays off
until the request is rejected, or a node state arrives that is as new as its approval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import ge

from ganger.cluster.fit import fit
from ganger.cluster.resources import Claim, GangShape, NodeRow, exceeds
from ganger.cluster.view import LoadMode, View
from ganger.v1 import resources_pb2, scheduling_pb2
from ganger.wire import resource_messages as convert
from ganger.wire import resource_names as names


@dataclass(slots=True, eq=False)
class OpenClaim:
    """A claim under way. `version`: of the view from which on the master's node states include it; None: not known."""

    claim: Claim
    gpus: int
    version: int | None = None


class Mirror:
    """`version` is the master's view version that has been applied; -1 before the first message."""

    def __init__(self) -> None:
        self.view = View()
        self.version = -1
        self._newest: dict[str, NodeRow] = {}
        # By node.
        self._open: dict[str, list[OpenClaim]] = {}
        self._news = asyncio.Event()

    def forget(self) -> None:
        """Drop all open claims: another master may answer next, and its whole view is requested."""
        self.version = -1
        self._open.clear()

    def apply(self, delta: scheduling_pb2.ViewDelta) -> None:
        """A delta, or the whole view when it starts from nothing."""
        if delta.from_version == 0:
            self.view = View()
            self._newest.clear()
        for configuration_set in delta.configuration_sets:
            self.view.put_configuration_set(convert.configuration_set_from_wire(configuration_set))
        self.view.mode = LoadMode.PACK if delta.load_mode == resources_pb2.LOAD_MODE_PACK else LoadMode.SPREAD
        self.put_rows(convert.node_row_from_wire(row) for row in delta.nodes)
        for name in delta.removed_nodes:
            node = names.parse_node_name(name)
            self._newest.pop(node, None)
            self.view.remove(node)
        self.version = delta.version
        self._news.set()

    def put_rows(self, rows: Iterable[NodeRow]) -> None:
        """Apply node states of the master; one older than the node's last one is ignored."""
        for row in rows:
            former = self._newest.get(row.node)
            if row.configuration_set in self.view.sets and (former is None or row.version >= former.version):
                self._newest[row.node] = row
                self._show(row.node)

    def take(self, shape: GangShape, claims: Sequence[Claim]) -> list[OpenClaim]:
        """Take a requested gang off the copy, and return its claims; none if it does not fit there (a parked one)."""
        if fit(self.view, shape, claims):
            return []
        taken = [OpenClaim(claim, shape.gpus) for claim in claims]
        for one in taken:
            self._open.setdefault(one.claim.node, []).append(one)
            self.view.take(one.claim, shape.gpus)
        return taken

    def approved(self, taken: Iterable[OpenClaim], version: int) -> None:
        """Record that the view of that version includes these claims."""
        for one in taken:
            one.version = version
            self._show(one.claim.node)

    def restore(self, taken: Iterable[OpenClaim]) -> None:
        """Put the claims of a request back that was not approved."""
        for one in taken:
            node = one.claim.node
            if node in self._open:
                self._open[node] = [other for other in self._open[node] if other is not one]
            self._show(node)

    def _show(self, node: str) -> None:
        """Make the copy's state of a node anew: the master's last one, less the claims that it does not include."""
        row = self._newest.get(node)
        if row is None:
            return
        self.view.put(row)
        if node not in self._open:
            return
        still = [one for one in self._open[node] if one.version is None or one.version > row.version]
        if still:
            self._open[node] = still
        else:
            del self._open[node]
        for one in still:
            if self._is_free(one.claim):
                self.view.take(one.claim, one.gpus)

    def _is_free(self, claim: Claim) -> bool:
        """Return whether the copy has all of the claim; not if the node's state includes it before its verdict."""
        view, slot = self.view, self.view.slots[claim.node]
        return (
            view.free[slot] & claim.device_mask == claim.device_mask
            and view.memory[slot] >= claim.memory_bytes + claim.arena_bytes
            and all(map(ge, view.millicores[slot], claim.millicores))
            and not exceeds(claim.bandwidth, view.bandwidth.get(slot, ()))
        )

    async def reach(self, version: int, timeout_s: float | None) -> bool:
        """Waits until the copy is at least that new; whether it is."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.version < version:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True
