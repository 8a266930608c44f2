"""Controllers of v1 and v2: CPUs, memory, freezing and killing, usage, quotas, on the files below a cgroup mount.

A variant is a choice of controllers; it makes and removes the directories that a controller works on. v1 has one tree
per controller, v2 one tree for all.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from ganger_daemon.node.core_table import format_ids, parse_ids

STEP_S = 0.002
ALL_CPUS = range(8192)
"""An affinity mask of all ones: the kernel cuts it to what the group allows, now and after later changes."""


def read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def write(path: Path, text: str) -> bool:
    """One write call, as the kernel wants it. False when it is refused."""
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(descriptor, text.encode())
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def number(text: str, otherwise: int = 0) -> int:
    try:
        return int(text)
    except ValueError:
        return otherwise


def keyed(text: str) -> Mapping[str, int]:
    """ "oom_kill 1" lines, as a mapping."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        found[name] = number(value)
    return found


def pids_in(directory: Path) -> tuple[int, ...]:
    return tuple(sorted({number(line) for line in read(directory / "cgroup.procs").splitlines()} - {0}))


def own_group(root: Path) -> Path | None:
    """The group this process is in, in the tree that `root` lies in; None where that is no tree of the kernel's."""
    mount = root
    while not mount.is_mount():
        mount = mount.parent
    # "5:cpuset:/path" of a v1 tree, "0::/path" of the v2 tree
    for line in read(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        is_its = bool(set(names.split(",")) & set(mount.name.split(","))) if names else mount.name in _V2_NAMES
        # A namespace that is not this process's own shows its group from outside.
        if is_its and ".." not in path and (own := mount / path.lstrip("/")).is_dir():
            return own
    return None


# Where the v2 tree is mounted: alone, and beside v1 trees.
_V2_NAMES = ("cgroup", "unified")


def subdirectories(directory: Path) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)}
    except OSError:
        return set()


def wait_until(holds: Callable[[], bool], timeout_s: float, again: Callable[[], object] | None = None) -> bool:
    """Return whether a condition became true in time. `again` runs before each further check."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(STEP_S)
        if again is not None:
            again()
    return True


def remove(directory: Path) -> bool:
    """A group is busy until the kernel has let go of its last process. True when it is gone."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def signal_all(pids: Iterable[int], number_: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number_)
        except (ProcessLookupError, PermissionError):
            continue


def threads_of(pids: Iterable[int]) -> list[int]:
    found: list[int] = []
    for pid in pids:
        try:
            found.extend(int(name) for name in os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue
    return found


def set_affinity(pids: Iterable[int], cpus: Collection[int]) -> bool:
    """Pin all threads of the processes to `cpus`. Return True if at least one was pinned, or there is none."""
    threads = threads_of(pids)
    taken = 0
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cpus)
            taken += 1
        except (OSError, ValueError):
            continue
    return taken > 0 or not threads


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
        """Limit the CPU time of all that is in the group or below it; zero cores: to none."""


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
        if not write(group / "cpuset.cpus", format_ids(cpus)):
            return ()
        effective = _ids(group / "cpuset.effective_cpus") or _ids(group / "cpuset.cpus")
        _forget_masks(group, before, effective)
        return effective

    def _inherit(self, group: Path) -> None:
        if not read(group.parent / "cpuset.cpus") and (group.parent.parent / "cpuset.cpus").exists():
            self._inherit(group.parent)
        for name in ("cpuset.mems", "cpuset.cpus"):
            if not read(group / name):
                write(group / name, read(group.parent / name))


class CpusV2:
    name = "v2"

    def __init__(self, root: Path) -> None:
        self.root = root

    def set_cpus(self, group: Path, cpus: Collection[int]) -> tuple[int, ...]:
        before = set(_ids(group / "cpuset.cpus.effective"))
        if not write(group / "cpuset.cpus", format_ids(cpus)):
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
        if swap.exists() and number(read(swap)) < wanted:
            write(swap, str(wanted))
        set_ = write(group / "memory.limit_in_bytes", str(wanted))
        if swap.exists():
            write(swap, str(wanted))
        return set_ and number(read(group / "memory.limit_in_bytes"), -1) == wanted

    def used(self, group: Path) -> int:
        return number(read(group / "memory.usage_in_bytes"))

    def unreclaimable(self, group: Path) -> int:
        found = keyed(read(group / "memory.stat"))
        return max(0, self.used(group) - max(0, found.get("total_cache", 0) - found.get("total_shmem", 0)))

    def oom_kills(self, group: Path) -> int:
        return keyed(read(group / "memory.oom_control")).get("oom_kill", 0)


class MemoryV2:
    name = "v2"

    def __init__(self, root: Path) -> None:
        self.root = root

    def set_limit(self, group: Path, memory_bytes: int) -> bool:
        wanted = str(_whole_pages(memory_bytes))
        write(group / "memory.swap.max", "0")
        return write(group / "memory.max", wanted) and read(group / "memory.max") == wanted

    def used(self, group: Path) -> int:
        return number(read(group / "memory.current"))

    def unreclaimable(self, group: Path) -> int:
        found = keyed(read(group / "memory.stat"))
        return max(0, self.used(group) - max(0, found.get("file", 0) - found.get("shmem", 0)))

    def oom_kills(self, group: Path) -> int:
        return keyed(read(group / "memory.events")).get("oom_kill", 0)


class StopV1:
    """The freezer. A frozen process acts on SIGKILL once it is thawed, before any other of its instructions."""

    name = "v1"
    file = "freezer.state"

    def __init__(self, root: Path) -> None:
        self.root = root

    def order(self, group: Path, frozen: bool) -> bool:
        return write(group / self.file, "FROZEN" if frozen else "THAWED")

    def is_frozen(self, group: Path) -> bool:
        return read(group / self.file) == "FROZEN"

    def kill(self, group: Path) -> None:
        # A frozen group does not fork, so each process has its signal before any goes on. A group that was not frozen
        # in time may have forked between the look and the signals: repeat until it is empty.
        for _ in range(_SWEEPS):
            self.order(group, frozen=True)
            wait_until(lambda: self.is_frozen(group), _SWEEP_S)
            signal_all(pids_in(group), signal.SIGKILL)
            self.order(group, frozen=False)
            if wait_until(lambda: not pids_in(group), _SWEEP_S):
                return


class StopV2:
    """cgroup.freeze and, since 5.14, cgroup.kill, which reaches frozen processes too."""

    name = "v2"
    file = "cgroup.freeze"

    def __init__(self, root: Path) -> None:
        self.root = root

    def order(self, group: Path, frozen: bool) -> bool:
        return write(group / self.file, "1" if frozen else "0")

    def is_frozen(self, group: Path) -> bool:
        return keyed(read(group / "cgroup.events")).get("frozen", 0) == 1

    def kill(self, group: Path) -> None:
        if not write(group / "cgroup.kill", "1"):
            signal_all(pids_in(group), signal.SIGKILL)


class UsageV1:
    name = "v1"

    def __init__(self, root: Path) -> None:
        self.root = root

    def cpu_s(self, group: Path) -> float:
        return number(read(group / "cpuacct.usage")) / 1e9


class UsageV2:
    name = "v2"

    def __init__(self, root: Path) -> None:
        self.root = root

    def cpu_s(self, group: Path) -> float:
        return keyed(read(group / "cpu.stat")).get("usage_usec", 0) / 1e6


class QuotaV1:
    name = "v1"

    def __init__(self, root: Path) -> None:
        self.root = root

    def set_quota(self, group: Path, cores: float) -> bool:
        wanted = round(cores * QUOTA_PERIOD_US) if cores else -1
        write(group / "cpu.cfs_period_us", str(QUOTA_PERIOD_US))
        quota = group / "cpu.cfs_quota_us"
        return write(quota, str(wanted)) and number(read(quota)) == wanted


class QuotaV2:
    name = "v2"

    def __init__(self, root: Path) -> None:
        self.root = root

    def set_quota(self, group: Path, cores: float) -> bool:
        wanted = f"{round(cores * QUOTA_PERIOD_US) if cores else 'max'} {QUOTA_PERIOD_US}"
        return write(group / "cpu.max", wanted) and read(group / "cpu.max") == wanted


def _forget_masks(group: Path, before: set[int], effective: Collection[int]) -> None:
    """Let all threads run on any CPU of the group after it has grown. On kernels >= 6.2, a thread that its program
    pinned would keep its mask."""
    if set(effective) - before:
        set_affinity(pids_in(group), ALL_CPUS)


def _ids(path: Path) -> tuple[int, ...]:
    try:
        return parse_ids(read(path))
    except ValueError:
        return ()


def _whole_pages(memory_bytes: int) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    return max(page, memory_bytes // page * page)
