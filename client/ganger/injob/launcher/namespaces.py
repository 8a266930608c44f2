"""Mounts and namespaces of ranks. The unit of a restored process: namespaces in which the pids of an image are free,
/dev/shm is private, and the job's names lead to the directories of the present epoch, held open by an init that no
image has. A process that was never restored has no unit: what it has mapped was mapped outside. Its /tmp and /dev/shm
are those of its launcher's mounts, which serve one gang at a time. And a filter of system calls."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Callable, NamedTuple, NoReturn, TypeVar

_T = TypeVar("_T")

# Under it each job has a directory of names, see `make_links`.
LINKS = "/run/ganger-unit"

TEMPORARY, SHARED_MEMORY = "/tmp", "/dev/shm"
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x08000000, 0x20000000, 0x40000000
_CLONE_FS = 0x00000200
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
UNIT_FLAGS = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID
_MS_BIND, _MS_REC, _MS_SLAVE, _MS_SHARED, _MS_NOSUID, _MS_NODEV = 0x1000, 0x4000, 1 << 19, 1 << 20, 2, 4
_MNT_DETACH = 2
_LOOK_EVERY_S = 1.0
# A unit without processes ends after this long: nothing was started in it.
_EMPTY_S = 60.0
_LONGEST_TEXT = 1000

_libc = ctypes.CDLL(None, use_errno=True)


class Unit(NamedTuple):
    """What a unit is made from. ``links``: where the names in the directory of its job lead, see `make_links`;
    ``binds``: pairs of a directory and the path at which the unit has it. ``has_network``: a network of its own, with
    nothing but loopback."""

    name: str
    directory: str
    links: Mapping[str, str]
    binds: Sequence[Sequence[str]] = ()
    has_network: bool = False

    @property
    def flags(self) -> int:
        """Of clone, for its init."""
        return UNIT_FLAGS | (CLONE_NEWNET if self.has_network else 0)


def make_links(directory: str, links: Mapping[str, str]) -> None:
    """Make the directory whose names lead to those of a job, outside a unit or in one. Raises OSError.

    A job finds its page, its socket and its temporary files by these names. They stay the same when it is restored, and
    lead elsewhere."""
    os.makedirs(directory, exist_ok=True)
    os.chmod(directory, 0o755)  # whatever the umask is: jobs of other accounts go through
    for name, target in links.items():
        # Replaced in one step: a daemon that takes over a launch names the directories of processes that run.
        new = os.path.join(directory, f".{name}.new")
        if os.path.lexists(new):
            os.unlink(new)
        os.symlink(target, new)
        os.replace(new, os.path.join(directory, name))


def be_init(unit: Unit, ready: int, cgroup_procs: Sequence[str]) -> NoReturn:
    """Become the init of a unit, in a process cloned with UNIT_FLAGS: mount, close ``ready``, serve, and end. What goes
    wrong before is written there, as the failures of other children are."""
    try:
        for path in cgroup_procs:
            with open(path, "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
        for number in signal.valid_signals():
            with suppress(OSError, ValueError):  # those that cannot be, and real-time signals of the C library
                signal.signal(number, signal.SIG_DFL)
        os.chdir("/")
        _mount_all(unit)
        if unit.has_network:
            _switch_loopback_on()
    except Exception as problem:
        message = f"no unit can be made: {str(problem)[:_LONGEST_TEXT]}"
        os.write(ready, json.dumps({"reason": "UNIT", "message": message}).encode())
        os._exit(1)
    os.close(ready)
    _serve()


def _mount_all(unit: Unit) -> None:
    _mount_own()
    os.makedirs(LINKS, mode=0o755, exist_ok=True)
    _mount("ganger-unit", LINKS, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=711,size=1m")
    make_links(unit.directory, unit.links)
    for source, place in unit.binds:
        bind(source, place)


def _mount_own() -> None:
    # What the machine mounts later is seen here; nothing that is mounted here is seen outside.
    _mount("none", "/", "", _MS_REC | _MS_SLAVE)
    _mount_memory("ganger-shm")
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV, "hidepid=2")


def separate() -> None:
    """Give this process mounts of its own: a /dev/shm that is empty and ends with its last process, and a /proc in
    which a user sees no process of others. As root. Raises OSError."""
    _check(_libc.unshare(CLONE_NEWNS), "no mounts of its own")
    _mount_own()


def _mount_memory(source: str) -> None:
    _mount(source, SHARED_MEMORY, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")


def in_own_thread(act: Callable[[], _T]) -> _T:
    """Return what ``act`` returns, or raise what it raises: what it changes of its thread ends with that."""
    found: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="look", daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


# Begins the source of a gang's /dev/shm in the table of mounts; in that of its /tmp the directory has the gang's name.
_OF_GANG = "ganger-job-"
_GANG = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}-\d+")


def give_places(mounts: int, gang: str, temporary: str) -> str:
    """Let a directory be /tmp in a mount namespace, by its descriptor, and /dev/shm be empty, unless they are this
    gang's already. As root. Return another gang that needs them still, and then change nothing. Raises OSError.

    ``temporary``: named like the gang, beside those of others, each of which is there for as long as its gang is."""
    if os.fstat(mounts).st_ino == os.stat("/proc/self/ns/mnt").st_ino:
        raise OSError(errno.EPERM, "its launcher has no mounts of its own")

    def give() -> str:
        holders = {_holder(SHARED_MEMORY), _holder(TEMPORARY)}
        others = [one for one in holders - {"", gang} if os.path.isdir(f"{os.path.dirname(temporary)}/{one}")]
        if others or holders == {gang}:
            return next(iter(others), "")
        _take_back()
        _mount_memory(f"{_OF_GANG}{gang}")
        _mount(temporary, TEMPORARY, "", _MS_BIND)
        return ""

    return in_own_thread(partial(_enter_and, mounts, give))


def take_places_back(mounts: int) -> None:
    """Undo `give_places`: what the gang has left in /dev/shm takes no memory any more. Raises OSError."""
    in_own_thread(partial(_enter_and, mounts, _take_back))


def _enter_and(mounts: int, act: Callable[[], _T]) -> _T:
    # the root directory of this thread is no other's from here on
    _check(_libc.unshare(_CLONE_FS), "no root directory of its own")
    _enter(mounts, CLONE_NEWNS)
    return act()


def _take_back() -> None:
    for place in (TEMPORARY, SHARED_MEMORY):
        while _holder(place):
            _check(_libc.umount2(place.encode(), _MNT_DETACH), f"{place} cannot be taken back")


def _holder(place: str) -> str:
    """Return the gang whose directory was mounted last at a place in this thread's mounts; empty for none."""
    found = ""
    with open("/proc/thread-self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for words in map(str.split, mounts):
            if words[4] == place:
                source = words[words.index("-") + 2]
                # the kernel marks a directory that was removed meanwhile
                directory = words[3].replace("//deleted", "")
                named = source.replace(_OF_GANG, "") if place == SHARED_MEMORY else os.path.basename(directory)
                found = named if _GANG.fullmatch(named) else ""
    return found


def share_links() -> None:
    """Let processes with mounts of their own (see `separate`) see what is bound below `LINKS` later, and no process but
    root list it. Idempotent. Raises OSError."""
    os.makedirs(LINKS, mode=0o711, exist_ok=True)
    os.chmod(LINKS, 0o711)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        is_mount = any(line.split()[4] == LINKS for line in mounts)
    if not is_mount:
        _mount(LINKS, LINKS, "", _MS_BIND | _MS_REC)
    _mount("none", LINKS, "", _MS_SHARED)


def _switch_loopback_on() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def bind(source: str, place: str) -> None:
    """Let a directory be at another path, too, which is made; without effect where it is. Raises OSError."""
    os.makedirs(place, exist_ok=True)
    if not os.path.exists(source) or not os.path.samefile(source, place):
        unbind(place)
        _mount(source, place, "", _MS_BIND)


def unbind(place: str) -> None:
    """Undo `bind`; without effect where nothing is bound."""
    _libc.umount2(place.encode(), _MNT_DETACH)


def _serve() -> NoReturn:
    """Reap orphans until no other process is left, once there was one or should have been."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    waits_until = time.monotonic() + _EMPTY_S
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, _LOOK_EVERY_S)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if any(name.isdigit() and name != "1" for name in os.listdir("/proc")):
            waits_until = 0.0
        elif time.monotonic() > waits_until:
            os._exit(0)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None)
    _check(_libc.mount(*arguments), f"cannot mount {source} at {target}")


def _check(done: int, trouble: str) -> None:
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{trouble}: {os.strerror(number)}")


def fork_in(init: int, fork: Callable[[], int]) -> int:
    """Call ``fork`` so that the child is in the PID namespace of the unit whose init has this pid; return what it
    returns. Raises OSError. This process stays where it is."""
    theirs = os.open(f"/proc/{init}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    ours = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    pid = -1
    try:
        _enter(theirs, CLONE_NEWPID)
        pid = fork()
    finally:
        if pid:  # the child cannot go back, and has nothing to go back for
            _enter(ours, CLONE_NEWPID)
        os.close(theirs)
        os.close(ours)
    return pid


def enter_unit(init: int) -> None:
    """Take a forked child of one thread into mounts, shared memory and network of a unit. Raises OSError.

    ``init``: as its parent sees it, which is how the child sees it before it has entered."""
    directory = os.getcwd()
    kinds = (("ipc", CLONE_NEWIPC), ("net", CLONE_NEWNET), ("mnt", CLONE_NEWNS))
    opened = [(os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC), kind) for name, kind in kinds]
    try:
        for namespace, kind in opened:
            _enter(namespace, kind)
    finally:
        for namespace, _ in opened:
            os.close(namespace)
    os.chdir(directory)


def _enter(namespace: int, kind: int) -> None:
    _check(_libc.setns(namespace, kind), "cannot enter a namespace")


def pid_outside(init: int, pid: int) -> int:
    """Return the pid that a process has outside the unit where it has ``pid``; 0 if there is none."""
    for one in _processes_in(init):
        try:
            with open(f"/proc/{one}/status", encoding="ascii", errors="replace") as status:
                numbers = next((line.split()[1:] for line in status if line.startswith("NSpid:")), [])
            if numbers[-1:] == [str(pid)]:
                return one
        except OSError:
            continue  # it has ended
    return 0


def end_children(init: int, known: Collection[int]) -> None:
    """Kill all in a unit but the known processes and its init, and reap those that are children of this process: what a
    failed restore has left. An init ends only once they are reaped."""
    with open(f"/proc/self/task/{threading.get_native_id()}/children", encoding="ascii") as file:
        children = [int(pid) for pid in file.read().split()]
    for one in _processes_in(init):
        if one in known or one == init:
            continue
        try:
            os.kill(one, signal.SIGKILL)
            if one in children:
                os.waitpid(one, 0)
        except (ProcessLookupError, ChildProcessError):
            continue  # it ended with another one


def _processes_in(init: int) -> list[int]:
    found: list[int] = []
    try:
        namespace = os.stat(f"/proc/{init}/ns/pid").st_ino
    except OSError:
        return found
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}/ns/pid").st_ino == namespace:
                found.append(int(name))
        except OSError:
            continue  # it has ended
    return found


# The same number on all architectures that Linux had in 5.1, but alpha.
_IO_URING_SETUP = 425
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER = 1
# No mitigation of speculative execution beyond what the process has: older kernels slow filtered processes down.
_SPEC_ALLOW = 4
_RETURN_ERROR, _RETURN_ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_PR_SET_NO_NEW_PRIVS = 38


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def refuse_io_uring() -> None:
    """Let io_uring_setup fail with ENOSYS in this thread and all processes that it starts. For a process of one
    thread, as root; another one gives up setuid programs for it. Raises OSError where the kernel has no filters."""
    number = _SECCOMP.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"no filter of system calls on {os.uname().machine}")
    instructions = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, 0),  # the call's number
            (_JUMP_IF_EQUAL, 0, 1, _IO_URING_SETUP),
            (_RETURN, 0, 0, _RETURN_ERROR | errno.ENOSYS),
            (_RETURN, 0, 0, _RETURN_ALLOW),
        )
    )
    held = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(held))

    def install() -> int:
        done: int = _libc.syscall(
            ctypes.c_long(number), ctypes.c_ulong(_SET_MODE_FILTER), ctypes.c_ulong(_SPEC_ALLOW), ctypes.byref(program)
        )
        return 0 if done == 0 else ctypes.get_errno()

    problem = install()
    if problem == errno.EACCES and _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        problem = install()
    if problem:
        raise OSError(problem, f"the kernel takes no filter of system calls: {os.strerror(problem)}")
