"""Groups made of controllers from v1 trees, the v2 tree, or both, and the choice of those that this node offers: each
is tried on a scratch group, and not used where what is written does not read back. Groups go under the top of a tree,
or, where that is not ours to write, under the daemon's own group."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ganger.text import os_reason

from ganger_daemon.cgroups import controllers
from ganger_daemon.cgroups.contract import GROUP_NAME, Cgroups, Variant, checked
from ganger_daemon.cgroups.controllers import (
    SMALLEST_QUOTA_CORES,
    CgroupController,
    Cpus,
    DeviceFence,
    FreezeController,
    MemoryController,
    Processes,
    Quota,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Controllers that a node offers; `missing`: the reason for each that is None."""

    cpus: Cpus | None
    memory: MemoryController | None
    usage: Usage | None
    quota: Quota | None
    stop: FreezeController | None
    processes: Processes | None
    fence: DeviceFence | None
    missing: Mapping[str, str]

    @property
    def there(self) -> list[CgroupController]:
        """All, the cpuset first: a process that could not be pinned there would otherwise have joined the rest."""
        found = (self.cpus, self.memory, self.usage, self.quota, self.stop, self.processes, self.fence)
        return [part for part in found if part is not None]


# Pools lie beside groups, under a name that no group has: groups begin with the id of a job.
_POOL = "pool-"


class GroupTree(Cgroups):
    """Variants v1, v2 and hybrid. `depth`: how many directories of each root are ours to remove."""

    def __init__(self, parts: Parts, depth: int = 1) -> None:
        super().__init__()
        self._parts = parts
        self._roots = tuple(dict.fromkeys(part.root for part in parts.there))
        self._depth = depth

    @property
    def variant(self) -> Variant:
        names = {part.name for part in self._parts.there}
        return Variant.HYBRID if len(names) > 1 else Variant(names.pop())

    @property
    def capabilities(self) -> Mapping[str, str]:
        parts, missing = self._parts, self._parts.missing
        found: dict[str, tuple[CgroupController | None, str]] = {
            "cpuset": (parts.cpus, "affinity"),
            "memory": (parts.memory, "none"),
            "freeze": (parts.stop, "signals"),
            "cpu_usage": (parts.usage, "none"),
            "cpu_quota": (parts.quota, "none"),
            "process_limit": (parts.processes, "none"),
            "device_fence": (parts.fence, "none"),
        }
        names = {
            need: part.name if part else f"{otherwise}: {missing.get(need, 'not asked for')}"
            for need, (part, otherwise) in found.items()
        }
        return {"cgroup": self.variant.value, "kill": names["freeze"], **names}

    def make_pool(self, pool: str, cores: float) -> bool:
        name = _POOL + checked(pool)
        quota = self._parts.quota
        if quota is None:
            return False
        for root in self._roots:
            (root / name).mkdir(parents=True, exist_ok=True)
            # Of v2: what the root hands down to it, it hands on.
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
        if self._parts.cpus is not None:
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

    def hold_caches(self, group: str, memory_bytes: int) -> bool:
        part = self._parts.memory
        return not memory_bytes if part is None else part.hold_caches(self._at(part.root, group), memory_bytes)

    def set_process_limit(self, group: str, most: int) -> bool:
        part = self._parts.processes
        return part is not None and part.set_limit(self._at(part.root, group), most)

    def deny_devices(self, group: str, numbers: Collection[tuple[int, int]]) -> bool:
        part = self._parts.fence
        return part is not None and part.deny(self._at(part.root, group), numbers)

    def track(self, group: str, pid: int) -> None:
        """Do nothing: the kernel lists the processes of a group."""

    def pids(self, group: str) -> tuple[int, ...]:
        return tuple(sorted({pid for root in self._roots for pid in controllers.pids_in(self._at(root, group))}))

    def freeze(self, group: str, timeout_s: float = 5.0) -> bool:
        return self._order(group, True, timeout_s) if self._parts.stop else super().freeze(group, timeout_s)

    def thaw(self, group: str, timeout_s: float = 5.0) -> bool:
        return self._order(group, False, timeout_s) if self._parts.stop else super().thaw(group, timeout_s)

    def frozen(self, group: str) -> bool:
        part = self._parts.stop
        return part.is_frozen(self._at(part.root, group)) if part else super().frozen(group)

    def kill(self, group: str) -> None:
        part = self._parts.stop
        if part is not None:
            part.kill(self._at(part.root, group))
        # Processes that only another tree of the group lists, or where no tree can kill.
        controllers.signal_all(self.pids(group), signal.SIGKILL)

    def oom_kills(self, group: str) -> int:
        part = self._parts.memory
        return part.oom_kills(self._at(part.root, group)) if part else 0

    def cpu_s(self, group: str) -> float:
        part = self._parts.usage
        return part.cpu_s(self._at(part.root, group)) if part else 0.0

    def unreclaimable_bytes(self, group: str) -> int:
        part = self._parts.memory
        return part.unreclaimable(self._at(part.root, group)) if part else 0

    def memory_use(self, group: str) -> controllers.MemoryUse | None:
        part = self._parts.memory
        return part.use(self._at(part.root, group)) if part else None

    def destroy(self, group: str, timeout_s: float = 5.0) -> bool:
        places = [self._at(root, group) for root in self._roots]

        def is_gone() -> bool:
            # One that is busy keeps no other from being removed.
            left = [place for place in places if not controllers.remove(place)]
            return not left

        return controllers.wait_until(is_gone, timeout_s)

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
        assert part is not None, "without a freezer signals do it"
        directory = self._at(part.root, group)

        def order() -> bool:
            return part.order(directory, frozen)

        order()
        # v1 may need a second order: the first one misses a process that is forking
        return controllers.wait_until(lambda: part.is_frozen(directory) == frozen, timeout_s, order)


def remove_roots(roots: Iterable[Path], depth: int) -> None:
    """Remove each root, and of its parents those that are ours, as far as they are empty."""
    for root in roots:
        for directory in [root, *root.parents][:depth]:
            try:
                if not controllers.remove(directory):
                    break
            except OSError:
                break


MOUNT = Path("/sys/fs/cgroup")
CHOICES = ("auto", "v1", "v2", "none")

P = TypeVar("P", bound=CgroupController)


def choose_cgroups(
    root: str,
    mount: Path = MOUNT,
    only: str = "auto",
    own: Path = Path("/proc/self/cgroup"),
    quotas: bool = False,
    fences: bool = False,
) -> Cgroups:
    """`root`: where groups are made, one name or several joined by "/" (daemons that share a machine need different
    ones). `only`: keep to v1, to v2, or to none. `quotas`: CPU quotas are wanted, `fences`: limits of processes and of
    device files; each costs every process one more group to join. Raises ValueError for a root or a choice that is
    none; a kernel that offers nothing is no error."""
    names = root.split("/")
    if not all(GROUP_NAME.fullmatch(name) for name in names):
        raise ValueError(f"{root!r} is no cgroup root; use names of letters, digits, '.', '_' and '-', joined by '/'")
    if only not in CHOICES:
        raise ValueError(f"{only!r} is no cgroup choice; use one of {', '.join(CHOICES)}")
    if only == "none":
        return Cgroups()
    parts = _find_parts(names, mount, only, own, quotas, fences)
    if not parts.there:
        return Cgroups("; ".join(sorted(set(parts.missing.values()))) or f"no control groups under {mount}")
    return GroupTree(parts, depth=len(names))


def _find_parts(names: list[str], mount: Path, only: str, own: Path, quotas: bool, fences: bool) -> Parts:
    places = _own_places(own)
    missing: dict[str, str] = {}

    def first(need: str, kind: type[P], *wanted: str) -> P | None:
        """`wanted`: version and controller, the preferred first; no controller for what every group of v2 has."""
        why: list[str] = []
        for version, _, controller in (one.partition(":") for one in wanted):
            if only not in ("auto", version):
                continue
            roots = _v2_roots if version == "v2" else _v1_roots
            for directory in roots(mount, names, places, controller):
                part = kind(directory, version == "v2")
                if _works(part, why):
                    return part
                remove_roots((directory,), len(names))
        missing[need] = why[-1] if why else f"no controller for it under {mount}"
        return None

    return Parts(
        cpus=first("cpuset", Cpus, "v1:cpuset", "v2:cpuset"),
        memory=first("memory", MemoryController, "v1:memory", "v2:memory"),
        # v2 first: its kill reaches frozen processes at once
        stop=first("freeze", FreezeController, "v2:", "v1:freezer"),
        usage=first("cpu_usage", Usage, "v1:cpuacct", "v2:"),
        quota=first("cpu_quota", Quota, "v1:cpu", "v2:cpu") if quotas else None,
        processes=first("process_limit", Processes, "v2:pids", "v1:pids") if fences else None,
        # v2 first: most nodes have it for freezing, and then it is no further group to join
        fence=first("device_fence", DeviceFence, "v2:", "v1:devices") if fences else None,
        missing=missing,
    )


def _v1_roots(mount: Path, names: list[str], places: Mapping[str, str], controller: str) -> Iterator[Path]:
    """One tree per controller; several may share one."""
    top = mount / controller
    if not (top / "cgroup.procs").exists() or (top / "cgroup.controllers").exists():
        return
    yield top.joinpath(*names)
    if place := places.get(controller, "").strip("/"):
        yield top.joinpath(place, *names)


def _v2_roots(mount: Path, names: list[str], places: Mapping[str, str], controller: str) -> Iterator[Path]:
    """One tree; a controller must be handed down level by level."""
    top = next((path for path in (mount, mount / "unified") if (path / "cgroup.controllers").exists()), None)
    if top is None:
        return
    place = places.get("", "").strip("/")
    own = top / place if place else None
    # A delegated unit is ours by agreement with the system's manager, so it comes before the top.
    for base in (own if own and _is_delegated(own) else None, top, own):
        if base is not None and (not controller or _hand_down(base, names, controller)):
            yield base.joinpath(*names)


def _hand_down(base: Path, names: list[str], controller: str) -> bool:
    directory = base
    for name in ["", *names]:
        directory = directory / name
        try:
            directory.mkdir(exist_ok=True)
            if controller not in controllers.read(directory / "cgroup.controllers").split():
                return False
            control = directory / "cgroup.subtree_control"
            if controller in controllers.read(control).split() or controllers.write(control, f"+{controller}"):
                continue
            # A group with processes of its own cannot hand down: step aside into a leaf, and try once more.
            if os.getpid() not in controllers.pids_in(directory):
                return False
            (directory / "daemon").mkdir(exist_ok=True)
        except OSError:
            return False
        if not controllers.write(directory / "daemon" / "cgroup.procs", "0"):
            return False
        if not controllers.write(control, f"+{controller}"):
            return False
    return True


def _works(part: CgroupController, why: list[str]) -> bool:
    scratch = part.root / f"probe-{os.getpid()}"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why.append(f"cannot make a group under {part.root}: {os_reason(error)}")
        return False
    try:
        if part.works(scratch):
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
