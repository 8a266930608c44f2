"""Prolog and epilog of one gang on this node: the prolog before its first process, the epilog after its last one. Both
run for a gang and not for a suspend in place, a resume or a time slice, in which its processes stay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from ganger.agent.v1 import agent_pb2
from ganger.cluster.topology import bits
from ganger.wire.resource_names import parse_job_name

from ganger_daemon.gang.gang_context import GangContext, OfGang
from ganger_daemon.gang.launch_plan import NodeFaultError, own_user
from ganger_daemon.node.accounts import as_account
from ganger_daemon.node.daemon_files import make_directory
from ganger_daemon.node.hooks import HookRun

_PROLOG, _EPILOG = "prolog", "epilog"


class GangHooks(OfGang):
    """Hooks of one gang. `has_begun`: its prolog or its launch has begun here; `node_fault`: why its epilog failed."""

    def __init__(
        self, context: GangContext, desired: agent_pb2.DesiredGang, kill_left: Callable[[], Awaitable[None]]
    ) -> None:
        """`kill_left` ends processes that the gang's ranks have left behind."""
        super().__init__(context)
        self._hooks = context.host.hooks
        self._desired = desired
        self._kill_left = kill_left
        self._directory = context.paths.job / "hooks"
        self._prolog: asyncio.Task[str] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.node_fault = ""
        self.has_begun = self._directory.is_dir()

    @property
    def is_prolog_running(self) -> bool:
        return self._prolog is not None and not self._prolog.done()

    @property
    def is_running(self) -> bool:
        """Whether a hook runs: the gang holds its devices meanwhile."""
        return self.is_prolog_running or (self._closing is not None and not self._closing.done())

    @property
    def are_awaited(self) -> bool:
        """Whether a hook may run, or has to run, before the gang counts as ended."""
        return self.has_begun and not (self._closing is not None and self._closing.done())

    def open(self) -> bool:
        """Begin the prolog, or find it; return whether the ranks may start. Raises NodeFaultError if it has failed."""
        if self._hooks.prolog is None and self._hooks.epilog is None:
            return True
        make_directory(self._directory)
        self.has_begun = True
        if self._hooks.prolog is None:
            return True
        if self._prolog is None:
            self._prolog = asyncio.create_task(self._failure(_PROLOG, self._hooks.prolog))
            self._prolog.add_done_callback(lambda _: self._context.wake())
        if not self._prolog.done():
            return False
        if failure := self._prolog.result():
            raise NodeFaultError(failure)
        return True

    def close(self) -> None:
        """Begin to end the prolog, if it still runs, and then the epilog, once no process of the gang is left."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            self._closing.add_done_callback(lambda _: self._context.wake())

    async def leave(self) -> None:
        """Stop waiting for the hooks, which go on: the next daemon finds them."""
        tasks = [task for task in (self._prolog, self._closing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(self) -> None:
        # A former daemon may have begun it.
        await self._run(_PROLOG).kill()
        if self._prolog is not None:
            await self._prolog
        await self._kill_left()
        if self._hooks.epilog is not None:
            self.node_fault = await self._failure(_EPILOG, self._hooks.epilog)

    def _run(self, name: str) -> HookRun:
        return HookRun(name, self._directory / name, self._hooks.timeout_s)

    async def _failure(self, name: str, program: Path) -> str:
        account = self._paths.account if self._hooks.run_as_user else None
        return await self._run(name).failure([*as_account(account, ()), str(program)], self._environment(name))

    def _environment(self, name: str) -> dict[str, str]:
        """Return the variables of a hook. None holds text that the job's user may choose freely."""
        mask, account = self._desired.claim.device_mask, self._paths.account
        is_users = account is not None and self._hooks.run_as_user
        return {
            **({"HOME": account.home, "USER": account.name} if is_users and account is not None else {}),
            **self._host.devices.environment(mask),
            "GANGER_HOOK": name,
            "GANGER_NODE": self._host.node,
            "GANGER_JOB_ID": str(parse_job_name(self._desired.job)),
            "GANGER_JOB_USER": self._desired.user,
            "GANGER_JOB_ACCOUNT": own_user() if account is None else account.name,
            "GANGER_GPUS": ",".join(map(str, bits(mask))),
        }
