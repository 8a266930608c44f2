"""Freezing of jobs without boundaries, which cannot stop themselves when their lease ends or a PAUSE is ordered."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from ganger.injob.page import now_ns
from ganger.protocol.execution_lease import expired

from ganger_daemon.core import gang_judgement as core
from ganger_daemon.node.node_context import NodeContext

log = logging.getLogger(__name__)


class Freezer:
    def __init__(self, host: NodeContext, group: str) -> None:
        self._host = host
        self._group = group
        self.frozen = False
        self._doubtful = False

    def doubt(self) -> None:
        """Reread the state at the next call: the lease had ended, so the launcher may have frozen the gang itself."""
        self._doubtful = True

    def recall(self) -> None:
        """Read from the process group whether it is frozen."""
        self.frozen = self._host.cgroups.frozen(self._group)

    @property
    def lease_is_over(self) -> bool | None:
        """Whether this node's lease has ended; None before the master has answered this daemon."""
        until = self._host.lease_until_ns
        return None if until is None else expired(until, now_ns())

    async def follow(self, facts: core.GangPart, now: float) -> None:
        """Freeze or thaw, if that is due."""
        if facts.wanted.ends_at_once:
            return  # SIGKILL reaches frozen processes, and thawed ones would run beside their successor
        if self._doubtful:
            await asyncio.to_thread(self.recall)
        due = core.should_freeze(replace(facts, frozen=self.frozen), now, self.lease_is_over)
        if due == self.frozen and not self._doubtful:
            return
        act = self._host.cgroups.freeze if due else self._host.cgroups.thaw
        if await asyncio.to_thread(act, self._group):
            self.frozen, self._doubtful = due, False
            log.info("gang stands still" if due else "gang goes on", extra={"gang": self._group})
