"""Controllers of v1 and v2: CPUs, memory, freezing and killing, usage, quotas. A variant is a choice of controllers.

A part works on directories of its own; the variant makes and removes them. v1 has one tree per controller, v2 one tree
for all.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from ganger_daemon.cgroups import files
from ganger_daemon.node.core_table import format_ids, parse_ids

log = logging.getLogger(__name__)

QUOTA_PERIOD_US = 10_000
"""Of a CPU quota: far below a mini-batch, so that a quota looks like a slower processor and not like pauses."""
SMALLEST_QUOTA_CORES = 0.1
"""The kernel takes no quota below 1 ms."""
_SWEEPS = 3
_SWEEP_S = 0.1


class CgroupController(Protocol):
    name: str
    root: Path


class Cpus(CgroupController, Protocol):
    def set_cpus(self, group: Path, cpus: Collection[int]) -> tuple[int, ...]: ...


class MemoryController(CgroupController, Protocol):
    def set_limit(self, group: Path, memory_bytes: int) -> bool: ...

    def used(self, group: Path) -> int: ...

    def unreclaimable(self, group: Path) -> int:
        """Bytes as in `Cgroups.unreclaimable_bytes`."""

    def oom_kills(self, group: Path) -> int: ...


class FreezeController(CgroupController, Protocol):
    """Freezing and killing. `file`: name of the file in a group that is written to freeze it."""

    file: str

    def order(self, group: Path, frozen: bool) -> bool: ...

    def is_frozen(self, group: Path) -> bool: ...

    def kill(self, group: Path) -> None: ...


class Usage(CgroupController, Protocol):
    def cpu_s(self, group: Path) -> float: ...


class Quota(CgroupController, Protocol):
    def set_quota(self, group: Path, cores: float) -> bool:
        """CPU time of all that is in the group or below it."""


class CpusV1:
    name = "v1"

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """A new v1 cpuset is empty and takes no process: memory nodes first, then CPUs."""
        self._inherit(self.root)

    def enter(self, group: Path) -> None:
        self._inherit(group)

    def set_cpus(self, group: Path, cpus: Collection[int]) -> tuple[int, ...]:
        self._inherit(group)
        before = set(_ids(group / "cpuset.cpus"))
        if not files.write(group / "cpuset.cpus", format_ids(cpus)):
            return ()
        effective = _ids(group / "cpuset.effective_cpus") or _ids(group / "cpuset.cpus")
        _forget_masks(group, before, effective)
        return effective

    def _inherit(self, group: Path) -> None:
        if not files.read(group.parent / "cpuset.cpus") and (group.parent.parent / "cpuset.cpus").exists():
            self._inherit(group.parent)
        for name in ("cpuset.mems", "cpuset.cpus"):
            if not files.read(group / name):
                files.write(group / name, files.read(group.parent / name))


class CpusV2:
    name = "v2"

    def __init__(self, root: Path) -> None:
        self.root = root

    def set_cpus(self, group: Path, cpus: Collection[int]) -> tuple[int, ...]:
        before = set(_ids(group / "cpuset.cpus.effective"))
        if not files.write(group / "cpuset.cpus", format_ids(cpus)):
            return ()
        effective = _ids(group / "cpuset.cpus.effective") or _ids(group / "cpuset.cpus")
        _forget_masks(group, before, effective)
        # the kernel falls back to the parent's CPUs when none of ours is there: that is not pinned
        return effective if set(effective) <= set(cpus) else ()


class MemoryV1:
    name = "v1"

    def __init__(self, root: Path) -> None:
        self.root = root

    def set_limit(self, group: Path, memory_bytes: int) -> bool:
        wanted = _whole_pages(memory_bytes)
        # with swap accounting, the limit of both must not be below that of memory: lift it before, lower it after
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists() and files.number(files.read(swap)) < wanted:
            files.write(swap, str(wanted))
        set_ = files.write(group / "memory.limit_in_bytes", str(wanted))
        if swap.exists():
            files.write(swap, str(wanted))
        return set_ and files.number(files.read(group / "memory.limit_in_bytes"), -1) == wanted

    def used(self, group: Path) -> int:
        return files.number(files.read(group / "memory.usage_in_bytes"))

    def unreclaimable(self, group: Path) -> int:
        found = files.keyed(files.read(group / "memory.stat"))
        return max(0, self.used(group) - max(0, found.get("total_cache", 0) - found.get("total_shmem", 0)))

    def oom_kills(self, group: Path) -> int:
        return files.keyed(files.read(group / "memory.oom_control")).get("oom_kill", 0)


class MemoryV2:
    name = "v2"

    def __init__(self, root: Path) -> None:
        self.root = root

    def set_limit(self, group: Path, memory_bytes: int) -> bool:
        wanted = str(_whole_pages(memory_bytes))
        files.write(group / "memory.swap.max", "0")
        return files.write(group / "memory.max", wanted) and files.read(group / "memory.max") == wanted

    def used(self, group: Path) -> int:
        return files.number(files.read(group / "memory.current"))

    def unreclaimable(self, group: Path) -> int:
        found = files.keyed(files.read(group / "memory.stat"))
        return max(0, self.used(group) - max(0, found.get("file", 0) - found.get("shmem", 0)))

    def oom_kills(self, group: Path) -> int:
        return files.keyed(files.read(group / "memory.events")).get("oom_kill", 0)


class StopV1:
    """The freezer. A frozen process acts on SIGKILL once it is thawed, before any other instruction of its own."""

    name = "v1"
    file = "freezer.state"

    def __init__(self, root: Path) -> None:
        self.root = root

    def order(self, group: Path, frozen: bool) -> bool:
        return files.write(group / self.file, "FROZEN" if frozen else "THAWED")

    def is_frozen(self, group: Path) -> bool:
        return files.read(group / self.file) == "FROZEN"

    def kill(self, group: Path) -> None:
        # A frozen group does not fork, so each process has its signal before any goes on. A group that was not frozen
        # in time may have forked between the look and the signals: repeat until it is empty.
        for _ in range(_SWEEPS):
            self.order(group, frozen=True)
            files.wait_until(lambda: self.is_frozen(group), _SWEEP_S)
            files.signal_all(files.pids_in(group), signal.SIGKILL)
            self.order(group, frozen=False)
            if files.wait_until(lambda: not files.pids_in(group), _SWEEP_S):
                return


class StopV2:
    """cgroup.freeze and, since 5.14, cgroup.kill, which reaches frozen processes too."""

    name = "v2"
    file = "cgroup.freeze"

    def __init__(self, root: Path) -> None:
        self.root = root

    def order(self, group: Path, frozen: bool) -> bool:
        return files.write(group / self.file, "1" if frozen else "0")

    def is_frozen(self, group: Path) -> bool:
        return files.keyed(files.read(group / "cgroup.events")).get("frozen", 0) == 1

    def kill(self, group: Path) -> None:
        if not files.write(group / "cgroup.kill", "1"):
            files.signal_all(files.pids_in(group), signal.SIGKILL)


class UsageV1:
    name = "v1"

    def __init__(self, root: Path) -> None:
        self.root = root

    def cpu_s(self, group: Path) -> float:
        return files.number(files.read(group / "cpuacct.usage")) / 1e9


class UsageV2:
    name = "v2"

    def __init__(self, root: Path) -> None:
        self.root = root

    def cpu_s(self, group: Path) -> float:
        return files.keyed(files.read(group / "cpu.stat")).get("usage_usec", 0) / 1e6


class QuotaV1:
    name = "v1"

    def __init__(self, root: Path) -> None:
        self.root = root

    def set_quota(self, group: Path, cores: float) -> bool:
        wanted = round(cores * QUOTA_PERIOD_US)
        files.write(group / "cpu.cfs_period_us", str(QUOTA_PERIOD_US))
        quota = group / "cpu.cfs_quota_us"
        return files.write(quota, str(wanted)) and files.number(files.read(quota)) == wanted


class QuotaV2:
    name = "v2"

    def __init__(self, root: Path) -> None:
        self.root = root

    def set_quota(self, group: Path, cores: float) -> bool:
        wanted = f"{round(cores * QUOTA_PERIOD_US)} {QUOTA_PERIOD_US}"
        return files.write(group / "cpu.max", wanted) and files.read(group / "cpu.max") == wanted


def _forget_masks(group: Path, before: set[int], effective: Collection[int]) -> None:
    """A thread that was pinned by its own program keeps to its mask after the group grows (kernel >= 6.2), so each is
    told that it may run anywhere; the group still bounds it."""
    if set(effective) - before:
        files.set_affinity(files.pids_in(group), files.ALL_CPUS)


def _ids(path: Path) -> tuple[int, ...]:
    try:
        return parse_ids(files.read(path))
    except ValueError:
        return ()


def _whole_pages(memory_bytes: int) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    return max(page, memory_bytes // page * page)
