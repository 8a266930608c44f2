"""The launcher of one gang's local ranks, their arenas, and where they meet to form their process group."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger.injob.launcher.client import Launcher, LauncherError
from ganger.injob.launcher.namespaces import take_places_back
from ganger.injob.page import page_path
from ganger.injob.state_image import allocated_arena_bytes
from ganger.protocol.gang_orders import OrderIntent
from ganger.v1 import job_pb2

from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.gang.gang_context import GangContext, OfGang, ReceivedOrders
from ganger_daemon.gang.launch_plan import LaunchRefusedError, Rendezvous, free_port, image_arena_name
from ganger_daemon.gang.process_image import GangImages
from ganger_daemon.images.contract import ImageRefusedError
from ganger_daemon.images.process_tree import mounts_of
from ganger_daemon.node.accounts import seen_by
from ganger_daemon.node.daemon_files import read_json, write_json
from ganger_daemon.node.launchers import children_of, interpreter_of
from ganger_daemon.node.node_context import NodeContext
from ganger_daemon.node.process_identity import ProcessId, is_alive

log = logging.getLogger(__name__)

# The launcher's error if it has no arena of that name.
_NO_ARENA = "NO_ARENA"


class GangLauncher(OfGang):
    """Launcher and arenas of one gang's ranks. `key`: of the launcher, empty before the launch; `arena_bytes`: size of
    each rank's arena; `image_arena_bytes`: of the arena for the image of a process, which is made only when one is
    moved."""

    def __init__(self, context: GangContext, exits: ExitWatcher) -> None:
        super().__init__(context)
        self._exits = exits
        self.key = ""
        self.arena_bytes = 0
        self.image_arena_bytes = 0

    def recall(self, left: Mapping[str, Any]) -> None:
        self.key = str(left.get("launcher", ""))
        self._paths.are_restored = self.is_restorer
        self._paths.has_places = bool(left.get("has_places", False))
        if self._paths.has_places and not self.is_restorer:
            self._host.launchers.hold(self.key, self._paths.group)
        self.arena_bytes = int(left.get("arena_bytes", 0))
        self.image_arena_bytes = int(left.get("image_arena_bytes", 0))

    def journal(self) -> dict[str, Any]:
        sizes = {"arena_bytes": self.arena_bytes, "image_arena_bytes": self.image_arena_bytes}
        return {"launcher": self.key, "has_places": self._paths.has_places, **sizes}

    @property
    def is_restorer(self) -> bool:
        """Whether ranks of an account were restored from an image, which this daemon's own launcher does."""
        return self._paths.account is not None and self._host.launchers.is_own(self.key)

    def release(self) -> None:
        """Let other gangs have a launcher that this one has held alone: none of its processes is left. Blocks."""
        if not self.key or not self._paths.has_places or self.is_restorer:
            return
        launcher = self.running()
        try:
            if launcher is not None:
                with mounts_of(launcher.pid) as mounts:
                    take_places_back(mounts)
        except (OSError, ImageRefusedError) as error:
            # the next gang of this launcher takes them back first
            log.warning("places not taken back", extra={"group": self._paths.group, "error": str(error)})
        self._host.launchers.give_up(self.key, self._paths.group)

    def become_restorer(self) -> Launcher:
        """Return the launcher that restores an account's ranks, theirs from now on. Blocks. Raises LauncherError."""
        self.key, launcher = self._host.launchers.restorer()
        self._paths.are_restored = True
        return launcher

    def running(self) -> Launcher | None:
        """Return the launcher, or None if it does not run. Blocks shortly."""
        return self._host.launchers.running(self.key) if self.key else None

    def lives(self) -> bool:
        return self.running() is not None

    def open_arena(self, rank: int) -> int:
        """Return a descriptor of a rank's arena, which the caller closes. Raises OSError if no launcher has it."""
        launcher = self.running() or self.adopt_anew()
        name = self._paths.name(rank)
        try:
            try:
                return launcher.arena(name)
            except LauncherError:
                # A launcher that other gangs had started in place of a dead one does not have these ranks yet.
                self.adopt_all(launcher)
                return launcher.arena(name)
        except LauncherError as error:
            raise OSError(str(error)) from error

    def open_image_arena(self, rank: int, *, is_made: bool = True) -> int:
        """A descriptor of the arena for a rank's process image; `is_made`: made if there is none. Raises OSError.

        The launcher of an account could write into its arenas."""
        try:
            if self._paths.account is not None:
                launcher = self._host.launchers.restorer()[1]
            else:
                launcher = self.running() or self.adopt_anew()
            return launcher.arena(image_arena_name(self._paths, rank), self.image_arena_bytes if is_made else 0)
        except LauncherError as error:
            why = "its image is gone with the launcher that held it" if error.reason == _NO_ARENA else str(error)
            raise OSError(why) from error

    def used_arena_bytes(self, claimed_bytes: int) -> int:
        """Return the allocated bytes of the live ranks' arenas, at most what is claimed for them.

        `claimed_bytes`: of the present claim. Ranks allocate by the peaks in their pages at once, and the master claims
        as much when it receives them: until then the peaks count."""
        is_readable = self._pages.readable
        peaks = [self._pages.progress(rank).peak_device_bytes for rank in self._ranks] if is_readable else []
        allocated = allocated_arena_bytes(process.pid for process in self._exits.live())
        return min(allocated, max(claimed_bytes, sum(peaks) * 11 // 10))

    def drop_arenas(self) -> None:
        """Release the arenas of ended ranks. Blocks."""
        own = self._host.launchers.running_restorer() if self._paths.account is not None else None
        for launcher in filter(None, (self.running(), own)):
            with suppress(LauncherError):
                for rank in self._part.ranks:
                    launcher.drop_arena(self._paths.name(rank))
                    launcher.drop_arena(image_arena_name(self._paths, rank))

    def adopt_anew(self) -> Launcher:
        """The launcher died: a new one takes over its ranks, and finds their arenas by their descriptors."""
        try:
            launcher = self.become_restorer() if self.is_restorer else self._start_anew()
        except LauncherError as error:
            raise OSError(str(error)) from error
        self.adopt_all(launcher)
        return launcher

    def _start_anew(self) -> Launcher:
        fields = read_json(self._paths.launch(self._part.ranks[0]))
        environment = {str(name): str(value) for name, value in fields.get("env", {}).items()}
        command, account = tuple(fields.get("argv", ["python"])), self._paths.account
        launchers, directory = self._host.launchers, str(fields.get("cwd", "/"))
        look = partial(interpreter_of, command, environment, directory, launchers.interpreter)
        return launchers.get(self.key, seen_by(account, look), _without_injection(environment, self._host), account)

    def adopt_all(self, launcher: Launcher) -> None:
        """Register the live ranks with a launcher that does not have them. Blocks."""
        known = children_of(launcher)
        is_own = self._paths.account is None or self.is_restorer
        for rank, process in self._exits.processes.items():
            name = self._paths.name(rank)
            if name in known or not is_alive(process):
                continue
            launcher.adopt(
                name,
                process.pid,
                process.start_ticks,
                page=page_path(str(self._paths.run), rank),
                exit_path=str(self._paths.exit(rank)),
                arena_name=name,
                freezer=self._host.cgroups.freezer_file(self._paths.group) if is_own else "",
                cgroup_procs=self._host.cgroups.join_files(self._paths.group) if is_own else (),
            )

    def publisher(self) -> Launcher | None:
        """Return the launcher of the ranks. For another account one is started if none runs: this process changes
        nothing in that account's directories. Blocks. Raises OSError."""
        running = self.running()
        return self.adopt_anew() if running is None and self.key and self._paths.account is not None else running

    def revive(self) -> None:
        """Start a launcher for ranks that outlived theirs, so that their exits are recorded. Blocks."""
        if self.key and self.running() is None:
            self.adopt_anew()


def _without_injection(environment: Mapping[str, str], host: NodeContext) -> dict[str, str]:
    """The environment a launcher of these ranks had: what was added per rank is taken off again."""
    base = {name: value for name, value in environment.items() if not name.startswith("GANGER_")}
    parts = [part for part in base.get("PYTHONPATH", "").split(os.pathsep) if part and part != host.launchers.inject]
    if parts:
        base["PYTHONPATH"] = os.pathsep.join(parts)
    else:
        base.pop("PYTHONPATH", None)
    return base


_LOOPBACK = "127.0.0.1"
# Interval of checks whether a waiting gang is still desired.
_STOP_LOOK_S = 0.2


class GangRendezvous(OfGang):
    """Rendezvous of one gang's ranks. `address`: known on the leader's node, before its file is there."""

    def __init__(self, context: GangContext, images: GangImages) -> None:
        super().__init__(context)
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
            call = self._context.peers.rendezvous(leader.peer_address, desired.job_uid, desired.epoch)
            return await self._of_leader(call, orders)
        known = read_json(paths.rendezvous)
        if known and is_alive(ProcessId(int(known.get("pid") or 0), int(known.get("start_ticks") or 0))):
            return Rendezvous(str(known["host"]), int(known["port"]))  # A former daemon had it started
        has_store = has_agent
        if has_store:
            try:
                port = await asyncio.to_thread(launcher.store, str(paths.rendezvous.parent), host)
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
