"""Context that the parts of a daemon share: identity, paths, devices, cores, storage, and calls to other daemons."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from ganger.agent.v1 import peer_pb2, peer_pb2_grpc
from ganger.wire.channels import DaemonChannels
from ganger.wire.revocation import Revocations

from ganger_daemon.cgroups.contract import Cgroups, is_done
from ganger_daemon.checkpoints import storage as layout
from ganger_daemon.checkpoints.node_checkpoints import Fetcher
from ganger_daemon.checkpoints.storage import ShardReport, shard_name
from ganger_daemon.devices.inventory import Devices, Inventory
from ganger_daemon.images.contract import ProcessImages
from ganger_daemon.images.driver import DeviceState
from ganger_daemon.node.accounts import Accounts
from ganger_daemon.node.core_table import CoreTable
from ganger_daemon.node.daemon_files import DaemonPaths
from ganger_daemon.node.hooks import NodeHooks
from ganger_daemon.node.launchers import Launchers
from ganger_daemon.node.log_store import LogStore

_T = TypeVar("_T")
# A call that hangs keeps its place: while all are taken, further calls wait.
_AT_ONCE = 8


class StorageHungError(OSError):
    """Storage did not answer in time."""


class StorageWait:
    """A wait for storage that begins now."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        # A moment and not a passed time: a report with it does not change while the wait continues.
        self.since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._began


class StorageWork:
    """Run calls that may hang, at most `at_once` at a time, each on a separate thread."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._places = threading.BoundedSemaphore(at_once)

    async def run(self, function: Callable[..., _T], *args: Any, within_s: float) -> _T:
        """Return what the function returns, or raise what it raises; StorageHungError after `within_s` seconds.

        A call that hangs keeps its thread. The daemon can end nevertheless."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()

        def settle(result: _T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

        def work() -> None:
            with self._places:
                result, error = None, None
                # Skipped where its caller has given up.
                if not done.done():
                    try:
                        result = function(*args)
                    except BaseException as caught:
                        error = caught
            with suppress(RuntimeError):  # The loop has ended
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=work, daemon=True, name="storage").start()
        try:
            async with asyncio.timeout(within_s):
                return await done
        except TimeoutError:
            raise StorageHungError(f"storage has not answered within {within_s:g} s") from None


# Interval of reading the token; how long the daemon's loop waits for one read; after how long storage counts as hung.
_LOOK_EVERY_S = 0.5
_LOOK_PATIENCE_S = 0.25
# Time that an order may be disobeyed before stacks are dumped, and before SIGTERM.
ORDER_PATIENCE_S, ORDER_DEADLINE_S = 30.0, 60.0
_HUNG_S = 5.0


@dataclass(slots=True)
class Storage:
    """Directory that all nodes see, and whether this node is proved to see it, by its token."""

    path: Path | None = None
    token: str = ""
    override: Path | None = None
    work: StorageWork = field(default_factory=StorageWork)
    # The token that was found last, and the read that is under way; times are of the monotonic clock.
    _found: str = ""
    _looked_at: float = -math.inf
    _looking: threading.Thread | None = None
    _waiting: StorageWait = field(default_factory=StorageWait)

    def configure(self, path: str, token: str) -> None:
        # Absolute: launchers, which publish what ranks have written, stand elsewhere.
        self.path = self.override.absolute() if self.override else (Path(path) if path else None)
        self.token = token
        self._looked_at, self._looking = -math.inf, None

    @property
    def found(self) -> str:
        """The token in the storage directory; the one found last while storage does not answer."""
        now = time.monotonic()
        if self.path is None:
            return ""
        if self._looking is None and now - self._looked_at > _LOOK_EVERY_S:
            looking = threading.Thread(target=self._look, args=(self.path,), daemon=True, name="storage look")
            self._looking, self._waiting = looking, StorageWait()
            looking.start()
            looking.join(_LOOK_PATIENCE_S)
        return self._found

    async def settle(self) -> None:
        """Wait until it is known whether this node sees the storage, at most until the storage counts as hung.

        A gang keeps its checkpoints for as long as it lasts where its nodes see the storage as it starts: one whose
        first look takes longer than others' must not count as a node without storage."""
        looking = None if self.found else self._looking
        if looking is not None:
            await asyncio.to_thread(looking.join, _HUNG_S)

    @property
    def proved(self) -> bool:
        return bool(self.token) and self.found == self.token

    @property
    def shared(self) -> Path | None:
        """The directory, if this node is proved to see it."""
        return self.path if self.proved else None

    @property
    def trouble(self) -> str:
        """Why work that needs storage waits; empty if storage answers."""
        if self.path is None or self._looking is None or self._waiting.passed_s < _HUNG_S:
            return ""
        return f"STORAGE_HUNG: storage has not answered since {self._waiting.since}"

    def _look(self, path: Path | None) -> None:
        """Read the token in a separate thread, because storage may hang, and record it."""
        found = layout.token_found(path)
        if self._looking is threading.current_thread():
            self._found, self._looked_at, self._looking = found, time.monotonic(), None


_SWITCH_S = 2.0
MOST_PROCESSES = 32_768
"""Processes and threads of one account's gang on a node, and of its launchers: more than data loaders of eight tasks
have, far fewer than a kernel has."""


class PeerCalls:
    """Calls to other daemons, over one channel each."""

    def __init__(self, token: str, tls: str = "") -> None:
        """`tls`: directory of the certificate to present, where links have TLS."""
        self._channels = DaemonChannels(token, tls)

    async def rendezvous(self, address: str, job_uid: str, epoch: int) -> tuple[str, int]:
        """Return host and port of the ranks' rendezvous. Raises OSError if the leader does not answer."""
        try:
            found = await self.stub(address).GetRendezvous(
                peer_pb2.GetRendezvousRequest(job_uid=job_uid, epoch=epoch), wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise OSError(f"the leader at {address} has no rendezvous: {error.details()}") from error
        return found.host, found.port

    async def shard_written(self, address: str, job_uid: str, epoch: int, report: ShardReport) -> bool:
        answer = await self.stub(address).ShardWritten(
            peer_pb2.ShardWrittenRequest(
                job_uid=job_uid,
                epoch=epoch,
                stop_sequence=report.agreement,
                step=report.step,
                refusal=report.refusal,
                shards=[
                    peer_pb2.Shard(
                        rank=one.rank,
                        file=shard_name(one.rank),
                        size_bytes=one.size_bytes,
                        digest=one.digest,
                        header_digest=one.header_digest,
                        device_model=one.device_model,
                    )
                    for one in report.shards
                ],
            )
        )
        return bool(answer.published)

    async def switch_row(self, address: str, order: peer_pb2.SliceOrder) -> peer_pb2.SliceMember | None:
        """Return the state of a member after a slice order; None without an answer."""
        try:
            state: peer_pb2.SliceMember = await self.stub(address).SwitchRow(order, timeout=_SWITCH_S)
        except grpc.aio.AioRpcError:
            return None
        return state

    async def close(self) -> None:
        await self._channels.close()

    def stub(self, address: str) -> Any:
        return peer_pb2_grpc.PeerServiceStub(self._channels.get(address))


@dataclass(slots=True)
class NodeContext:
    """Context of one daemon. Mutable are the core table, storage, the lease, `has_fetched` and callbacks."""

    node: str
    token: str
    # The directory of the certificate that this daemon shows; empty where the token guards all links.
    tls: str
    paths: DaemonPaths
    cgroups: Cgroups
    devices: Devices
    images: ProcessImages
    device_state: DeviceState
    inventory: Inventory
    logs: LogStore
    launchers: Launchers
    cores: CoreTable
    # Of certificates; None where the token guards all links.
    revocations: Revocations | None = None
    accounts: Accounts = field(default_factory=Accounts)
    # Whether gangs that run as accounts share /tmp, and the gangs of one account and interpreter /dev/shm.
    places_shared: bool = True
    hooks: NodeHooks = field(default_factory=NodeHooks)
    storage: Storage = field(default_factory=Storage)
    # None until the master has answered once: an adopted gang keeps the lease it has.
    lease_until_ns: int | None = None
    checkpoint_interval_s: float = 0.0
    changed: Callable[[], None] = lambda: None
    # A checkpoint was fetched to this node's disk, and the master does not know it yet.
    has_fetched: bool = False
    # Called when the master has named the storage: the next daemon needs it before its first session.
    storage_configured: Callable[[], None] = lambda: None
    address_host: str = "127.0.0.1"
    order_patience_s: float = ORDER_PATIENCE_S
    order_deadline_s: float = ORDER_DEADLINE_S
    # CPU time of all gangs on one device together, in cores; zero: no limit.
    device_cores: float = 0.0
    # One at a time: two launches that rewrite cpusets at once would fight over the same files.
    launch_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note_fetched(self) -> None:
        """Report soon that this node's disk has a further checkpoint: the node that it came from may be lost."""
        self.has_fetched = True
        self.changed()

    @property
    def fetcher(self) -> Fetcher:
        """Return what fetches checkpoints of other nodes to this node's disk."""
        return Fetcher(self.paths.checkpoints, self.token, self.tls)

    def fence(self, group: str, device_mask: int) -> None:
        """Limit the processes of a group, and keep all other devices than those of the mask from it. Raises OSError
        where the kernel could and does not: then nothing may run in it."""
        self.cgroups.set_process_limit(group, MOST_PROCESSES)
        every = (1 << len(self.inventory.devices)) - 1
        foreign = [os.stat(path).st_rdev for path in self.devices.files(every & ~device_mask) if os.path.exists(path)]
        numbers = [(os.major(device), os.minor(device)) for device in foreign]
        if not self.cgroups.deny_devices(group, numbers) and is_done(self.cgroups, "device_fence"):
            raise OSError(f"the devices of other jobs cannot be kept from {group}")

    @property
    def serves_all_users(self) -> bool:
        """Whether it runs the jobs of all users as its own user."""
        return bool(self.tls) and not self.accounts.are_switched

    @property
    def name(self) -> str:
        return f"nodes/{self.node}"
