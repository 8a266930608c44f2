"""Controllers on the files below a cgroup mount: CPUs, memory, freezing and killing, usage, quotas. v1 has one tree per
controller, v2 one tree for all."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ganger.injob.process_identity import FREEZE_WORDS

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


def ids_in(path: Path) -> tuple[int, ...]:
    try:
        return parse_ids(read(path))
    except ValueError:
        return ()


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


def groups_of(pid: int) -> list[Path]:
    """Return the directories of the control groups that a process is in, one in each tree of the kernel's."""
    trees: dict[str, Path] = {}
    for line in read(Path("/proc/self/mounts")).splitlines():
        _, place, kind, options, *_ = line.split(" ")
        if kind == "cgroup":
            trees |= dict.fromkeys(options.split(","), Path(place))
        elif kind == "cgroup2":
            trees[""] = Path(place)
    found: dict[Path, None] = {}
    for line in read(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        tree = trees.get(names.split(",")[0])
        if tree is not None and (group := tree / path.lstrip("/")).is_dir():
            found[group] = None
    return list(found)


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


def set_affinity(pids: Iterable[int], cpus: Collection[int]) -> bool:
    """Pin all threads of the processes to `cpus`. Return True if at least one was pinned, or there is none."""
    threads: list[int] = []
    for pid in pids:
        try:
            threads += map(int, os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue
    taken = 0
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cpus)
            taken += 1
        except (OSError, ValueError):
            continue
    return taken > 0 or not threads


QUOTA_PERIOD_US = 10_000
"""Of a CPU quota: far below a mini-batch, so that a quota looks like a slower processor and not like pauses."""
SMALLEST_QUOTA_CORES = 0.1
"""The kernel takes no quota below 1 ms."""
TRIAL_BYTES = 64 * 2**20
_SWEEPS = 3
_SWEEP_S = 0.1


@dataclass(frozen=True, slots=True)
class CgroupController(ABC):
    """One controller of a v1 tree, or of the v2 tree. `root`: the directory below which groups are."""

    root: Path
    is_v2: bool

    @property
    def name(self) -> str:
        return "v2" if self.is_v2 else "v1"

    @abstractmethod
    def works(self, scratch: Path) -> bool:
        """Return whether what is written for a group without processes reads back."""


class Cpus(CgroupController):
    def enter(self, group: Path) -> None:
        """Let processes join a new group. In v1 it is empty and takes none: memory nodes first, then CPUs."""
        if self.is_v2:
            return
        if not read(group.parent / "cpuset.cpus") and (group.parent.parent / "cpuset.cpus").exists():
            self.enter(group.parent)
        for name in ("cpuset.mems", "cpuset.cpus"):
            if not read(group / name):
                write(group / name, read(group.parent / name))

    def set_cpus(self, group: Path, cpus: Collection[int]) -> tuple[int, ...]:
        self.enter(group)
        before = self._effective(group)
        if not write(group / "cpuset.cpus", format_ids(cpus)):
            return ()
        effective = self._effective(group) or ids_in(group / "cpuset.cpus")
        if set(effective) - set(before):
            # On kernels >= 6.2, a thread that its program pinned would keep its mask in a group that has grown.
            set_affinity(pids_in(group), ALL_CPUS)
        # The v2 kernel falls back to the parent's CPUs when none of ours is there: that is not pinned.
        return effective if set(effective) <= set(cpus) else ()

    def _effective(self, group: Path) -> tuple[int, ...]:
        return ids_in(group / ("cpuset.cpus.effective" if self.is_v2 else "cpuset.effective_cpus"))

    def works(self, scratch: Path) -> bool:
        self.enter(scratch)
        cpus = self._effective(self.root) or tuple(os.sched_getaffinity(0))
        return self.set_cpus(scratch, cpus[-1:]) == cpus[-1:]


class MemoryUse(NamedTuple):
    """Memory of a group in bytes. `working_set`: what is in use, without file caches that were read once; `refaulted`:
    of files, what the kernel has read again so far after it had dropped it for want of memory; None: not counted.
    `used`: all of it; `least`: all but file caches that no process has mapped; zero where `hold_caches` cannot hold
    these back."""

    working_set: int
    refaulted: int | None
    used: int = 0
    least: int = 0


class MemoryController(CgroupController):
    def set_limit(self, group: Path, memory_bytes: int) -> bool:
        page = os.sysconf("SC_PAGE_SIZE")
        wanted = max(page, memory_bytes // page * page)
        if self.is_v2:
            write(group / "memory.swap.max", "0")
            return write(group / "memory.max", str(wanted)) and number(read(group / "memory.max"), -1) == wanted
        # With swap accounting, the limit of both must not be below that of memory: lift it before, lower it after.
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists() and number(read(swap)) < wanted:
            write(swap, str(wanted))
        is_set = write(group / "memory.limit_in_bytes", str(wanted))
        if swap.exists():
            write(swap, str(wanted))
        return is_set and number(read(group / "memory.limit_in_bytes"), -1) == wanted

    def hold_caches(self, group: Path, memory_bytes: int) -> bool:
        """Hold as in `Cgroups.hold_caches`."""
        if not self.is_v2:
            # v1 reclaims only at the limit. There a process that needs more is killed or, without the kernel's killer,
            # blocked until the limit is raised: for good, if the daemon was killed.
            return not memory_bytes
        page = os.sysconf("SC_PAGE_SIZE")
        return write(group / "memory.high", str(max(page, memory_bytes // page * page)) if memory_bytes else "max")

    def unreclaimable(self, group: Path) -> int:
        """Bytes as in `Cgroups.unreclaimable_bytes`."""
        return max(0, self._usage(group) - max(0, self._caches(keyed(read(group / "memory.stat")))))

    def use(self, group: Path) -> MemoryUse:
        """Use as in `Cgroups.memory_use`."""
        usage = self._usage(group)
        found, prefix = keyed(read(group / "memory.stat")), "" if self.is_v2 else "total_"
        # Older kernels count pages of files only, under the shorter name.
        names = (f"{prefix}workingset_refault_file", f"{prefix}workingset_refault")
        refaults = next((found[name] for name in names if name in found), None)
        can_hold = self.is_v2 and (group / "memory.high").exists()
        return MemoryUse(
            max(0, usage - found.get(f"{prefix}inactive_file", 0)),
            None if refaults is None else refaults * os.sysconf("SC_PAGE_SIZE"),
            usage,
            # What is mapped, as libraries are, is in use at every moment.
            max(0, usage - max(0, self._caches(found) - found.get("file_mapped", 0))) if can_hold else 0,
        )

    def _usage(self, group: Path) -> int:
        return number(read(group / ("memory.current" if self.is_v2 else "memory.usage_in_bytes")))

    def _caches(self, stat: Mapping[str, int]) -> int:
        """Return the bytes of caches of files on disk."""
        cache, shared = ("file", "shmem") if self.is_v2 else ("total_cache", "total_shmem")
        return stat.get(cache, 0) - stat.get(shared, 0)

    def oom_kills(self, group: Path) -> int:
        return keyed(read(group / ("memory.events" if self.is_v2 else "memory.oom_control"))).get("oom_kill", 0)

    def works(self, scratch: Path) -> bool:
        return self.set_limit(scratch, TRIAL_BYTES)


class FreezeController(CgroupController):
    """Freezing and killing: by v1's freezer, or by cgroup.freeze and, since 5.14, cgroup.kill."""

    @property
    def file(self) -> str:
        """Name of the file in a group that is written to freeze it."""
        return "cgroup.freeze" if self.is_v2 else "freezer.state"

    def order(self, group: Path, frozen: bool) -> bool:
        return write(group / self.file, FREEZE_WORDS[self.file][0 if frozen else 1])

    def is_frozen(self, group: Path) -> bool:
        if self.is_v2:
            return keyed(read(group / "cgroup.events")).get("frozen", 0) == 1
        return read(group / self.file) == "FROZEN"

    def kill(self, group: Path) -> None:
        if self.is_v2:
            # Reaches frozen processes, too
            if not write(group / "cgroup.kill", "1"):
                signal_all(pids_in(group), signal.SIGKILL)
            return
        # A frozen process acts on SIGKILL once it is thawed, before any other of its instructions. A frozen group does
        # not fork, so each process has its signal before any continues. A group that was not frozen in time may have
        # forked between the look and the signals: repeat until it is empty.
        for _ in range(_SWEEPS):
            self.order(group, frozen=True)
            wait_until(lambda: self.is_frozen(group), _SWEEP_S)
            signal_all(pids_in(group), signal.SIGKILL)
            self.order(group, frozen=False)
            if wait_until(lambda: not pids_in(group), _SWEEP_S):
                return

    def works(self, scratch: Path) -> bool:
        if not self.order(scratch, True):
            return False
        stopped = wait_until(lambda: self.is_frozen(scratch), 1.0)
        return self.order(scratch, False) and stopped


class Processes(CgroupController):
    def set_limit(self, group: Path, most: int) -> bool:
        """Limit the processes and threads of a group."""
        return write(group / "pids.max", str(most)) and read(group / "pids.max") == str(most)

    def works(self, scratch: Path) -> bool:
        return self.set_limit(scratch, 100)


# -- v2 has no controller of device files: the kernel asks a BPF program of the group before any of its processes opens
# one. The program stays with the group until that is removed.

# Number of the bpf system call, by machine.
_SYS_BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH = 5, 8
_TYPE_CGROUP_DEVICE, _ATTACH_CGROUP_DEVICE = 15, 6
# The group has one program, which the next one replaces; those of groups above it count as well.
_ONE = 0
# Fields of struct bpf_cgroup_dev_ctx, which register 1 points to.
_MAJOR, _MINOR = 4, 8
_LOAD_WORD, _JUMP_NOT_EQUAL, _SET, _EXIT = 0x61, 0x55, 0xB7, 0x95
_DENIED, _ALLOWED = 0, 1


def _filter(denied: Sequence[tuple[int, int]]) -> bytes:
    """Return the instructions of a filter that denies these devices, by major and minor number, and allows others."""
    code = [_instruction(_LOAD_WORD, 2, 1, _MAJOR), _instruction(_LOAD_WORD, 3, 1, _MINOR)]
    for major, minor in denied:
        code += [
            _instruction(_JUMP_NOT_EQUAL, 2, offset=3, value=major),
            _instruction(_JUMP_NOT_EQUAL, 3, offset=2, value=minor),
            _instruction(_SET, 0, value=_DENIED),
            _instruction(_EXIT),
        ]
    return b"".join([*code, _instruction(_SET, 0, value=_ALLOWED), _instruction(_EXIT)])


def _instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", code, source << 4 | target, offset, value)


def _attach(group: Path, denied: Sequence[tuple[int, int]]) -> None:
    """Deny devices to all processes that are in a group or below it, for as long as it exists. Raises OSError."""
    code, licence = ctypes.create_string_buffer(_filter(denied)), ctypes.create_string_buffer(b"GPL")
    count = len(_filter(denied)) // 8
    load = struct.pack("<IIQQ", _TYPE_CGROUP_DEVICE, count, ctypes.addressof(code), ctypes.addressof(licence))
    loaded = _bpf(_PROG_LOAD, load.ljust(128, b"\0"))
    try:
        directory = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _bpf(_PROG_ATTACH, struct.pack("<IIII", directory, loaded, _ATTACH_CGROUP_DEVICE, _ONE))
        finally:
            os.close(directory)
    finally:
        os.close(loaded)


def _bpf(command: int, attributes: bytes) -> int:
    if platform.machine() not in _SYS_BPF:
        raise OSError(f"no BPF on {platform.machine()}")
    libc, held = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(attributes, len(attributes))
    call = ctypes.c_long(_SYS_BPF[platform.machine()])
    done = libc.syscall(call, ctypes.c_long(command), held, ctypes.c_ulong(len(attributes)))
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel takes no filter of devices: {os.strerror(number)}")
    return int(done)


class DeviceFence(CgroupController):
    """Device files that a group may not open: by v1's devices controller, or by a BPF program on a group of v2."""

    def deny(self, group: Path, numbers: Collection[tuple[int, int]]) -> bool:
        """Deny character devices, by major and minor number, to a group: the same ones, if it is called again."""
        if not numbers:
            return True
        if self.is_v2:
            try:
                _attach(group, sorted(numbers))
            except OSError:
                return False
            return True
        return all(write(group / "devices.deny", f"c {major}:{minor} rwm") for major, minor in sorted(numbers))

    def works(self, scratch: Path) -> bool:
        # a number that no driver has
        return self.deny(scratch, [(4095, 0)])


class Usage(CgroupController):
    def cpu_s(self, group: Path) -> float:
        if self.is_v2:
            return keyed(read(group / "cpu.stat")).get("usage_usec", 0) / 1e6
        return number(read(group / "cpuacct.usage")) / 1e9

    def works(self, scratch: Path) -> bool:
        return (scratch / ("cpu.stat" if self.is_v2 else "cpuacct.usage")).exists()


class Quota(CgroupController):
    def set_quota(self, group: Path, cores: float) -> bool:
        """Limit the CPU time of all that is in the group or below it; zero cores: to none."""
        wanted = round(cores * QUOTA_PERIOD_US)
        if self.is_v2:
            text = f"{wanted or 'max'} {QUOTA_PERIOD_US}"
            return write(group / "cpu.max", text) and read(group / "cpu.max") == text
        write(group / "cpu.cfs_period_us", str(QUOTA_PERIOD_US))
        quota = group / "cpu.cfs_quota_us"
        return write(quota, str(wanted or -1)) and number(read(quota)) == (wanted or -1)

    def works(self, scratch: Path) -> bool:
        return self.set_quota(scratch, SMALLEST_QUOTA_CORES)
