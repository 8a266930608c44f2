"""Jobs without boundaries cannot stop themselves: not when their lease is over, not for a PAUSE. They are made to stand
still as they are."""

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
        """The lease had ended: the launcher, which freezes by itself then, may have been ahead of this daemon."""
        self._doubtful = True

    def recall(self) -> None:
        """After a daemon restart: the group of processes is the truth."""
        self.frozen = self._host.cgroups.frozen(self._group)

    @property
    def lease_is_over(self) -> bool | None:
        """None before the master has answered this daemon."""
        until = self._host.lease_until_ns
        return None if until is None else expired(until, now_ns())

    async def follow(self, facts: core.GangPart, now: float) -> None:
        """Freezes or thaws, if that is due."""
        if facts.wanted.ends_at_once:
            return  # a kill reaches what stands still, and thawed it would run beside its successor
        if self._doubtful:
            await asyncio.to_thread(self.recall)
        due = core.should_freeze(replace(facts, frozen=self.frozen), now, self.lease_is_over)
        if due == self.frozen and not self._doubtful:
            return
        act = self._host.cgroups.freeze if due else self._host.cgroups.thaw
        if await asyncio.to_thread(act, self._group):
            self.frozen, self._doubtful = due, False
            log.info("gang stands still" if due else "gang goes on", extra={"gang": self._group})
