"""Where the ranks of a gang meet to form their process group."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.protocol.gang_orders import OrderIntent
from ganger.v1 import job_pb2

from ganger_daemon.gang.gang_context import GangContext
from ganger_daemon.gang.launch_plan import LaunchRefusedError, Rendezvous, free_port
from ganger_daemon.gang.process_image import GangImages
from ganger_daemon.gang.received_orders import ReceivedOrders
from ganger_daemon.node.daemon_files import read_json, write_json
from ganger_daemon.node.process_identity import ProcessId, is_alive

_LOOPBACK = "127.0.0.1"
# Between looks whether a gang that waits for its leader is wanted still.
_STOP_LOOK_S = 0.2


class GangRendezvous:
    """`address`: known on the leader's node, before its file is there."""

    def __init__(self, context: GangContext, images: GangImages) -> None:
        self._host = context.host
        self._paths = context.paths
        self._part = context.part
        self._peers = context.peers
        self._images = images
        self.address: tuple[str, int] | None = None

    async def meet(
        self, desired: agent_pb2.DesiredGang, launcher: Launcher, orders: ReceivedOrders, *, is_image: bool
    ) -> Rendezvous:
        """Return where the ranks of a launch meet, with a store that serves there. `is_image`: they have met already.
        Raises LaunchRefusedError and LauncherError."""
        host, paths = self._host.address_host, self._paths
        # Without the agent torch would take every address that the script names for that of our store.
        has_agent = desired.spec.agent != job_pb2.JobSpec.AGENT_NONE
        if self._part.world == 1:
            return Rendezvous(host, free_port(host), store=False)
        if is_image:
            return Rendezvous(_LOOPBACK, 0, store=False)
        if self._images.are_possible:
            # The store is a child of the ranks' parent and part of their image. The launcher fills the port in.
            has_store = bool((await asyncio.to_thread(launcher.info))["serves_stores"]) and has_agent
            return Rendezvous(_LOOPBACK, 0 if has_store else free_port(_LOOPBACK), store=has_store)
        if not self._part.leads:
            leader = desired.members[0]
            call = self._peers.rendezvous(leader.peer_address, desired.job_uid, desired.epoch)
            return await self._of_leader(call, orders)
        known = read_json(paths.rendezvous)
        if known and is_alive(ProcessId(int(known.get("pid") or 0), int(known.get("start_ticks") or 0))):
            return Rendezvous(str(known["host"]), int(known["port"]))  # a former daemon had it started
        has_store = has_agent
        if has_store:
            try:
                port = (await asyncio.to_thread(launcher.store, str(paths.run), host)).port
            except LauncherError as error:
                if error.reason != "NO_TORCH":
                    raise
                has_store = False
        if not has_store:
            # A job that wants to meet gets an address, and rank 0 serves it.
            port = free_port(host)
            write_json(paths.rendezvous, {"host": host, "port": port, "pid": 0})
        self.address = (host, port)
        return Rendezvous(host, port, store=has_store)

    async def _of_leader(self, call: Coroutine[Any, Any, tuple[str, int]], orders: ReceivedOrders) -> Rendezvous:
        """Return the leader's rendezvous. An order to stop ends the wait: the leader's part may have ended before."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                if orders.wanted.intent is OrderIntent.STOP:
                    raise LaunchRefusedError("ordered to stop before its leader had named the rendezvous")
                await asyncio.wait((task,), timeout=_STOP_LOOK_S)
            return Rendezvous(*task.result())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
