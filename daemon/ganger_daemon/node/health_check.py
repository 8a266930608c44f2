"""The health check of a node: a hook that runs again and again. What it has shown outlives the daemon."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

import msgspec

from ganger_daemon.core.hook_outcomes import CheckRecord, after_check
from ganger_daemon.node.daemon_files import read_json, remove_tree, write_hint
from ganger_daemon.node.hooks import HookRun
from ganger_daemon.node.node_context import NodeContext

log = logging.getLogger(__name__)

SOURCE = "health_check"
"""Names the fault in what the daemon reports."""


class HealthCheck:
    """The health check of this node. `is_known` is set once a check has ended, or if there is none."""

    def __init__(self, host: NodeContext) -> None:
        self._host = host
        self._notes = host.paths.state / "health.json"
        self._run_directory = host.paths.state / "health-check"
        self._record = self._recall() if host.hooks.health_check is not None else CheckRecord()
        self.is_known = asyncio.Event()

    @property
    def faults(self) -> dict[str, str]:
        """Why the node is out of service, by source; empty if it is healthy."""
        return {SOURCE: self._record.reason} if self._record.reason else {}

    async def run(self) -> None:
        """Check the node until cancelled."""
        hooks = self._host.hooks
        if hooks.health_check is None:
            self._notes.unlink(missing_ok=True)
            self.is_known.set()
            return
        environment = {"GANGER_HOOK": SOURCE, "GANGER_NODE": self._host.node}
        check = HookRun("health check", self._run_directory, hooks.timeout_s)
        if not check.is_running:
            # It went with the machine: that shows nothing.
            await asyncio.to_thread(remove_tree, self._run_directory)
        while True:
            failure = await check.failure(hooks.health_check, environment)
            await asyncio.to_thread(remove_tree, self._run_directory)
            self._note(after_check(self._record, failure))
            self.is_known.set()
            await asyncio.sleep(hooks.health_check_every_s)

    def _note(self, record: CheckRecord) -> None:
        before, self._record = self._record, record
        if record == before:
            return
        write_hint(self._notes, asdict(record))
        if record.fault and not before.fault:
            log.warning("node is unhealthy", extra={"reason": record.fault})
        if before.fault and not record.fault:
            log.info("node is healthy again")
        if record.reason != before.reason:
            self._host.changed()

    def _recall(self) -> CheckRecord:
        try:
            return msgspec.convert(read_json(self._notes), CheckRecord)
        except msgspec.ValidationError as error:
            log.warning("notes cannot be read", extra={"path": str(self._notes), "error": str(error)})
            return CheckRecord()
