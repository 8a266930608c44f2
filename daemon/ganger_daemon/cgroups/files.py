"""Files and directories below a cgroup mount, and waiting for the kernel's work there."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

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
    """Whether it held in time; `again` is done before each further look."""
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
    """For every thread of those processes. True when at least one thread took it, or there was none."""
    threads = threads_of(pids)
    taken = 0
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cpus)
            taken += 1
        except (OSError, ValueError):
            continue
    return taken > 0 or not threads
