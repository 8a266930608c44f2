"""Memory of one gang: its working set, trials with less page cache, and proof that OFFLOAD has freed device memory, by
its use before a stop and after it (of a virtual device the anonymous memory of its processes)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ganger.cluster.topology import bits
from ganger.injob.page_layout import PageState
from ganger.v1 import resources_pb2

from ganger_daemon.devices.inventory import UNREADABLE
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.gang.gang_context import LocalPart
from ganger_daemon.gang.taken_devices import TakenDevices
from ganger_daemon.node.node_context import NodeContext
from ganger_daemon.node.process_identity import ProcessId, anonymous_bytes

log = logging.getLogger(__name__)

_SAMPLE_S = 0.02
_MEBIBYTE = 1 << 20
# Margin beside a quarter of the use; what is reported is rounded up to a multiple of it.
_MARGIN_BYTES = 64 << 20
# The longest trial of memory, which the planner ends within ten minutes, and the interval between looks at it.
_TRIAL_MOST_S = 900.0
_TRIAL_LOOK_S = 0.25
# Drivers free memory a little later than they report; after this the delay is reported as trouble.
_TROUBLE_S = 5.0

# Share of the memory reported as freed that must be measured as free: the rest is rounding and context.
SHARE = 0.95
# Allocators keep a little; for a small model that little is more than its state.
SLACK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Freed:
    expected_bytes: int
    seen_bytes: int

    @property
    def enough(self) -> bool:
        return self.seen_bytes >= int(self.expected_bytes * SHARE) - SLACK_BYTES


def compare(before: Mapping[int, int], after: Mapping[int, int], reported_bytes: int) -> Freed:
    """Sums over keys seen both times (devices or pids). What cannot be read after (-1) counts as still in use."""
    seen = 0
    for key in before:
        now = after.get(key, -1)
        seen += max(0, before[key] - now) if now >= 0 else 0
    return Freed(reported_bytes, seen)


def memory_limit_bytes(claim: resources_pb2.Claim) -> int:
    """Return the limit of a running gang's host memory; zero for none."""
    return claim.memory_bytes + claim.arena_bytes if claim.memory_bytes else 0


def rounded_up(size: int) -> int:
    """Return a number of bytes rounded up to an eighth of its power of two, so that one that creeps is seldom news."""
    step = max(_MARGIN_BYTES, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def with_margin(least_bytes: int) -> int:
    """Return the memory that a trial leaves a group which needs this much without file caches, and grows."""
    return least_bytes + max(_MARGIN_BYTES, least_bytes // 8)


class WorkingSet:
    """Measured memory of a gang's processes on this node, without their arenas, which are claimed apart. `arena_bytes`
    returns what their arenas use of that claim. `bytes_now`: the working set as last measured; `peak_bytes`: the
    largest so far; zero where no control group measures them. `refault_bytes_per_s`: see `MemoryUse`, over the last
    interval; None: unknown. `used_bytes`: with all file caches; `least_bytes`: the most so far that they
    needed without these, with a margin; zero where there can be no trial of memory."""

    def __init__(self, host: NodeContext, group: str, arena_bytes: Callable[[], int]) -> None:
        self._host = host
        self._group = group
        self._arena_bytes = arena_bytes
        self._refaulted: tuple[float, int] | None = None
        self.bytes_now = self.peak_bytes = self.used_bytes = self.least_bytes = 0
        self.refault_bytes_per_s: float | None = None

    def measure(self, now: float) -> None:
        """Take one sample. `now`: seconds of a monotonic clock."""
        use = self._host.cgroups.memory_use(self._group)
        if use is None:
            return
        # Read after the use: an arena that grows in between makes this sample too small, and leaves the peak as it is.
        arenas = self._arena_bytes()
        self.bytes_now = max(0, use.working_set - arenas)
        self.used_bytes = max(0, use.used - arenas)
        if use.least:
            self.least_bytes = max(self.least_bytes, with_margin(use.least) - arenas)
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        before, self._refaulted = self._refaulted, None if use.refaulted is None else (now, use.refaulted)
        self.refault_bytes_per_s = None
        if before is not None and self._refaulted is not None and now > before[0]:
            self.refault_bytes_per_s = max(0, self._refaulted[1] - before[1]) / (now - before[0])


class MemoryTrial:
    """A trial of less memory for a gang's processes: their file caches are held back, and what is claimed stays theirs.
    It ends when the gang does not run, when this daemon stops, and 15 minutes after it was asked for. `asked_bytes`:
    what the processes are to have, without arenas; zero: no trial. `bytes_now`: what they have by it; zero: none is in
    effect."""

    def __init__(self, host: NodeContext, group: str, arena_bytes: Callable[[], int]) -> None:
        self._host, self._group, self._arena_bytes = host, group, arena_bytes
        self.asked_bytes = self.bytes_now = 0
        self._began_s = self._looked_s = 0.0
        # What the group is held to; zero: nothing; None: unknown, as a former daemon may have left a trial.
        self._held_bytes: int | None = None
        self._write: asyncio.Task[bool] | None = None

    def ask(self, memory_bytes: int) -> None:
        """Begin a trial, replace it by another one or, with zero, end it."""
        if memory_bytes != self.asked_bytes:
            self.asked_bytes, self._began_s, self._looked_s = memory_bytes, time.monotonic(), 0.0

    async def follow(self, limit_bytes: int, is_running: bool, now: float) -> None:
        """Hold caches as asked while the gang runs, else hold none. `limit_bytes`: limit of its memory; zero: none.
        `now`: seconds of a monotonic clock."""
        if not (self.asked_bytes and limit_bytes and is_running and now < self._began_s + _TRIAL_MOST_S):
            await self.lift()
            return
        if now < self._looked_s + _TRIAL_LOOK_S:
            return
        self._looked_s = now
        use = self._host.cgroups.memory_use(self._group)
        least = with_margin(use.least) if use is not None and use.least else limit_bytes
        wanted = max(self.asked_bytes + self._arena_bytes(), least)
        if wanted >= limit_bytes:
            await self.lift()
        # Processes that need more get it; what they free is not taken from them within the same trial.
        elif wanted > (self._held_bytes or 0):
            await self._hold(wanted)

    async def lift(self) -> None:
        """Hold caches back no longer, also those of a former daemon. What fails is repeated at the next call."""
        if self._held_bytes != 0:
            await self._hold(0)

    async def _hold(self, memory_bytes: int) -> None:
        if self._write is not None:
            # The caller of the last one may have been cancelled, and its thread goes on.
            await asyncio.wait([self._write])
        self._held_bytes = None
        self._write = asyncio.create_task(
            asyncio.to_thread(self._host.cgroups.hold_caches, self._group, memory_bytes), name="hold caches"
        )
        is_done = await asyncio.shield(self._write)
        self._held_bytes = memory_bytes if is_done else None
        self.bytes_now = max(0, memory_bytes - self._arena_bytes()) if is_done and memory_bytes else 0


class MemoryWatch:
    """Device and host memory of one gang. `is_shared`: whether other gangs use its devices, too; then the use of a
    device does not show this gang's part. `group`: its control group. `arena_bytes`: bytes reserved for its arenas.
    `taken`: its devices, where they are taken in place."""

    def __init__(
        self,
        host: NodeContext,
        part: LocalPart,
        is_shared: Callable[[], bool] = lambda: False,
        group: str = "",
        arena_bytes: Callable[[], int] = lambda: 0,
        taken: TakenDevices | None = None,
    ) -> None:
        self._host = host
        self._taken = taken
        self._part = part
        self._is_shared = is_shared
        self._group = group
        self._arena_bytes = arena_bytes
        self._baselines: dict[int, int] = {}
        self._attached: dict[int, ProcessId] = {}
        self._before: dict[int, int] = {}
        self._sampled_at = 0.0
        self._verifying_since: float | None = None
        self.freed = False
        self.trouble = ""
        # What the ranks keep of each device of the node although all is freed; empty if it is unknown.
        self.residue: tuple[int, ...] = ()
        # Host memory that they keep beside their arenas, with a margin; zero if unknown.
        self.kept_bytes = 0
        self.limit_bytes = 0  # Limit of host memory, as set last; zero: only at the launch

    @property
    def waiting(self) -> bool:
        """Verification has begun and not succeeded: no need to look at the fastest pace."""
        return self._verifying_since is not None and not self.freed

    def recall(self, baselines: Mapping[int, int]) -> None:
        self._baselines = dict(baselines)

    def baselines(self) -> dict[str, int]:
        found = {}
        for process in self._attached.values():
            baseline = self._host.devices.baseline(process.pid)
            if baseline is not None:
                found[str(process.pid)] = baseline
        return found

    def attach(self, rank: int, process: ProcessId | None) -> bool:
        """At a rank's hello; True when it is new."""
        if process is None or rank in self._attached:
            return False
        mask = self._part.device_masks[self._part.ranks.index(rank)]
        self._host.devices.attach(process.pid, mask, self._baselines.get(process.pid))
        self._attached[rank] = process
        return True

    def detach(self) -> None:
        for process in self._attached.values():
            self._host.devices.detach(process.pid)

    async def follow_limit(self, claim: resources_pb2.Claim, is_parked: bool) -> None:
        """Set the limit of host memory to the claim; for a gang parked at OFFLOAD, to the memory that it keeps."""
        if not claim.memory_bytes:
            return
        is_smaller = is_parked and self.kept_bytes > 0
        own_bytes = min(self.kept_bytes, claim.memory_bytes) if is_smaller else claim.memory_bytes
        limit_bytes = own_bytes + claim.arena_bytes
        if limit_bytes != self.limit_bytes:
            self.limit_bytes = limit_bytes
            await asyncio.to_thread(self._host.cgroups.set_memory_limit, self._group, limit_bytes)

    def begin(self) -> None:
        """Forget the measurements of the stop before: a new stop or run begins."""
        self.freed = False
        self.trouble = ""
        self.residue = ()
        self.kept_bytes = 0
        self._verifying_since = None
        self._before = {}
        self._sampled_at = 0.0

    def sample(self, pages: ControlPages, processes: Mapping[int, ProcessId]) -> None:
        """Note the peak use before ranks have offloaded."""
        now = time.monotonic()
        if self._verifying_since is not None or now - self._sampled_at < _SAMPLE_S:
            return
        self._sampled_at = now
        if self._before and any(pages.progress(rank).state == PageState.OFFLOADED for rank in self._part.ranks):
            return
        for key, size in self._in_use(processes).items():
            self._before[key] = max(self._before.get(key, 0), size)

    def verify(self, pages: ControlPages, processes: Mapping[int, ProcessId], device_mask: int) -> None:
        """Check whether the memory of offloaded ranks is free. Sets `freed`, or `trouble` when it takes long."""
        if self.freed:
            return
        now = time.monotonic()
        if self._verifying_since is None:
            self._verifying_since = now
        reported = self._stored_bytes(pages)
        if not device_mask or not self._before:
            # No devices; or a former daemon saw the ranks before and this one cannot compare.
            self._settle(pages, processes, device_mask)
            return
        found = compare(self._before, self._in_use(processes), reported)
        if found.enough:
            self._settle(pages, processes, device_mask)
            return
        if now - self._verifying_since >= _TROUBLE_S and not self.trouble:
            self.trouble = (
                f"device memory is not free: {found.seen_bytes} of {found.expected_bytes} bytes were seen to go; "
                "another process or a captured graph may hold it"
            )
            log.warning("offload not confirmed", extra={"seen": found.seen_bytes, "expected": found.expected_bytes})

    def _settle(self, pages: ControlPages, processes: Mapping[int, ProcessId], device_mask: int) -> None:
        self.freed = True
        self.trouble = ""
        self.kept_bytes = self.kept_bytes or self._measure(pages)
        if self._is_virtual:
            self.residue = self._residue_by_pages(pages)
            return
        if self._taken is not None and self._taken.are_taken:
            self.residue = (0,) * len(self._host.inventory.devices)
            return
        used = self._host.devices.used_by({process.pid for process in processes.values()})
        kept = [size if device_mask >> index & 1 else 0 for index, size in enumerate(used)]
        self.residue = tuple(kept) if UNREADABLE not in kept else ()

    def _stored_bytes(self, pages: ControlPages) -> int:
        if self._taken is not None and self._taken.are_taken:
            return self._taken.taken_bytes
        return sum(pages.progress(rank).offloaded_bytes for rank in self._part.ranks)

    def _measure(self, pages: ControlPages) -> int:
        """Return the host memory in bytes that the ranks keep beside their arenas, with a margin; zero if unknown.

        Arenas are reserved apart from the claimed memory. Of the bytes that ranks report as stored there, at most the
        reserved ones are subtracted, so that kept and reserved memory together cover what is in use."""
        used = self._host.cgroups.unreclaimable_bytes(self._group)
        if not used:
            return 0
        working = max(0, used - min(self._stored_bytes(pages), self._arena_bytes()))
        return -(-(working * 5 // 4 + _MARGIN_BYTES) // _MARGIN_BYTES) * _MARGIN_BYTES

    def _residue_by_pages(self, pages: ControlPages) -> tuple[int, ...]:
        """Return the bytes by device of tensors that were not offloaded, in whole MiB, since a page has figures of two
        moments; at most the device's memory, since a job may write any number."""
        configuration_set = self._host.inventory.configuration_set
        kept = [0] * configuration_set.devices
        unmoved = self._taken.residue_bytes() if self._taken is not None and self._taken.are_taken else 0
        for rank, mask in zip(self._part.ranks, self._part.device_masks, strict=True):
            progress = pages.progress(rank)
            left = max(unmoved, progress.device_bytes - progress.offloaded_bytes)
            for index in bits(mask):
                kept[index] = min(kept[index] + left // mask.bit_count(), configuration_set.device_memory_bytes)
        return tuple([size // _MEBIBYTE * _MEBIBYTE for size in kept])

    @property
    def _is_virtual(self) -> bool:
        return self._host.devices.capabilities.get("devices") == "virtual"

    def _in_use(self, processes: Mapping[int, ProcessId]) -> dict[int, int]:
        if self._is_virtual:
            return {process.pid: anonymous_bytes(process.pid) or 0 for process in processes.values()}
        mask = 0
        for part in self._part.device_masks:
            mask |= part
        used = self._host.devices.used_memory()
        if self._is_shared():
            own = self._host.devices.used_by({process.pid for process in processes.values()})
            # The driver lists no process that has freed all, just as it lists none where it cannot tell.
            used = tuple([all_ if size == UNREADABLE else size for all_, size in zip(used, own, strict=True)])
        return {index: used[index] for index in bits(mask) if index < len(used)}
