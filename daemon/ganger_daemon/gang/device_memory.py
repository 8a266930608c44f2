"""Device memory of one gang's ranks: proof that OFFLOAD has freed it, and the residue that cannot be freed.

Memory in use before a stop is compared with that after it. For devices with a driver, the driver's figure counts. A
virtual device's memory is the anonymous memory of its processes; the raw figure of each process is compared, because a
script may build its model before its hello.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ganger.cluster.topology import bits
from ganger.injob.page import PageState
from ganger.v1 import resources_pb2

from ganger_daemon.devices.contract import UNREADABLE
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.gang.desired_messages import LocalPart
from ganger_daemon.node.node_context import NodeContext
from ganger_daemon.node.process_identity import ProcessId, anonymous_bytes

log = logging.getLogger(__name__)

_SAMPLE_S = 0.02
_MEBIBYTE = 1 << 20
# Margin beside a quarter of the use; what is reported is rounded up to a multiple of it.
_MARGIN_BYTES = 64 << 20
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


class MemoryWatch:
    """`is_shared`: whether other gangs use its devices, too; then the use of a device does not show this gang's part.
    `group`: its control group. `arena_bytes`: bytes reserved for its arenas."""

    def __init__(
        self,
        host: NodeContext,
        part: LocalPart,
        is_shared: Callable[[], bool] = lambda: False,
        group: str = "",
        arena_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._host = host
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
        # What the ranks keep of each device of the node although all is freed; empty where that cannot be told.
        self.residue: tuple[int, ...] = ()
        # Host memory that they keep beside their arenas, with a margin; zero if unknown.
        self.kept_bytes = 0
        self._limit_bytes = 0  # of host memory, as set last; zero: only at the launch

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
        if limit_bytes != self._limit_bytes:
            self._limit_bytes = limit_bytes
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
        reported = sum(pages.progress(rank).offloaded_bytes for rank in self._part.ranks)
        if not device_mask or not self._before:
            # no devices; or a former daemon saw the ranks before and this one cannot compare
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
        used = self._host.devices.used_by({process.pid for process in processes.values()})
        kept = [size if device_mask >> index & 1 else 0 for index, size in enumerate(used)]
        self.residue = tuple(kept) if UNREADABLE not in kept else ()

    def _measure(self, pages: ControlPages) -> int:
        """Return the host memory in bytes that the ranks keep beside their arenas, with a margin; zero if unknown.

        Arenas are reserved apart from the claimed memory. Of the bytes that ranks report as stored there, at most the
        reserved ones are subtracted, so that kept and reserved memory together cover what is in use."""
        used = self._host.cgroups.unreclaimable_bytes(self._group)
        if not used:
            return 0
        stored = sum(pages.progress(rank).offloaded_bytes for rank in self._part.ranks)
        working = max(0, used - min(stored, self._arena_bytes()))
        return -(-(working * 5 // 4 + _MARGIN_BYTES) // _MARGIN_BYTES) * _MARGIN_BYTES

    def _residue_by_pages(self, pages: ControlPages) -> tuple[int, ...]:
        """Return the bytes by device of tensors that were not offloaded, in whole MiB, since a page has figures of two
        moments; at most the device's memory, since a job may write any number."""
        configuration_set = self._host.inventory.configuration_set
        kept = [0] * configuration_set.devices
        for rank, mask in zip(self._part.ranks, self._part.device_masks, strict=True):
            progress = pages.progress(rank)
            left = max(0, progress.device_bytes - progress.offloaded_bytes)
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
