"""The processes of a unit and the files that they hold, from the unit's own /proc."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ganger.injob.process_identity import start_ticks

from ganger_daemon.images.contract import SHARED_MEMORY, ImageRefusedError, OpenFile
from ganger_daemon.images.descriptors import (
    OutsideConnections,
    SocketOwner,
    outside_connections,
    owners_of,
    read_tables,
    unsavable,
)
from ganger_daemon.node.accounts import Account, seen_by

_DELETED = " (deleted)"
_INIT = 1
# Beginnings of names in shared memory: those that CRIU gives, and those of PyTorch's batches with the maker's id.
_GIVEN, _BATCH = "link_remap.", "torch_"
# Most that is part of an image of what no process holds in shared memory.
LOOSE_LIMIT_BYTES = 8 << 30
# Longest wait until dumps of other jobs have ended, and between two looks.
_TURN_S = 60.0
_TURN_LOOK_S = 0.02


class UnitProc:
    """The /proc of a unit, with the process ids inside it, read from outside by the id of its init.

    Without an init it is this process's own /proc. A process that ends meanwhile has no files and no children."""

    def __init__(self, init_pid: int | None) -> None:
        self.path = Path("/proc" if init_pid is None else f"/proc/{init_pid}/root/proc")

    def pids(self) -> tuple[int, ...]:
        """All processes but the init. Raises OSError if the unit is gone."""
        return tuple(sorted(int(name) for name in os.listdir(self.path) if name.isdigit() and int(name) != _INIT))

    def name(self, pid: int) -> str:
        try:
            return (self.path / str(pid) / "comm").read_text().strip()
        except OSError:
            return "?"

    def waiting_signals(self, pid: int) -> set[int]:
        """Signals that were sent to a process, or to its first thread, and have not reached it."""
        status = self.status(pid)
        waiting = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
        return {number for number in range(1, 65) if waiting >> number - 1 & 1}

    def status(self, pid: int) -> dict[str, str]:
        """The fields of a process's status by name; none if it is gone."""
        try:
            lines = (self.path / str(pid) / "status").read_text().splitlines()
        except OSError:
            return {}
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def tree(self, root: int) -> tuple[int, ...]:
        """The root and its descendants."""
        found, pending = [], [root]
        while pending:
            pid = pending.pop()
            found.append(pid)
            pending += self._children(pid)
        return tuple(sorted(found))

    def descriptors(self, pid: int) -> dict[int, str]:
        """Descriptor and what it points to, as the links in /proc name it."""
        found: dict[int, str] = {}
        directory = self.path / str(pid) / "fd"
        try:
            for name in os.listdir(directory):
                found[int(name)] = os.readlink(directory / name)
        except OSError:
            pass
        return found

    def connections(self, pids: Iterable[int], gpu_obstacle: str) -> OutsideConnections:
        """What these processes hold that leads outside them, or cannot be part of an image. Raises OSError.

        `gpu_obstacle`: why the GPU's driver cannot close what belongs to it; empty if it can."""
        owners: list[SocketOwner] = []
        others: list[str] = []
        for pid in pids:
            descriptors, name = self.descriptors(pid), self.name(pid)
            owners += owners_of(descriptors, pid, name)
            others += unsavable(descriptors, pid, name, gpu_obstacle)
        if not owners:
            return OutsideConnections(others=tuple(others))
        # All of a unit are in one network namespace.
        found = outside_connections(owners, read_tables(self.path / str(owners[0].pid) / "net"))
        return replace(found, others=(*others, *found.others))

    def open_files(self, pids: Iterable[int]) -> dict[str, OpenFile]:
        """Regular files by path: open or mapped, but none that was removed."""
        found: dict[str, OpenFile] = {}
        for pid in pids:
            for descriptor, path in self.descriptors(pid).items():
                self._note(
                    found, self.path / str(pid) / "fd" / str(descriptor), path, self._is_written(pid, descriptor)
                )
            mapped = self.path / str(pid) / "map_files"
            for area in _names(mapped):
                self._note(found, mapped / area, _target(mapped / area), False)
        return found

    def held_inodes(
        self, pids: Iterable[int], directory: str, device: int, *, has_other_name: bool = False
    ) -> Iterator[int]:
        """The inodes of files below a directory of this device that the processes have open or mapped.
        `has_other_name`: only those whose name is gone while the file has another one."""
        for pid in pids:
            for kind in ("fd", "map_files"):
                links = self.path / str(pid) / kind
                for name in _names(links):
                    target = _target(links / name)
                    if not target.startswith(f"{directory}/") or (has_other_name and not target.endswith(_DELETED)):
                        continue
                    with suppress(OSError):
                        status = os.stat(links / name)
                        if status.st_dev == device and (status.st_nlink or not has_other_name):
                            yield status.st_ino

    def _note(self, found: dict[str, OpenFile], link: Path, path: str, is_written: bool) -> None:
        if not path.startswith("/") or path.endswith(_DELETED):
            return
        if (known := found.get(path)) is not None and (known.is_written or not is_written):
            return
        try:
            status = os.stat(link)
        except OSError:
            return
        if stat.S_ISREG(status.st_mode):
            found[path] = OpenFile(path, status.st_size, is_written)

    def _is_written(self, pid: int, descriptor: int) -> bool:
        try:
            text = (self.path / str(pid) / "fdinfo" / str(descriptor)).read_text()
        except OSError:
            return False
        flags = next((line.split()[1] for line in text.splitlines() if line.startswith("flags:")), "0")
        return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY

    def _children(self, pid: int) -> list[int]:
        found: list[int] = []
        tasks = self.path / str(pid) / "task"
        for thread in _names(tasks):
            try:
                found += map(int, (tasks / thread / "children").read_text().split())
            except OSError:
                continue
        return found


def pid_inside(pid: int) -> int:
    """Return the id that a process has in its own PID namespace. Raises ProcessLookupError if it is gone."""
    status = UnitProc(None).status(pid)
    if "NSpid" not in status:
        raise ProcessLookupError(errno.ESRCH, f"there is no process {pid}")
    return int(status["NSpid"].split()[-1])


def tracer_of(pid: int) -> int:
    """Return the process that traces another one, as a debugger does; 0 for none."""
    return int(UnitProc(None).status(pid).get("TracerPid", "0"))


def pids_outside(root_pid: int) -> dict[int, int]:
    """Return the ids of a tree's processes here by those inside their unit. `root_pid`: as seen here."""
    found: dict[int, int] = {}
    for pid in UnitProc(None).tree(root_pid):
        try:
            found[pid_inside(pid)] = pid
        except OSError:
            continue
    return found


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


# What an account's process has of its own only in a user namespace, where it may mount, and change its root directory.
_NAMESPACES = ("user", "mnt", "pid", "ipc", "net", "uts", "cgroup")
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapAmb")


def foreign_process(root_pid: int, account: Account) -> str:
    """Return why a tree is not of an account's processes alone, without further rights and namespaces of their own;
    empty if it is. `root_pid`: as seen here."""
    proc = UnitProc(None)
    own = {"user": _namespace("self", "user")} | {one: _namespace(root_pid, one) for one in _NAMESPACES[1:]}
    for pid in proc.tree(root_pid):
        status = proc.status(pid)
        if not status or status.get("State", "").startswith("Z"):
            continue
        ids = {*map(int, status["Uid"].split())}, {*map(int, status["Gid"].split())}
        groups = {*map(int, status.get("Groups", "").split())}
        rights = any(int(status.get(name, "0"), 16) for name in _CAPABILITIES)
        text = f"process {pid} ({proc.name(pid)})"
        if ids != ({account.uid}, {account.gid}) or not groups <= {*account.groups}:
            return f"{text} does not run as {account.name}, with its groups"
        if rights or status.get("NoNewPrivs") != "1":
            return f"{text} has rights that {account.name} has not"
        if other := next((one for one in _NAMESPACES if _namespace(pid, one) != own[one]), ""):
            return f"{text} has a namespace of its own ({other})"
    return ""


def _namespace(pid: int | str, kind: str) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
    except OSError:
        return 0


# Of ioctl: the user namespace that a namespace belongs to.
_NS_GET_USERNS = 0xB701


@contextmanager
def mounts_of(pid: int) -> Iterator[int]:
    """Give a descriptor of a process's mount namespace for a while, as `open_mounts`."""
    found = open_mounts(pid)
    try:
        yield found
    finally:
        os.close(found)


def open_mounts(pid: int) -> int:
    """Return a descriptor of a process's mount namespace, which root has made. Raises OSError, and ImageRefusedError
    for another: programs in it would be the job's."""
    found = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        owner = fcntl.ioctl(found, _NS_GET_USERNS)
        is_roots = os.fstat(owner).st_ino == _namespace("self", "user")
        os.close(owner)
        if not is_roots:
            raise ImageRefusedError(f"process {pid} has a namespace of its own (mnt)")
    except BaseException:
        os.close(found)
        raise
    return found


def shared_files(proc: UnitProc, pids: Collection[int], place: Path = Path(SHARED_MEMORY)) -> dict[str, int]:
    """Return the files in shared memory that belong to these processes, outside a unit, with their inodes. `place`: of
    their shared memory, as seen here.

    A process may hold one under a name that is gone, as a semaphore of `multiprocessing`: each other name counts, also
    one that CRIU has given it. Batches of PyTorch's sharing strategy `file_system` need not be held by any process: on
    their way they are only a name in a pipe."""
    held = set(proc.held_inodes(pids, SHARED_MEMORY, _device_of(place)))
    own = tuple(f"{_BATCH}{pid}_" for pid in pids)
    found: dict[str, int] = {}
    for top, _, names in os.walk(place):
        for name in names:
            path = f"{top}/{name}"
            with suppress(OSError):
                inode = os.lstat(path).st_ino
                if inode in held or name.startswith(own):
                    found[_inside(path, place)] = inode
    return found


def _inside(path: str, place: Path) -> str:
    return SHARED_MEMORY + path.removeprefix(str(place))


def loose_files(
    proc: UnitProc, root: int, pids: Collection[int], held: Collection[str], place: Path = Path(SHARED_MEMORY)
) -> list[str]:
    """Return the files, directories and links in shared memory that the users of these processes have made or changed
    since `root` started, and that no process holds. Outside a unit.

    Which job made one is not known: some may be of another job of the same user. In this job's image they do no harm.
    `held`: paths that the processes hold; `place`: of their shared memory, as seen here. Raises ImageRefusedError where
    there is too much."""
    users = {int(user) for pid in pids for user in proc.status(pid).get("Uid", "").split()}
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - (start_ticks(root) or 0) / os.sysconf("SC_CLK_TCK")
    begun, found = time.time() - age, dict[str, os.stat_result]()
    for top, directories, names in os.walk(place):
        for name in (*directories, *names):
            seen = f"{top}/{name}"
            path = _inside(seen, place)
            with suppress(OSError):
                status = os.lstat(seen)
                is_new = status.st_uid in users and status.st_ctime >= begun
                if (
                    is_new
                    and path not in held
                    and not name.startswith((_GIVEN, _BATCH))
                    and not stat.S_ISSOCK(status.st_mode)
                ):
                    found[path] = status
    if found:
        others = set(proc.pids()) - set(pids)
        of_others = set(proc.held_inodes(others, SHARED_MEMORY, _device_of(place)))
        found = {path: status for path, status in found.items() if status.st_ino not in of_others}
    size = sum(status.st_size for status in found.values())
    if size > LOOSE_LIMIT_BYTES:
        largest = max(found, key=lambda path: found[path].st_size)
        raise ImageRefusedError(
            f"files in {SHARED_MEMORY} that no process holds have {size >> 20} MiB, the largest is {largest}; "
            f"at most {LOOSE_LIMIT_BYTES >> 20} MiB are part of an image"
        )
    return sorted(found)


@contextmanager
def shared_names(
    proc: UnitProc, pids: Collection[int], place: Path = Path(SHARED_MEMORY), account: Account | None = None
) -> Iterator[None]:
    """Let CRIU give new names to files in shared memory that these processes hold under names that are gone. `place`:
    of it, as seen here; `account`: with whose rights it is changed.

    It numbers them in each process tree alone, so trees outside of units take turns. It removes them where the
    processes run on, and neither where it ends them nor when it is killed. Raises ImageRefusedError."""
    if not any(True for _ in proc.held_inodes(pids, SHARED_MEMORY, _device_of(place), has_other_name=True)):
        yield
        return
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(directory)
        before = _given_names(directory)
        try:
            yield
        finally:
            seen_by(account, partial(_remove_names, directory, before))
    finally:
        os.close(directory)


def _given_names(directory: int) -> set[str]:
    return {name for name in os.listdir(directory) if name.startswith(_GIVEN)}


def _remove_names(directory: int, but: Collection[str]) -> None:
    for name in _given_names(directory) - {*but}:
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)


def _lock(directory: int) -> None:
    deadline = time.monotonic() + _TURN_S
    while True:
        try:
            return fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ImageRefusedError("images of other jobs with semaphores are being taken; try again") from None
            time.sleep(_TURN_LOOK_S)


def _device_of(path: Path) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return 0
