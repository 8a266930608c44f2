"""Which control groups this node really offers: each part is tried on a scratch group, and what cannot be written and
read back is not used.

Looked at are the v1 trees and the v2 tree under one mount. Groups go under the top of a tree, or, where that is not
ours to write (a delegated unit, a container), under the daemon's own group.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar

from ganger_daemon.cgroups import files
from ganger_daemon.cgroups.contract import GROUP_NAME, Cgroups
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
from ganger_daemon.cgroups.group_tree import GroupTree, Parts, remove_roots
from ganger_daemon.cgroups.no_cgroups import NoCgroups
from ganger_daemon.node.core_table import parse_ids

log = logging.getLogger(__name__)

MOUNT = Path("/sys/fs/cgroup")
CHOICES = ("auto", "v1", "v2", "none")
TRIAL_BYTES = 64 * 2**20

P = TypeVar("P", bound=CgroupController)
Makers: TypeAlias = tuple[tuple[str, Callable[[Path], P]], ...]


def choose_cgroups(
    root: str,
    mount: Path = MOUNT,
    only: str = "auto",
    own: Path = Path("/proc/self/cgroup"),
    quotas: bool = False,
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
            if controller not in files.read(directory / "cgroup.controllers").split():
                return False
            if controller in files.read(directory / "cgroup.subtree_control").split():
                continue
            if not files.write(directory / "cgroup.subtree_control", f"+{controller}"):
                # a group with processes of its own cannot hand down: step aside into a leaf, and try once more
                leaf = directory / "daemon"
                if os.getpid() not in files.pids_in(directory):
                    return False
                try:
                    leaf.mkdir(exist_ok=True)
                except OSError:
                    return False
                if not files.write(leaf / "cgroup.procs", "0"):
                    return False
                if not files.write(directory / "cgroup.subtree_control", f"+{controller}"):
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
        files.wait_until(lambda: _removed(scratch), 1.0)


def _removed(directory: Path) -> bool:
    try:
        return files.remove(directory)
    except OSError:
        return True


def _pins(part: Cpus, scratch: Path) -> bool:
    if isinstance(part, CpusV1):
        part.prepare()
        part.enter(scratch)
    online = files.read(part.root / "cpuset.effective_cpus") or files.read(part.root / "cpuset.cpus.effective")
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
    stopped = files.wait_until(lambda: part.is_frozen(scratch), 1.0)
    return part.order(scratch, False) and stopped


def _counts(part: Usage, scratch: Path) -> bool:
    return part.cpu_s(scratch) >= 0.0 and any((scratch / name).exists() for name in ("cpuacct.usage", "cpu.stat"))


def _own_places(own: Path) -> dict[str, str]:
    """Controller -> path of this process in its tree; "" for v2."""
    places: dict[str, str] = {}
    for line in files.read(own).splitlines():
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
