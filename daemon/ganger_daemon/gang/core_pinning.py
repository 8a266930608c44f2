"""Cores of one gang: changes of their number together with the ranks' threads, and repins on request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from ganger.agent.v1 import agent_pb2
from ganger.injob.page_layout import Word

from ganger_daemon.gang.gang_context import GangContext

log = logging.getLogger(__name__)

# A job that does not acknowledge (opaque, or in a long evaluation) loses the cores anyway after this.
ACK_S = 5.0


class CorePinning:
    """Cores and thread counts of one gang's local ranks."""

    def __init__(self, context: GangContext) -> None:
        self._host = context.host
        self._group = context.paths.group
        self._pages = context.pages
        self._part = context.part
        self._millicores: tuple[int, ...] | None = None
        # Cores that it released when it was parked: it gets them back where they are free.
        self._former: tuple[int, ...] = ()
        self.repin_done = 0
        self.trouble = ""

    async def follow(self, desired: agent_pb2.DesiredGang, iteration_s: float) -> None:
        """Bring cores and threads to the desired state."""
        near = self._host.inventory.near(desired.claim.device_mask)
        await self._retune(desired, near, iteration_s)
        # Only now: a gang that was parked had released its cores, and others may hold them.
        if desired.repin_request > self.repin_done:
            self._host.cores.repin(self._group, near)
            await self._pin()
            self.repin_done = int(desired.repin_request)

    async def _retune(self, desired: agent_pb2.DesiredGang, near: Collection[int], iteration_s: float) -> None:
        millicores = tuple(desired.claim.millicores)
        if self._millicores is None:
            self._millicores = millicores if self._host.cores.millicores(self._group) == sum(millicores) else ()
        wanted = int(desired.threads) or self._pages.threads()
        if millicores == self._millicores and wanted == self._pages.threads():
            return
        if wanted < self._pages.threads():
            # it loses cores only once it has fewer threads
            sequence = self._pages.retune(wanted)
            await self._wait(sequence, max(ACK_S, 2 * iteration_s))
        shortage = self._host.cores.take(self._group, millicores, near, self._former)
        self.trouble = f"no cores: {shortage}" if shortage else ""
        await self._pin()
        if wanted > self._pages.threads():
            self._pages.retune(wanted)
        self._millicores = millicores

    def give_up(self) -> None:
        """Release the cores of a gang that is parked without its devices. It gets some when it runs again."""
        self._former = self._host.cores.ids(self._group) or self._former
        self._host.cores.release(self._group)
        self._millicores = ()

    def threads(self) -> int:
        """Return the fewest threads that a local rank has applied; the ordered number before any has."""
        applied = [self._pages.progress(rank).threads_applied for rank in self._part.ranks]
        return min(applied) or self._pages.threads()

    async def _pin(self) -> None:
        cgroups, cores = self._host.cgroups, self._host.cores
        await asyncio.to_thread(cgroups.set_cpus, self._group, cores.cpus(self._group))
        await asyncio.to_thread(cgroups.set_quota, self._group, cores.quota(self._group))

    async def _wait(self, sequence: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(self._pages[rank].get(Word.RETUNE_DONE) < sequence for rank in self._part.ranks):
            if time.monotonic() > deadline:
                log.warning("ranks did not apply their threads", extra={"group": self._group})
                return
            await asyncio.sleep(0.002)
