"""The daemon: state directory, ports, adoption of gangs, and the session with the master. Its end harms no job."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
from ganger import __version__
from ganger.agent.v1 import agent_pb2, peer_pb2_grpc
from ganger.injob.launcher.namespaces import share_links
from ganger.injob.launcher.process_record import DEFAULT_LIMITS, parse_limits
from ganger.service_unit import ServiceManager
from ganger.text import counted, os_failure
from ganger.wire.endpoints import CredentialError, Endpoint, EndpointError, check_listen_host, find_endpoint
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger.wire.resource_messages import configuration_set_to_wire
from ganger.wire.resource_names import is_node_id
from ganger.wire.revocation import REVOKED, Revocations
from ganger.wire.servers import Callers, bind, make_server
from ganger.wire.tls import AUTHORITY, check_directory, server_credentials, tell_end

from ganger_daemon.cgroups.contract import Cgroups, is_done
from ganger_daemon.cgroups.group_tree import choose_cgroups
from ganger_daemon.claimed_directories import (
    ClaimedDirectories,
    DaemonError,
    DaemonObstacle,
    check_storage,
    obstacle_of,
)
from ganger_daemon.devices.inventory import with_dimensions
from ganger_daemon.devices.virtual import VirtualSpec, choose_devices
from ganger_daemon.gang.gang_launcher import GangLauncher
from ganger_daemon.gang.gang_unit import sweep_names
from ganger_daemon.gang.launch_plan import own_user
from ganger_daemon.images.contract import CAPABILITY, ProcessImages
from ganger_daemon.images.criu import choose_images, cpu_flags
from ganger_daemon.images.driver import DeviceState, choose_device_state
from ganger_daemon.node.accounts import Account, Accounts, choose_accounts
from ganger_daemon.node.certificate_renewal import keep_renewed
from ganger_daemon.node.core_table import CoreTable
from ganger_daemon.node.daemon_files import (
    write_json,
)
from ganger_daemon.node.gang_set import GangSet
from ganger_daemon.node.hooks import HealthCheck, NodeHooks, hook_trouble
from ganger_daemon.node.launchers import Launchers, interpreter_for_accounts
from ganger_daemon.node.log_store import LogStore
from ganger_daemon.node.node_context import (
    MOST_PROCESSES,
    ORDER_DEADLINE_S,
    ORDER_PATIENCE_S,
    NodeContext,
    PeerCalls,
    Storage,
)
from ganger_daemon.node.peer_service import PeerServicer
from ganger_daemon.node.session import Session
from ganger_daemon.transfer.stream_server import StreamServer, find_state

log = logging.getLogger(__name__)

T = TypeVar("T")

_REVIVE_S = 2.0
_THREADS = 256
# Begins the names of groups of launchers; those of gangs begin with the id of a job.
_OF_USER = "user-"
# Memory of one account's launchers, with what they leave in their /dev/shm: a few hundred MiB each.
_LAUNCHERS_BYTES = 16 << 30
# Longest wait for launchers that were told to end.
_LAUNCHERS_END_S = 0.5
# Interval of removing old logs.
_SWEEP_S = 3600.0


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """Settings of a daemon. `master`: an address, or the master's state directory."""

    state_directory: Path
    master: str
    node: str = ""
    run_directory: Path | None = None
    virtual: VirtualSpec | None = None
    recorded: Path | None = None
    # Bandwidth that the node declares, by name (`ganger.cluster.resources.DIMENSIONS`).
    dimensions: Mapping[str, float] = field(default_factory=dict)
    cgroups: str = "auto"
    # Path of CRIU, "none", or empty: found on the path or beside the interpreter.
    criu: str = ""
    rack: str = ""
    fabric: str = ""
    storage: Path | None = None
    listen_host: str = "127.0.0.1"
    # Directory of the daemon's certificate: with it all links are mutual TLS, and `listen_host` may be any.
    tls: Path | None = None
    preload: bool = True
    # Accounts that jobs run as: "own" (the daemon's), "system" (those of their users), the path of a map file, or
    # empty: "system" for root with certificates, else "own".
    accounts: str = ""
    # Whether gangs that run as accounts have a /tmp and a /dev/shm of their own; None: where that is possible.
    has_private_places: bool | None = None
    # Soft and hard limits of each rank's process, by name.
    limits: Mapping[str, tuple[int, int]] = field(default_factory=partial(parse_limits, DEFAULT_LIMITS))
    hooks: NodeHooks = field(default_factory=NodeHooks)
    order_patience_s: float = ORDER_PATIENCE_S
    order_deadline_s: float = ORDER_DEADLINE_S


class Daemon:
    """A daemon. `start` returns once gangs are adopted and both ports listen; the session opens in the background."""

    def __init__(self, settings: DaemonSettings) -> None:
        self._settings = settings
        self.node = settings.node or socket.gethostname().split(".")[0].lower()
        if not is_node_id(self.node):
            raise DaemonError(
                f"{self.node!r} cannot name a node: give --node a name of letters, digits, '-', '.' or '_'",
                DaemonObstacle.SETTING,
            )
        self._claimed = ClaimedDirectories(settings.state_directory.absolute(), self.node)
        self._tls = str(settings.tls or "")
        self._server: grpc.aio.Server | None = None
        self._stream: StreamServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reviving: dict[GangLauncher, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Raises DaemonError."""
        self._check_certificate()
        await asyncio.to_thread(self._check_hooks)
        accounts, interpreter = await self._choose_accounts()
        known = self._claimed.claim(self._settings.run_directory, are_accounts_served=accounts.are_switched)
        self.paths = self._claimed.paths
        self.paths.sweep()
        settings = self._settings
        storage = Storage(override=settings.storage)
        await check_storage(storage, str(known.get("storage", "")))
        try:
            devices = choose_devices(settings.virtual, settings.recorded, node=self.node)
            devices.inventory = with_dimensions(devices.inventory, settings.dimensions)
            gpu_cores = settings.virtual.gpu_cores if settings.virtual is not None else 0.0
            cgroups = await asyncio.to_thread(self._choose_cgroups, gpu_cores, accounts)
        except ValueError as error:
            raise DaemonError(str(error), DaemonObstacle.SETTING) from error
        device_state = await asyncio.to_thread(choose_device_state, devices.inventory.driver)
        images = await self._choose_images(accounts, device_state)
        storage.configure(str(known.get("storage", "")), str(known.get("storage_token", "")))
        self.host = NodeContext(
            node=self.node,
            token="",
            tls=self._tls,
            paths=self.paths,
            cgroups=cgroups,
            devices=devices,
            images=images,
            device_state=device_state,
            inventory=devices.inventory,
            logs=LogStore(self.paths.logs, storage.shared),
            launchers=Launchers(self.paths.launchers, self.paths.inject, settings.preload, interpreter),
            cores=CoreTable(devices.inventory.core_map),
            revocations=self._revocations(),
            accounts=accounts,
            places_shared=await asyncio.to_thread(self._are_places_shared, accounts),
            hooks=settings.hooks,
            storage=storage,
            device_cores=gpu_cores,
            address_host=settings.listen_host,
            order_patience_s=settings.order_patience_s,
            order_deadline_s=settings.order_deadline_s,
        )
        self.host.launchers.enclose, self.host.launchers.limits = self._enclose, settings.limits
        endpoint = await self._wait_for_endpoint()
        self.host.token = endpoint.token
        self._peers = PeerCalls(endpoint.token, self._tls)
        self.gangs = GangSet(self.host, self._peers)
        self.session = Session(self.host, self.gangs, self._find_master, self._describe, lambda: self.health.faults)
        self.host.changed = self.session.news
        self.host.storage_configured = self._write_node
        self.gangs.adopt()
        await asyncio.to_thread(sweep_names, self.paths.run)
        await asyncio.to_thread(self.host.launchers.stop_idle, True)
        if not accounts.are_switched:
            self.host.launchers.warm_up()
        await self._listen(endpoint.token, known)
        self._write_node()
        self._work()

    def _work(self) -> None:
        """Begin what goes on until the daemon is stopped."""
        self.health = HealthCheck(self.host.hooks, self.node, self.paths.state, self.host.changed)
        work = (
            self._hold_session(),
            self._tend(),
            self._sweep_logs(),
            self._keep_certificate(),
            self.health.run(),
        )
        self._tasks = [asyncio.create_task(one) for one in work]

    def _choose_cgroups(self, gpu_cores: float, accounts: Accounts) -> Cgroups:
        settings = self._settings
        # Claims of a virtual node stand for no CPU time.
        quotas, fences = gpu_cores > 0.0 or settings.virtual is None, accounts.are_switched
        cgroups = choose_cgroups(self.paths.own_name, only=settings.cgroups, quotas=quotas, fences=fences)
        if gpu_cores and not is_done(cgroups, "cpu_quota"):
            why = cgroups.capabilities["cpu_quota"]
            raise ValueError(
                f"virtual GPUs cannot be bound to {counted(gpu_cores, 'core', 'g')} each here: no CPU quota ({why})"
            )
        return cgroups

    def _revocations(self) -> Revocations | None:
        """Return the list of revoked certificates that the master has sent. Raises DaemonError."""
        if self._settings.tls is None:
            return None
        kept = self.paths.state / REVOKED
        try:
            try:
                return Revocations(kept, self._settings.tls / AUTHORITY)
            except CredentialError as error:
                # The machine went down, or the disk is damaged. The master sends its own with the first heartbeat.
                log.warning("revoked certificates not read", extra={"error": str(error)})
                kept.unlink(missing_ok=True)
                return Revocations(kept, self._settings.tls / AUTHORITY)
        except (CredentialError, OSError) as error:
            raise DaemonError(os_failure(error), DaemonObstacle.STATE) from error

    async def stop(self) -> None:
        """Ends this daemon only: ranks, their launchers and their groups stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0.2)
        if self._stream is not None:
            await asyncio.to_thread(self._stream.close)
        if hasattr(self, "gangs"):
            await self.gangs.close()
            await self._peers.close()
            self.host.launchers.close()
            await asyncio.to_thread(self.host.launchers.stop_idle, False)
            self.host.devices.close()
            for group in self.host.cgroups.groups():
                if group.startswith(_OF_USER):
                    await asyncio.to_thread(self.host.cgroups.destroy, group, _LAUNCHERS_END_S)
            # goes only if no gang is left: their groups lie below
            self.host.cgroups.tidy()
            if not self.paths.existing():
                await asyncio.to_thread(self._claimed.tidy)
        self._claimed.release()

    @property
    def stream_address(self) -> str:
        assert self._stream is not None, "known once started"
        return self._stream.address

    async def _choose_accounts(self) -> tuple[Accounts, str]:
        """Return the accounts that jobs run as, and the Python for their commands that are none. Raises DaemonError."""
        try:
            accounts = choose_accounts(self._settings.accounts, has_certificates=self._settings.tls is not None)
            if not accounts.are_switched:
                return accounts, sys.executable
            # launchers of other accounts may leave calls unanswered, each of which keeps a thread
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "call"))
            return accounts, await asyncio.to_thread(interpreter_for_accounts)
        except ValueError as error:
            raise DaemonError(str(error), DaemonObstacle.SETTING) from error

    def _are_places_shared(self, accounts: Accounts) -> bool:
        """Return whether gangs share /tmp. Raises DaemonError where they must not, and cannot have their own."""
        wanted = self._settings.has_private_places
        if wanted is False:
            return True
        why = "" if accounts.are_switched else "all jobs run as this daemon's own user (--accounts own)"
        why = why or self.paths.private_places_trouble()
        if why and wanted:
            raise DaemonError(f"--private-tmp: {why}", DaemonObstacle.SETTING)
        if why and accounts.are_switched:
            log.warning("jobs share /tmp with each other and the machine", extra={"cause": why})
        return bool(why)

    async def _choose_images(self, accounts: Accounts, devices: DeviceState) -> ProcessImages:
        if accounts.are_switched:
            try:
                await asyncio.to_thread(share_links)
            except OSError as error:
                return ProcessImages(f"jobs of other accounts would not see their names: {os_failure(error)}")
        choose = partial(choose_images, are_accounts_switched=accounts.are_switched)
        return await asyncio.to_thread(choose, self._settings.criu, devices)

    def _check_certificate(self) -> None:
        """Raises DaemonError unless it is this node's, and does; and where one is needed and there is none."""
        tls = self._settings.tls
        try:
            check_listen_host(self._settings.listen_host, has_certificates=tls is not None)
            if tls is None:
                return
            identity = check_directory(tls, (CallerRole.DAEMON,))
            tell_end(tls)
        except EndpointError as error:
            raise DaemonError(str(error), obstacle_of(error)) from error
        if identity.name != self.node:
            raise DaemonError(
                f"the certificate in {tls} is of nodes/{identity.name}, this daemon is nodes/{self.node}:"
                f" give it --node {identity.name}, or the certificate of {self.node}",
                DaemonObstacle.RIGHTS,
            )

    def _check_hooks(self) -> None:
        """Raises DaemonError for a hook that cannot be run, or that others could replace."""
        for name, program in self._settings.hooks.programs().items():
            if trouble := hook_trouble(program):
                raise DaemonError(f"--{name}: {trouble}", DaemonObstacle.SETTING)
        if self._settings.hooks.run_as_user and shutil.which("setpriv") is None:
            raise DaemonError("--hooks-as-user: no setpriv on the path (Debian: util-linux)", DaemonObstacle.SETTING)

    def _find_master(self) -> Endpoint:
        found = find_endpoint(self._settings.master, self._tls)
        if self._tls and not found.tls:
            raise EndpointError(
                f"--master {self._settings.master}: a daemon with a certificate needs the address others reach the"
                " master at, HOST:PORT"
            )
        return found

    async def _wait_for_endpoint(self) -> Endpoint:
        """Return the master's address. The master may start after its daemons; jobs here run meanwhile."""
        is_logged = False
        while True:
            try:
                return self._find_master()
            except EndpointError as error:
                if error.found:
                    raise DaemonError(str(error), obstacle_of(error)) from error
                if not is_logged:
                    log.info("waiting for the master", extra={"error": str(error)})
                    is_logged = True
                await asyncio.sleep(0.1)

    async def _listen(self, token: str, known: dict[str, object]) -> None:
        host = self._settings.listen_host
        tls = self._settings.tls
        server = make_server(token, revocations=self.host.revocations)
        # Callers with the token count as an operator: the token names no node.
        callers = Callers(CallerIdentity(CallerRole.OPERATOR, own_user()), by_role=tls is not None)
        peer_pb2_grpc.add_PeerServiceServicer_to_server(PeerServicer(self.host, self.gangs, callers), server)
        try:
            # the same ports as before, where they are free: members of running gangs know them
            self.peer_address = _first_that_works(
                lambda port: bind(server, f"{host}:{port}", None if tls is None else server_credentials(tls)),
                _port_of(known.get("peer_address")),
            )
            self._stream = _first_that_works(
                lambda port: StreamServer(
                    partial(find_state, self.gangs, self.paths.checkpoints),
                    token,
                    host,
                    port,
                    tls=self._tls,
                    revocations=self.host.revocations,
                ),
                _port_of(known.get("stream_address")),
            )
        except EndpointError as error:
            raise DaemonError(str(error)) from error
        await server.start()
        self._server = server
        self._stream.start()

    def _write_node(self) -> None:
        fields = {
            "node": self.node,
            "machine_uuid": self._claimed.machine_uuid,
            "run_directory": str(self.paths.run),
            "cgroup": self.paths.own_name,
            "peer_address": self.peer_address,
            "stream_address": self.stream_address,
            "storage": str(self.host.storage.path or ""),
            "storage_token": self.host.storage.token,
            "pid": os.getpid(),
        }
        write_json(self.paths.state / "node.json", fields, durable=True)

    def _describe(self) -> agent_pb2.CreateSessionRequest:
        capabilities = {
            "disk_checkpoints": "yes",
            **self.host.cgroups.capabilities,
            **self.host.devices.capabilities,
            CAPABILITY: self.host.images.capability,
            "processor": " ".join((platform.machine(), *cpu_flags())),
            "gpu_state": self.host.device_state.capability,
            "user": own_user(),
            "switch_user": self._switches_users(),
            "rotation": "yes",
        }
        return agent_pb2.CreateSessionRequest(
            node=self.host.name,
            machine_uuid=self._claimed.machine_uuid,
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            configuration_set=configuration_set_to_wire(self.host.inventory.configuration_set),
            rack=self._settings.rack,
            fabric=self._settings.fabric,
            peer_address=self.peer_address,
            stream_address=self.stream_address,
            capabilities=capabilities,
            version=__version__,
        )

    def _enclose(self, account: Account) -> tuple[str, ...]:
        """Return the files by which the launchers of an account enter a group of theirs. Blocks."""
        group = f"{_OF_USER}{account.uid}"
        self.host.cgroups.create(group)
        # Not without devices: a library that has looked for them in vain in a launcher might not find its rank's.
        self.host.cgroups.set_process_limit(group, MOST_PROCESSES)
        self.host.cgroups.set_memory_limit(group, _LAUNCHERS_BYTES)
        return self.host.cgroups.join_files(group)

    def _switches_users(self) -> str:
        if self.host.accounts.are_switched:
            return "accounts"
        return "shared" if self.host.serves_all_users else "no"

    async def _hold_session(self) -> None:
        await self.gangs.judged()
        if not self.gangs.all():
            # A node that is unhealthy from its boot on gets no gang first.
            await self.health.is_known.wait()
        await self.session.run()

    async def _tend(self) -> None:
        known = (self.host.storage.path, self.host.storage.token)
        faults: tuple[dict[int, str], dict[int, str]] = {}, {}
        while True:
            await asyncio.sleep(_REVIVE_S)
            try:
                for gang in self.gangs.all():
                    if gang.parts.exits.live():
                        await self._revive(gang.parts.launcher)
                used = {gang.parts.launcher.key for gang in self.gangs.all()}
                # it holds images that are moved
                self.host.launchers.let_go(used | {self.host.launchers.restorer_key})
                await asyncio.to_thread(self.host.launchers.tend_logs)
                for event in self.host.devices.take_events():
                    log.warning("device event", extra={"device": event.device, "reason": event.message})
                found = self.host.devices.faults(), self.host.devices.warnings()
                if found != faults:
                    faults = found
                    self.host.changed()
                if (self.host.storage.path, self.host.storage.token) != known:
                    known = (self.host.storage.path, self.host.storage.token)
                    self._write_node()
            except OSError as error:
                log.warning("tending failed", extra={"error": str(error)})

    async def _revive(self, launcher: GangLauncher) -> None:
        """Start the launcher of a gang that has none. One that does not answer keeps no other gang waiting."""
        if launcher not in self._reviving:
            task = asyncio.create_task(asyncio.to_thread(launcher.revive))
            self._reviving[launcher] = task
            task.add_done_callback(lambda _: self._reviving.pop(launcher, None))
        task = self._reviving[launcher]
        await asyncio.wait((task,), timeout=_REVIVE_S)
        if task.done():
            task.result()

    async def _keep_certificate(self) -> None:
        if self._settings.tls is not None:
            await keep_renewed(self._settings.tls, self._find_master)

    async def _sweep_logs(self) -> None:
        while True:
            await self.session.connected.wait()
            here = frozenset(gang.desired.job_uid for gang in self.gangs.all())
            try:
                for uid in await asyncio.to_thread(self.host.logs.sweep, here, time.time()):
                    log.info("logs removed", extra={"job_uid": uid})
            except OSError as error:
                log.warning("logs not removed", extra={"error": str(error)})
            await asyncio.sleep(_SWEEP_S)


def _port_of(address: object) -> int:
    _, _, port = str(address or "").rpartition(":")
    return int(port) if port.isdigit() else 0


def _first_that_works(make: Callable[[int], T], port: int) -> T:
    if port:
        try:
            return make(port)
        except EndpointError:
            pass  # another process has taken the port
    return make(0)


async def run_daemon(settings: DaemonSettings) -> None:
    """Run a daemon until SIGTERM or SIGINT. Raises DaemonError if it cannot start."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    manager = ServiceManager()
    daemon = Daemon(settings)
    starting = asyncio.ensure_future(daemon.start())
    stopped = asyncio.ensure_future(over.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    else:
        starting.result()
        print(f"daemon {daemon.node} ready: peers {daemon.peer_address}, stream {daemon.stream_address}", flush=True)
        async with manager.notified():
            await stopped
    await daemon.stop()
