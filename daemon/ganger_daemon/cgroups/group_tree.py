"""Groups made of controllers from v1 trees, the v2 tree, or both (hybrid). Signals and affinity replace an unavailable
controller, or it is reported as missing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ganger_daemon.cgroups import files
from ganger_daemon.cgroups.contract import Variant, checked
from ganger_daemon.cgroups.controllers import Cpus, CpusV1, FreezeController, MemoryController, Quota, Usage


@dataclass(frozen=True, slots=True)
class Parts:
    """Controllers that a node offers; `missing`: the reason for each that is None."""

    cpus: Cpus | None
    memory: MemoryController | None
    stop: FreezeController | None
    usage: Usage | None
    quota: Quota | None
    missing: Mapping[str, str]

    @property
    def variant(self) -> Variant:
        names = {part.name for part in (self.cpus, self.memory, self.stop, self.usage, self.quota) if part is not None}
        return Variant.HYBRID if len(names) > 1 else Variant(names.pop()) if names else Variant.NONE

    def roots(self) -> tuple[Path, ...]:
        """Every directory groups are made under, each once, the cpuset first: a process that could not be pinned there
        would otherwise have joined the rest."""
        parts = (self.cpus, self.memory, self.usage, self.quota, self.stop)
        return tuple(dict.fromkeys(part.root for part in parts if part is not None))


# Pools lie beside groups, under a name that no group has: groups begin with the id of a job.
_POOL = "pool-"


class GroupTree:
    """Variants v1, v2 and hybrid. `depth`: how many directories of each root are ours to remove."""

    def __init__(self, parts: Parts, depth: int = 1) -> None:
        self._parts = parts
        self._roots = parts.roots()
        self._depth = depth

    @property
    def variant(self) -> Variant:
        return self._parts.variant

    @property
    def capabilities(self) -> Mapping[str, str]:
        parts, missing = self._parts, self._parts.missing
        return {
            "cgroup": self.variant.value,
            "cpuset": parts.cpus.name if parts.cpus else f"affinity: {missing.get('cpuset', '')}",
            "memory": parts.memory.name if parts.memory else f"none: {missing.get('memory', '')}",
            "freeze": parts.stop.name if parts.stop else f"signals: {missing.get('freeze', '')}",
            "kill": parts.stop.name if parts.stop else f"signals: {missing.get('freeze', '')}",
            "cpu_usage": parts.usage.name if parts.usage else f"none: {missing.get('cpu_usage', '')}",
            "cpu_quota": parts.quota.name if parts.quota else f"none: {missing.get('cpu_quota', 'not asked for')}",
        }

    def make_pool(self, pool: str, cores: float) -> bool:
        name = _POOL + checked(pool)
        quota = self._parts.quota
        if quota is None:
            return False
        for root in self._roots:
            (root / name).mkdir(parents=True, exist_ok=True)
            # of v2: what the root hands down to it, it hands on
            for controller in files.read(root / "cgroup.subtree_control").split():
                files.write(root / name / "cgroup.subtree_control", f"+{controller}")
        return quota.set_quota(quota.root / name, cores)

    def create(self, group: str, pool: str = "") -> None:
        for root in self._roots:
            root.mkdir(parents=True, exist_ok=True)
            directory = self._at(root, group)
            if pool and not directory.is_dir():
                directory = root / (_POOL + checked(pool)) / group
            directory.mkdir(exist_ok=True)
        if isinstance(self._parts.cpus, CpusV1):
            self._parts.cpus.prepare()
            self._parts.cpus.enter(self._at(self._parts.cpus.root, group))

    def join_files(self, group: str) -> tuple[str, ...]:
        return tuple(str(self._at(root, group) / "cgroup.procs") for root in self._roots)

    def freezer_file(self, group: str) -> str:
        part = self._parts.stop
        return "" if part is None else str(self._at(part.root, group) / part.file)

    def hasten(self) -> None:
        # The kernel lets a process join only when no other forks or ends, and to be sure of that it waits for a grace
        # period of all CPUs, unless it has just done so. This asks for what is already so, and moves nothing.
        own = files.own_group(self._roots[0]) if self._roots else None
        if own is not None:
            files.write(own / "cgroup.procs", str(os.getpid()))

    def set_cpus(self, group: str, cpus: Collection[int]) -> tuple[int, ...]:
        if not cpus:
            return ()
        part = self._parts.cpus
        if part is not None:
            return part.set_cpus(self._at(part.root, group), cpus)
        return tuple(sorted(cpus)) if files.set_affinity(self.pids(group), cpus) else ()

    def set_memory_limit(self, group: str, memory_bytes: int) -> bool:
        part = self._parts.memory
        return part is not None and part.set_limit(self._at(part.root, group), memory_bytes)

    def track(self, group: str, pid: int) -> None:
        """Do nothing: the kernel lists the processes of a group."""

    def pids(self, group: str) -> tuple[int, ...]:
        found: set[int] = set()
        for root in self._roots:
            found.update(files.pids_in(self._at(root, group)))
        return tuple(sorted(found))

    def freeze(self, group: str, timeout_s: float = 5.0) -> bool:
        return self._order(group, True, timeout_s)

    def thaw(self, group: str, timeout_s: float = 5.0) -> bool:
        return self._order(group, False, timeout_s)

    def frozen(self, group: str) -> bool:
        part = self._parts.stop
        if part is not None:
            return part.is_frozen(self._at(part.root, group))
        pids = self.pids(group)
        return bool(pids) and all(_stands_still(pid) for pid in pids)

    def kill(self, group: str) -> None:
        part = self._parts.stop
        if part is not None:
            part.kill(self._at(part.root, group))
        # processes that only another tree of the group lists, or where no tree can kill
        files.signal_all(self.pids(group), signal.SIGKILL)

    def oom_kills(self, group: str) -> int:
        part = self._parts.memory
        return part.oom_kills(self._at(part.root, group)) if part else 0

    def cpu_s(self, group: str) -> float:
        part = self._parts.usage
        return part.cpu_s(self._at(part.root, group)) if part else 0.0

    def memory_bytes(self, group: str) -> int:
        part = self._parts.memory
        return part.used(self._at(part.root, group)) if part else 0

    def unreclaimable_bytes(self, group: str) -> int:
        part = self._parts.memory
        return part.unreclaimable(self._at(part.root, group)) if part else 0

    def destroy(self, group: str, timeout_s: float = 5.0) -> bool:
        left = [self._at(root, group) for root in self._roots]
        deadline = time.monotonic() + timeout_s
        while True:
            left = [directory for directory in left if not files.remove(directory)]
            if not left:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(files.STEP_S)

    def groups(self) -> tuple[str, ...]:
        found: set[str] = set()
        for root in self._roots:
            names = files.subdirectories(root)
            pools = {name for name in names if name.startswith(_POOL)}
            found |= (names - pools).union(*(files.subdirectories(root / pool) for pool in pools))
        return tuple(sorted(found))

    def tidy(self) -> None:
        pools = [pool for root in self._roots for pool in root.glob(f"{_POOL}*")]
        remove_roots(pools, 1)
        remove_roots(self._roots, self._depth)

    def _at(self, root: Path, group: str) -> Path:
        """Where a group lies: beside the pools, or in one."""
        directory = root / checked(group)
        return directory if directory.is_dir() else next(root.glob(f"{_POOL}*/{group}"), directory)

    def _order(self, group: str, frozen: bool, timeout_s: float) -> bool:
        part = self._parts.stop
        if part is None:
            files.signal_all(self.pids(group), signal.SIGSTOP if frozen else signal.SIGCONT)
            return files.wait_until(lambda: self.frozen(group) == frozen, timeout_s)
        directory = self._at(part.root, group)
        part.order(directory, frozen)
        # v1 may need to be told again: a process that was forking is missed the first time
        return files.wait_until(
            lambda: part.is_frozen(directory) == frozen, timeout_s, lambda: part.order(directory, frozen)
        )


def remove_roots(roots: Iterable[Path], depth: int) -> None:
    """Remove each root, and of its parents those that are ours, as far as they are empty."""
    for root in roots:
        for directory in [root, *root.parents][:depth]:
            try:
                if not files.remove(directory):
                    break
            except OSError:
                break


def _stands_still(pid: int) -> bool:
    status = files.read(Path(f"/proc/{pid}/stat"))
    return status.rpartition(")")[2].split()[:1] in (["T"], ["Z"], [])
