"""Devices taken from the processes of one gang, and given back; and the cores that the gang is pinned to. A process
without an agent is offloaded in place: the GPU driver copies its device memory to its host memory, and it is frozen.
The driver keeps what it has taken when the daemon dies, so the next daemon asks the driver."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger.cluster.topology import bits
from ganger.injob.page_layout import Word
from ganger.injob.process_identity import family
from ganger.protocol.gang_orders import OrderIntent

from ganger_daemon.cgroups.contract import SWEEPS
from ganger_daemon.cgroups.controllers import set_affinity
from ganger_daemon.core.gang_judgement import has_opaque_rank, is_to_be_taken
from ganger_daemon.core.part_facts import GangPart
from ganger_daemon.devices.inventory import UNREADABLE, VIRTUAL_DRIVER
from ganger_daemon.gang.exit_watcher import ExitWatcher
from ganger_daemon.gang.gang_context import GangContext, OfGang, threads_by_rank
from ganger_daemon.images.contract import DeviceStateLostError, ImageRefusedError
from ganger_daemon.images.driver import Replacements, replacements
from ganger_daemon.node.process_identity import anonymous_bytes

log = logging.getLogger(__name__)

BY_DRIVER = "in place, by the GPU driver"
BY_FREEZING = "in place, by freezing; a virtual GPU has no memory of its own to free"
# Between two attempts to give a process its devices back, and between two looks at the memory that it uses.
_RETRY_S = 1.0
_LOOK_S = 1.0
_OWN, _OTHERS = "gpus", "other_gpus"


class TakenDevices(OfGang):
    """Devices of one gang's processes.

    `are_taken`: the processes wait for their devices, and none of their state is on one; `taken_bytes`: what they had
    there; `peak_bytes`: most that was seen on one device, zero while unknown; `refusal`: why they were not taken for
    the present order; `trouble`: why they are not given back yet; `lost`: why the gang can only be ended."""

    def __init__(self, context: GangContext, exits: ExitWatcher, limit_bytes: Callable[[], int]) -> None:
        """`limit_bytes`: of the gang's host memory with its arenas; zero for none."""
        super().__init__(context)
        self._limit_bytes = limit_bytes
        self._exits = exits
        self._work: asyncio.Task[None] | None = None
        self._users = 0  # images under way, which take devices and give them back themselves
        self._one_at_a_time = threading.Lock()
        self._may_be_taken = self._host.device_state.has_driver  # by a former daemon
        self._moved = Replacements()
        self._expected = 0  # processes that a restored image had with device state
        self._refused: tuple[int, str] = (0, "")
        self._failed_at = self._looked_at = 0.0
        self.are_taken = False
        self.taken_bytes = 0
        self.peak_bytes = 0
        self.trouble = ""
        self.lost = ""

    def recall(self, left: Mapping[str, Any]) -> None:
        """Take over what a former daemon noted."""
        fields = left.get("devices", {})
        self.are_taken = bool(fields.get("are_taken", False))
        self.taken_bytes, self.peak_bytes, self._expected = (
            int(fields.get(name, 0)) for name in ("taken_bytes", "peak_bytes", "expected")
        )
        self._moved = Replacements(*(dict(one) for one in fields.get("moved", ({}, {}))))

    def journal(self) -> dict[str, Any]:
        fields = {
            "are_taken": self.are_taken,
            "taken_bytes": self.taken_bytes,
            "peak_bytes": self.peak_bytes,
            "expected": self._expected,
            "moved": [dict(one) for one in self._moved],
        }
        return {"devices": fields}

    @property
    def is_real(self) -> bool:
        return self._host.inventory.driver not in ("", VIRTUAL_DRIVER)

    @property
    def are_changing(self) -> bool:
        """Whether the driver, or what takes an image, is at work on the processes: they cannot obey meanwhile."""
        return self._work is not None or self._users > 0

    def unsavable(self, desired: agent_pb2.DesiredGang) -> str:
        """Return why the driver cannot save the state that the gang has on its devices; empty if nothing is known."""
        return self._host.device_state.unavailable if desired.claim.device_mask and self.is_real else ""

    def why_not(self, desired: agent_pb2.DesiredGang) -> str:
        """Return why the gang's processes cannot be offloaded in place; empty if nothing is known against it."""
        part = self._context.part
        freezer = self._host.cgroups.capabilities.get("freeze", "none")
        if part.world > 1:
            return "it has several tasks, and the GPU driver saves one process"
        if freezer.startswith("none"):
            return f"processes cannot be frozen on this node ({freezer})"
        return self.unsavable(desired)

    @property
    def means(self) -> str:
        """How the gang is offloaded in place, for the user."""
        return BY_DRIVER if self.is_real else BY_FREEZING

    def refusal(self, order: int) -> str:
        return self._refused[1] if self._refused[0] == order else ""

    def residue_bytes(self) -> int:
        """Return the bytes that taken processes keep on virtual devices: nothing moves a process's memory from one part
        of the machine's to another."""
        return 0 if self.is_real else sum(anonymous_bytes(pid) or 0 for pid in self.pids())

    # -- of an image ------------------------------------------------------------------------------------------------

    def labels(self, device_mask: int) -> dict[str, str]:
        """Return what an image tells of the devices, for `expect` where it is restored."""
        own, others = self._uuids(device_mask)
        return {_OWN: ",".join(own), _OTHERS: ",".join(others)}

    def expect(self, labels: Mapping[str, str], processes: int, device_mask: int) -> None:
        """Note that the gang is restored from an image in which so many processes have device state."""
        old, old_others = (labels.get(name, "").split(",") for name in (_OWN, _OTHERS))
        self._moved = replacements(old, old_others, *self._uuids(device_mask))
        self._expected, self.are_taken = processes, processes > 0

    def _uuids(self, device_mask: int) -> tuple[list[str], list[str]]:
        devices = sorted(self._host.inventory.devices, key=lambda device: device.index)
        own = [device.uuid for device in devices if device_mask >> device.index & 1]
        return own, [device.uuid for device in devices if device.uuid not in own]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Leave the devices to what takes an image meanwhile, in another thread."""
        self._users += 1
        try:
            with self._one_at_a_time:
                self._may_be_taken = self._host.device_state.has_driver
                yield
        finally:
            self._users -= 1

    # -- orders -----------------------------------------------------------------------------------------------------

    def follow(self, gang: GangPart, now: float, *, holds_still: bool) -> None:
        """Begin to take the devices, or give them back, as the order wants. `holds_still`: processes do not run yet."""
        if self.are_changing or gang.frozen or self.lost or not self._exits.live():
            return
        order = gang.wanted.order.number
        # an agent needs the devices for whatever it is ordered to do
        intents = (OrderIntent.RUN, OrderIntent.PREPARE)
        may_run = gang.wanted.intent in intents or (gang.has_agent and gang.wanted.intent is not OrderIntent.STOP)
        runs = may_run and not holds_still
        if is_to_be_taken(gang, now):
            if not self.are_taken:
                self._begin(lambda: self._take(order))
        elif runs and (self.are_taken or self._may_be_taken):
            if now - self._failed_at >= _RETRY_S:
                self._begin(self._give_back)
        elif runs and self.is_real and has_opaque_rank(gang, now) and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self.peak_bytes = max(self.peak_bytes, self._used_bytes())

    def _begin(self, work: Callable[[], None]) -> None:
        self._work = asyncio.create_task(self._do(work))

    async def _do(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(self._alone, work)
        except DeviceStateLostError as error:
            self.lost = str(error)
            log.error("device state lost", extra={"gang": self._context.paths.group, "cause": str(error)})
        finally:
            self._work = None
            self._context.write_notes()
            self._context.wake()

    def _alone(self, work: Callable[[], None]) -> None:
        with self._one_at_a_time:
            work()

    def _take(self, order: int) -> None:
        device_state, pids = self._host.device_state, self.pids()
        used = self._used_bytes() if device_state.holders(pids) else 0
        self._may_be_taken = device_state.has_driver
        try:
            self.check_room(used)
            device_state.save(pids)
        except ImageRefusedError as error:
            self._refused = (order, str(error))
            return
        self.taken_bytes, self.are_taken = max(used, self.taken_bytes), True
        self.peak_bytes = max(self.peak_bytes, used)

    def check_room(self, used_bytes: int) -> None:
        """Raise ImageRefusedError where host memory has no room for the device state: the kernel would end the gang."""
        limit_bytes, in_use = self._limit_bytes(), self._host.cgroups.unreclaimable_bytes(self._context.paths.group)
        if limit_bytes and in_use and used_bytes + in_use > limit_bytes:
            raise ImageRefusedError(
                f"its {used_bytes >> 20} MiB on the GPU have no room in its host memory, of which it uses "
                f"{in_use >> 20} of {limit_bytes >> 20} MiB"
            )

    def _give_back(self) -> None:
        device_state = self._host.device_state
        holders = device_state.holders(self.pids())
        try:
            if len(holders) < self._expected:
                raise DeviceStateLostError(
                    f"{self._expected} of the image's processes had state on a GPU, and the driver knows {len(holders)}"
                )
            device_state.restore(holders, self._moved)
        except ImageRefusedError as error:
            self.trouble, self._failed_at = str(error), time.monotonic()
            return
        self.trouble, self._moved, self._expected, self.taken_bytes = "", Replacements(), 0, 0
        self.are_taken = self._may_be_taken = False

    def pids(self) -> tuple[int, ...]:
        """Return all processes of the gang, those beside its ranks too."""
        roots = [process.pid for process in self._exits.live()]
        found = {pid for root in roots for pid in family(root)}
        return tuple(sorted(found.union(self._host.cgroups.pids(self._context.paths.group))))

    def _used_bytes(self) -> int:
        """Return the most that the processes use of one of their devices, as far as the driver tells; else what is in
        use there at all."""
        devices = self._host.devices
        own, whole = devices.used_by(self.pids()), devices.used_memory()
        mask = 0
        for part in self._context.part.device_masks:
            mask |= part
        found = [whole[index] if own[index] == UNREADABLE else own[index] for index in bits(mask) if index < len(own)]
        return max((size for size in found if size != UNREADABLE), default=0)


# A job that does not acknowledge (opaque, or in a long evaluation) loses the cores anyway after this.
ACK_S = 5.0


class CorePinning(OfGang):
    """Cores and thread counts of one gang's local ranks."""

    def __init__(self, context: GangContext, exits: ExitWatcher) -> None:
        super().__init__(context)
        self._exits = exits
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
        ordered = self._pages.threads()
        wanted = threads_by_rank(self._part, desired, min(ordered.values(), default=1))
        if millicores == self._millicores and wanted == ordered:
            return
        fewer = {rank: min(wanted[rank], threads) for rank, threads in ordered.items()}
        if fewer != ordered:
            # it loses cores only once it has fewer threads
            sequence = self._pages.retune(fewer)
            await self._wait(sequence, max(ACK_S, 2 * iteration_s))
        shortage = self._host.cores.take(self._group, millicores, near, self._former)
        self.trouble = f"no cores: {shortage}" if shortage else ""
        await self._pin()
        if wanted != fewer:
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
        return min(applied) or min(self._pages.threads().values())

    async def _pin(self) -> None:
        cgroups, cores = self._host.cgroups, self._host.cores
        await asyncio.to_thread(cgroups.set_cpus, self._group, cores.cpus(self._group))
        await asyncio.to_thread(cgroups.set_quota, self._group, cores.quota(self._group))
        if self._part.pools:
            await asyncio.to_thread(self._pin_ranks)

    def _pin_ranks(self) -> None:
        """Keep the processes of each rank to the cores of its role."""
        cpus = {rank: self._host.cores.cpus_of(ids) for rank, ids in self._context.cores_by_rank().items()}
        for _ in range(SWEEPS):
            for rank, process in self._exits.processes.items():
                if cpus[rank] and self._exits.is_live(rank):
                    set_affinity(family(process.pid), cpus[rank])

    async def _wait(self, sequence: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(self._pages[rank].get(Word.RETUNE_DONE) < sequence for rank in self._part.ranks):
            if time.monotonic() > deadline:
                log.warning("ranks did not apply their threads", extra={"group": self._group})
                return
            await asyncio.sleep(0.002)
