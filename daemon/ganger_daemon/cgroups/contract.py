"""Control groups, whatever the kernel of the node offers. One group holds the ranks of one gang; several may share a
pool, which limits their common CPU time. All calls may be repeated. A job never fails because pinning, a limit or
freezing is unavailable: `capabilities` names what is missing, and calls return whether they took effect."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ganger.injob.process_identity import stands_still, stat_fields

from ganger_daemon.cgroups import controllers


class Variant(Enum):
    V1 = "v1"
    V2 = "v2"
    HYBRID = "hybrid"
    NONE = "none"


GROUP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
NICENESS = 5
"""Without cpu shares this keeps the daemon and its host answering."""
SWEEPS = 3
"""A thread made during a sweep may have the old mask; the next sweep finds it."""


def checked(group: str) -> str:
    """A group name becomes part of a path, so nothing else passes."""
    if not GROUP_NAME.fullmatch(group):
        raise ValueError(f"{group!r} is no group name; use letters, digits, '.', '_' and '-'")
    return group


@dataclass(slots=True)
class _Group:
    tracked: dict[int, int] = field(default_factory=dict)  # pid -> start time in ticks
    cpus: tuple[int, ...] = ()


class Cgroups:
    """Groups of a node without control groups: signals, affinity masks and niceness replace them.

    The processes of a group are those the daemon tracks, all in their sessions, and all their descendants. New threads
    inherit the mask of the thread that makes them."""

    def __init__(self, reason: str = "not asked for") -> None:
        self._reason = reason
        self._groups: dict[str, _Group] = {}

    @property
    def variant(self) -> Variant:
        return Variant.NONE

    @property
    def capabilities(self) -> Mapping[str, str]:
        """`cgroup`: the variant. `cpuset`, `memory`, `freeze`, `kill`, `cpu_usage`, `cpu_quota`, `process_limit`,
        `device_fence`: how it is done here, or "none: why"."""
        none = f"none: {self._reason}"
        lacking = dict.fromkeys(("cgroup", "memory", "cpu_quota", "process_limit", "device_fence"), none)
        by_signals = {"cpuset": "affinity", "freeze": "signals", "kill": "signals", "cpu_usage": "processes"}
        return lacking | by_signals

    def make_pool(self, pool: str, cores: float) -> bool:
        """Limit the groups of a pool to this many cores together. Return False if that is unavailable."""
        checked(pool)
        return False

    def create(self, group: str, pool: str = "") -> None:
        """Make a group. Raises OSError only if nothing at all can be made."""
        self._groups.setdefault(checked(group), _Group())

    def join_files(self, group: str) -> tuple[str, ...]:
        """Files a forked child writes "0" into, in this order and before it runs the user's command, to enter."""
        return ()

    def freezer_file(self, group: str) -> str:
        """Return the kernel's file that freezes the group (`cgroup.freeze`, `freezer.state`); "" if signals must."""
        return ""

    def hasten(self) -> None:
        """Prepare the kernel for a process that is about to join a group. Blocks for some 10 ms, which the process
        would wait otherwise: call it beside other work."""

    def set_cpus(self, group: str, cpus: Collection[int]) -> tuple[int, ...]:
        """Pin a running group. Return the CPUs it now runs on, or () when it could not be pinned."""
        wanted = tuple(sorted(set(cpus) & set(range(os.cpu_count() or 1))))
        known = self._groups.get(checked(group))
        if known is None or not wanted:
            return ()
        known.cpus = wanted
        taken = [controllers.set_affinity(self.pids(group), wanted) for _ in range(SWEEPS)]
        return wanted if all(taken) else ()

    def set_quota(self, group: str, cpus: float) -> bool:
        """Limit the CPU time of a group to that of so many CPUs, a tenth of one at least; zero: no limit. Return False
        if that is not enforced here."""
        return False

    def set_memory_limit(self, group: str, memory_bytes: int) -> bool:
        """Limit the memory of a group. Return False when the limit is not enforced."""
        return False

    def hold_caches(self, group: str, memory_bytes: int) -> bool:
        """Let the kernel reclaim file caches of a group so that it uses no more than `memory_bytes`; zero: no longer.
        No process is killed or blocked for it: one that needs more is slowed down. Return False where it failed, or is
        not possible."""
        return not memory_bytes

    def set_process_limit(self, group: str, most: int) -> bool:
        """Limit the processes and threads of a group. Return False where the limit is not enforced."""
        return False

    def deny_devices(self, group: str, numbers: Collection[tuple[int, int]]) -> bool:
        """Let no process of a group open these character devices (major, minor). Return whether that is enforced."""
        return False

    def track(self, group: str, pid: int) -> None:
        """Record that a process and its session belong to the group."""
        self.create(group)
        fields = stat_fields(pid)
        if not fields:
            return
        known = self._groups[group]
        known.tracked[pid] = int(fields[19])
        try:
            os.setpriority(os.PRIO_PROCESS, pid, max(NICENESS, os.getpriority(os.PRIO_PROCESS, pid)))
        except OSError:
            pass
        if known.cpus:
            controllers.set_affinity((pid,), known.cpus)

    def pids(self, group: str) -> tuple[int, ...]:
        known = self._groups.get(checked(group))
        if known is None or not known.tracked:
            return ()
        processes = _processes()
        own = os.getsid(0)
        # A pid is the tracked process only with its start time.
        members = {pid for pid, start in known.tracked.items() if pid in processes and processes[pid].start == start}
        sessions = {pid for pid in known.tracked if pid != own and (pid in members or pid not in processes)}
        grew = True
        while grew:
            found = {
                pid
                for pid, process in processes.items()
                if process.parent in members
                or (process.session in sessions and process.start >= known.tracked[process.session])
            }
            grew = not found <= members
            members |= found
        return tuple(sorted(pid for pid in members if not processes[pid].dead))

    def freeze(self, group: str, timeout_s: float = 5.0) -> bool:
        """Freeze the group. Return True once every process is frozen."""

        def stop() -> None:
            controllers.signal_all(self.pids(group), signal.SIGSTOP)

        stop()
        # Again: the first signals miss the child of a process that is forking.
        return controllers.wait_until(lambda: self.frozen(group), timeout_s, stop)

    def thaw(self, group: str, timeout_s: float = 5.0) -> bool:
        controllers.signal_all(self.pids(group), signal.SIGCONT)
        return controllers.wait_until(
            lambda: not any(stat_fields(pid)[:1] == [b"T"] for pid in self.pids(group)), timeout_s
        )

    def frozen(self, group: str) -> bool:
        pids = self.pids(group)
        return bool(pids) and all(map(stands_still, pids))

    def kill(self, group: str) -> None:
        """Send SIGKILL to all processes of the group, frozen or not."""
        # Stopped first: no process forks between the listing and the signal.
        controllers.signal_all(self.pids(group), signal.SIGSTOP)
        for _ in range(SWEEPS):
            pids = self.pids(group)
            if not pids:
                return
            controllers.signal_all(pids, signal.SIGKILL)

    def oom_kills(self, group: str) -> int:
        """Return the number of processes that the kernel killed for the memory limit."""
        return 0

    def cpu_s(self, group: str) -> float:
        found = map(stat_fields, self.pids(group))
        return sum(int(fields[11]) + int(fields[12]) for fields in found if fields) / os.sysconf("SC_CLK_TCK")

    def unreclaimable_bytes(self, group: str) -> int:
        """Return its memory in bytes without file caches, which the kernel reclaims under pressure; zero if unknown."""
        found = map(stat_fields, self.pids(group))
        return sum(int(fields[21]) for fields in found if fields) * os.sysconf("SC_PAGE_SIZE")

    def memory_use(self, group: str) -> controllers.MemoryUse | None:
        """Return the memory that its processes use; None where no control group measures it."""
        return None

    def destroy(self, group: str, timeout_s: float = 5.0) -> bool:
        """Remove a group. Return False if it still has processes after `timeout_s`; True also for a missing group."""
        if not controllers.wait_until(lambda: not self.pids(group), timeout_s):
            return False
        self._groups.pop(group, None)
        return True

    def groups(self) -> tuple[str, ...]:
        """Return the names of all groups that exist, for adoption and for the janitor."""
        return tuple(sorted(self._groups))

    def tidy(self) -> None:
        """Remove the root of all groups if no group is left. The object stays usable."""


def is_done(cgroups: Cgroups, capability: str) -> bool:
    """Return whether the kernel provides a capability; false where signals replace it or nothing does."""
    return cgroups.capabilities[capability] in ("v1", "v2")


class _Process(NamedTuple):
    parent: int
    session: int
    start: int
    dead: bool


def _processes() -> dict[int, _Process]:
    found: dict[int, _Process] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat_fields(int(name))):
            found[int(name)] = _Process(int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in (b"Z", b"X"))
    return found
