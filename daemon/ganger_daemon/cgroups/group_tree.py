"""Groups made of controllers from v1 trees, the v2 tree, or both, and the choice of those that this node offers.

Each part is tried on a scratch group; what cannot be written and read back is not used. Signals and affinity replace an
unavailable controller, or it is reported as missing.

Groups go under the top of a tree, or, where that is not ours to write (a delegated unit, a container), under the
daemon's own group.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from ganger.injob.process_identity import stands_still

from ganger_daemon.cgroups import controllers
from ganger_daemon.cgroups.contract import GROUP_NAME, Cgroups, NoCgroups, Variant, checked
from ganger_daemon.cgroups.controllers import (
    SMALLEST_QUOTA_CORES,
    CgroupController,
    Cpus,
    CpusV1,
    CpusV2,
    FreezeController,
    MemoryController,
    MemoryV1,
    MemoryV2,
    Quota,
    QuotaV1,
    QuotaV2,
    StopV1,
    StopV2,
    Usage,
    UsageV1,
    UsageV2,
)
from ganger_daemon.node.core_table import parse_ids


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
            for controller in controllers.read(root / "cgroup.subtree_control").split():
                controllers.write(root / name / "cgroup.subtree_control", f"+{controller}")
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
        own = controllers.own_group(self._roots[0]) if self._roots else None
        if own is not None:
            controllers.write(own / "cgroup.procs", str(os.getpid()))

    def set_cpus(self, group: str, cpus: Collection[int]) -> tuple[int, ...]:
        if not cpus:
            return ()
        part = self._parts.cpus
        if part is not None:
            return part.set_cpus(self._at(part.root, group), cpus)
        return tuple(sorted(cpus)) if controllers.set_affinity(self.pids(group), cpus) else ()

    def set_quota(self, group: str, cpus: float) -> bool:
        part = self._parts.quota
        limit = max(cpus, SMALLEST_QUOTA_CORES) if cpus else 0.0
        return part is not None and part.set_quota(self._at(part.root, group), limit)

    def set_memory_limit(self, group: str, memory_bytes: int) -> bool:
        part = self._parts.memory
        return part is not None and part.set_limit(self._at(part.root, group), memory_bytes)

    def track(self, group: str, pid: int) -> None:
        """Do nothing: the kernel lists the processes of a group."""

    def pids(self, group: str) -> tuple[int, ...]:
        found: set[int] = set()
        for root in self._roots:
            found.update(controllers.pids_in(self._at(root, group)))
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
        return bool(pids) and all(stands_still(pid) for pid in pids)

    def kill(self, group: str) -> None:
        part = self._parts.stop
        if part is not None:
            part.kill(self._at(part.root, group))
        # processes that only another tree of the group lists, or where no tree can kill
        controllers.signal_all(self.pids(group), signal.SIGKILL)

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
            left = [directory for directory in left if not controllers.remove(directory)]
            if not left:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(controllers.STEP_S)

    def groups(self) -> tuple[str, ...]:
        found: set[str] = set()
        for root in self._roots:
            names = controllers.subdirectories(root)
            pools = {name for name in names if name.startswith(_POOL)}
            found |= (names - pools).union(*(controllers.subdirectories(root / pool) for pool in pools))
        return tuple(sorted(found))

    def tidy(self) -> None:
        pools = [pool for root in self._roots for pool in root.glob(f"{_POOL}*")]
        remove_roots(pools, 1)
        remove_roots(self._roots, self._depth)

    def _at(self, root: Path, group: str) -> Path:
        """Return the directory of a group, beside the pools or in one."""
        directory = root / checked(group)
        return directory if directory.is_dir() else next(root.glob(f"{_POOL}*/{group}"), directory)

    def _order(self, group: str, frozen: bool, timeout_s: float) -> bool:
        part = self._parts.stop
        if part is None:
            controllers.signal_all(self.pids(group), signal.SIGSTOP if frozen else signal.SIGCONT)
            return controllers.wait_until(lambda: self.frozen(group) == frozen, timeout_s)
        directory = self._at(part.root, group)
        part.order(directory, frozen)
        # v1 may need a second order: the first one misses a process that is forking
        return controllers.wait_until(
            lambda: part.is_frozen(directory) == frozen, timeout_s, lambda: part.order(directory, frozen)
        )


def remove_roots(roots: Iterable[Path], depth: int) -> None:
    """Remove each root, and of its parents those that are ours, as far as they are empty."""
    for root in roots:
        for directory in [root, *root.parents][:depth]:
            try:
                if not controllers.remove(directory):
                    break
            except OSError:
                break


log = logging.getLogger(__name__)

MOUNT = Path("/sys/fs/cgroup")
CHOICES = ("auto", "v1", "v2", "none")
TRIAL_BYTES = 64 * 2**20

P = TypeVar("P", bound=CgroupController)
Makers: TypeAlias = tuple[tuple[str, Callable[[Path], P]], ...]


def choose_cgroups(
    root: str, mount: Path = MOUNT, only: str = "auto", own: Path = Path("/proc/self/cgroup"), quotas: bool = False
) -> Cgroups:
    """`root`: where groups are made, one name or several joined by "/" (daemons that share a machine need different
    ones). `only`: keep to v1, to v2, or to none. `quotas`: CPU quotas are wanted, which cost every process one more
    group to join. Raises ValueError for a root or a choice that is none; a kernel that offers nothing is no error."""
    names = root.split("/")
    if not all(GROUP_NAME.fullmatch(name) for name in names):
        raise ValueError(f"{root!r} is no cgroup root; use names of letters, digits, '.', '_' and '-', joined by '/'")
    if only not in CHOICES:
        raise ValueError(f"{only!r} is no cgroup choice; use one of {', '.join(CHOICES)}")
    if only == "none":
        return NoCgroups()
    parts = _find_parts(names, mount, only, own, quotas)
    if not parts.roots():
        return NoCgroups("; ".join(sorted(set(parts.missing.values()))) or f"no control groups under {mount}")
    return GroupTree(parts, depth=len(names))


def _find_parts(names: list[str], mount: Path, only: str, own: Path, quotas: bool) -> Parts:
    places = _own_places(own)
    v1 = _V1(mount, names, places) if only in ("auto", "v1") else None
    v2 = _V2(mount, names, places) if only in ("auto", "v2") else None
    missing: dict[str, str] = {}

    def first(need: str, makers: Makers[P], works: Callable[[P, Path], bool]) -> P | None:
        why: list[str] = []
        for controller, make in makers:
            tree = v2 if controller.startswith("v2") else v1
            if tree is None:
                continue
            for directory in tree.roots(controller.partition(":")[2]):
                part = make(directory)
                if _try(part, works, why):
                    return part
                remove_roots((directory,), len(names))
        missing[need] = why[-1] if why else f"no controller for it under {mount}"
        return None

    cpu_makers: Makers[Cpus] = (("v1:cpuset", CpusV1), ("v2:cpuset", CpusV2))
    memory_makers: Makers[MemoryController] = (("v1:memory", MemoryV1), ("v2:memory", MemoryV2))
    # v2 first: its kill reaches frozen processes at once
    stop_makers: Makers[FreezeController] = (("v2:", StopV2), ("v1:freezer", StopV1))
    usage_makers: Makers[Usage] = (("v1:cpuacct", UsageV1), ("v2:", UsageV2))
    quota_makers: Makers[Quota] = (("v1:cpu", QuotaV1), ("v2:cpu", QuotaV2))
    cpus = first("cpuset", cpu_makers, _pins)
    memory = first("memory", memory_makers, _limits)
    stop = first("freeze", stop_makers, _stops)
    usage = first("cpu_usage", usage_makers, _counts)
    quota = first("cpu_quota", quota_makers, _bounds) if quotas else None
    return Parts(cpus, memory, stop, usage, quota, missing)


class _V1:
    """One tree per controller; several may share one."""

    def __init__(self, mount: Path, names: list[str], places: dict[str, str]) -> None:
        self._mount, self._names, self._places = mount, names, places

    def roots(self, controller: str) -> Iterator[Path]:
        top = self._mount / controller
        if not (top / "cgroup.procs").exists() or (top / "cgroup.controllers").exists():
            return
        yield top.joinpath(*self._names)
        if place := self._places.get(controller, "").strip("/"):
            yield top.joinpath(place, *self._names)


class _V2:
    """One tree; a controller must be handed down level by level."""

    def __init__(self, mount: Path, names: list[str], places: dict[str, str]) -> None:
        tops = [path for path in (mount, mount / "unified") if (path / "cgroup.controllers").exists()]
        self._top = tops[0] if tops else None
        self._names, self._place = names, places.get("", "").strip("/")

    def roots(self, controller: str) -> Iterator[Path]:
        if self._top is None:
            return
        own = self._top / self._place if self._place else None
        # a delegated unit is ours by agreement with the system's manager, so it comes before the top
        for base in (own if own and _is_delegated(own) else None, self._top, own):
            if base is not None and (not controller or self._hand_down(base, controller)):
                yield base.joinpath(*self._names)

    def _hand_down(self, base: Path, controller: str) -> bool:
        directory = base
        for name in ["", *self._names]:
            directory = directory / name
            try:
                directory.mkdir(exist_ok=True)
            except OSError:
                return False
            if controller not in controllers.read(directory / "cgroup.controllers").split():
                return False
            if controller in controllers.read(directory / "cgroup.subtree_control").split():
                continue
            if not controllers.write(directory / "cgroup.subtree_control", f"+{controller}"):
                # a group with processes of its own cannot hand down: step aside into a leaf, and try once more
                leaf = directory / "daemon"
                if os.getpid() not in controllers.pids_in(directory):
                    return False
                try:
                    leaf.mkdir(exist_ok=True)
                except OSError:
                    return False
                if not controllers.write(leaf / "cgroup.procs", "0"):
                    return False
                if not controllers.write(directory / "cgroup.subtree_control", f"+{controller}"):
                    return False
        return True


def _try(part: P, works: Callable[[P, Path], bool], why: list[str]) -> bool:
    scratch = part.root / f"probe-{os.getpid()}"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why.append(f"cannot make a group under {part.root}: {error.strerror}")
        return False
    try:
        if works(part, scratch):
            return True
        why.append(f"what is written under {part.root} does not read back")
        return False
    finally:
        controllers.wait_until(lambda: _removed(scratch), 1.0)


def _removed(directory: Path) -> bool:
    try:
        return controllers.remove(directory)
    except OSError:
        return True


def _pins(part: Cpus, scratch: Path) -> bool:
    if isinstance(part, CpusV1):
        part.prepare()
        part.enter(scratch)
    online = controllers.read(part.root / "cpuset.effective_cpus") or controllers.read(
        part.root / "cpuset.cpus.effective"
    )
    try:
        cpus = parse_ids(online) or tuple(os.sched_getaffinity(0))
    except ValueError:
        return False
    return part.set_cpus(scratch, cpus[-1:]) == cpus[-1:]


def _limits(part: MemoryController, scratch: Path) -> bool:
    return part.set_limit(scratch, TRIAL_BYTES)


def _bounds(part: Quota, scratch: Path) -> bool:
    return part.set_quota(scratch, SMALLEST_QUOTA_CORES)


def _stops(part: FreezeController, scratch: Path) -> bool:
    if not part.order(scratch, True):
        return False
    stopped = controllers.wait_until(lambda: part.is_frozen(scratch), 1.0)
    return part.order(scratch, False) and stopped


def _counts(part: Usage, scratch: Path) -> bool:
    return part.cpu_s(scratch) >= 0.0 and any((scratch / name).exists() for name in ("cpuacct.usage", "cpu.stat"))


def _own_places(own: Path) -> dict[str, str]:
    """Controller -> path of this process in its tree; "" for v2."""
    places: dict[str, str] = {}
    for line in controllers.read(own).splitlines():
        match = re.fullmatch(r"\d+:([^:]*):(/.*)", line)
        if match:
            for controller in match[1].split(","):
                places[controller] = match[2]
    return places


def _is_delegated(group: Path) -> bool:
    for name in ("trusted.delegate", "user.delegate"):
        try:
            if os.getxattr(group, name) == b"1":
                return True
        except OSError:
            continue
    return False
