"""A program that holds units for tests: one JSON command a line on its input, one JSON answer a line on its output.

It stands for the launcher: the parent of each unit's init and of each root. One thread only, because a process that
entered another PID namespace cannot make threads.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

NEWNS, NEWIPC, NEWPID = 0x20000, 0x08000000, 0x20000000
MS_REC, MS_SLAVE = 0x4000, 1 << 19
# Roots get ids from here on: those of a unit's first processes stay free for the programs that enter it.
FIRST_PID = 1000
libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def make_unit() -> int:
    """Return the id of a new unit's init."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    ready, written = os.pipe()
    checked(libc.unshare(NEWPID), "unshare")
    init = os.fork()
    if init == 0:
        checked(libc.unshare(NEWNS | NEWIPC), "unshare")
        checked(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None), "slave")
        checked(libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, b"mode=1777"), "/dev/shm")
        checked(libc.mount(b"proc", b"/proc", b"proc", 0, None), "/proc")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        os.write(written, b".")
        while True:
            signal.pause()
    checked(libc.setns(own, NEWPID), "setns")
    os.close(own)
    os.close(written)
    if os.read(ready, 1) != b".":
        raise OSError("the unit's init did not start")
    os.close(ready)
    return init


def run(init: int, argv: list[str], log: str, logs: dict[str, int], first: int) -> int:
    """Start a command inside a unit. `logs`: files by the descriptors under which it gets them."""
    if first:
        _set_last_pid(init, first - 1)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    inside = os.open(f"/proc/{init}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    checked(libc.setns(inside, NEWPID), "setns")
    child = os.fork()
    if child == 0:
        try:
            entered = [os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("ipc", "mnt")]
            for each in entered:
                checked(libc.setns(each, 0), "setns")
            os.setsid()
            null = os.open("/dev/null", os.O_RDONLY)
            output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(null, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for path, number in logs.items():
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), number)
            os.closerange(3, min(logs.values(), default=3))
            os.execvp(argv[0], argv)
        finally:
            os._exit(127)
    checked(libc.setns(own, NEWPID), "setns")
    os.close(own)
    os.close(inside)
    return child


def _set_last_pid(init: int, last: int) -> None:
    """Set the id after which the unit's next process is numbered: it counts for the namespace of the writer."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    inside = os.open(f"/proc/{init}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    checked(libc.setns(inside, NEWPID), "setns")
    child = os.fork()
    if child == 0:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(last))
        os._exit(0)
    checked(libc.setns(own, NEWPID), "setns")
    os.close(own)
    os.close(inside)
    os.waitpid(child, 0)


def end_unit(init: int) -> None:
    """End a unit. The kernel lets its init go only after this process has reaped all its children in the unit."""
    os.kill(init, signal.SIGKILL)
    while os.waitpid(-1, 0)[0] != init:
        pass


def answer(command: dict[str, Any]) -> Any:
    name = command.pop("do")
    if name == "unit":
        return make_unit()
    if name == "run":
        return run(**command)
    if name == "wait":
        return os.waitstatus_to_exitcode(os.waitpid(command["pid"], 0)[1])
    if name == "end":
        return end_unit(command["init"])
    if name == "children":
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    raise ValueError(name)


def main() -> None:
    for line in sys.stdin:
        try:
            found: Any = {"is": answer(json.loads(line))}
        except (OSError, ValueError) as error:
            found = {"error": repr(error)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
