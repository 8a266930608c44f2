"""A job of one account that tries what it may not do to the job of another, to the daemon and to the node. Prints how
each attempt ended, as a line of JSON: the name of an error, or "allowed". The standard library only."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

with open(sys.argv[1]) as file:
    WORDS: dict[str, Any] = json.load(file)
LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH = 16
SYS_PIDFD_GETFD = 438


def at(name: str) -> str:
    return str(WORDS[name])


def checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def read(path: str) -> None:
    os.read(os.open(path, os.O_RDONLY), 64)


def make(path: str) -> None:
    os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)


def write(path: str, text: str = "x") -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, text.encode())


def connect(path: str, kind: int = socket.SOCK_STREAM) -> None:
    with socket.socket(socket.AF_UNIX, kind) as one:
        one.connect(path)


def bind(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.bind(path)


def get_descriptor(pid: int) -> None:
    checked(LIBC.syscall(SYS_PIDFD_GETFD, os.pidfd_open(pid), 3, 0))


def read_memory(pid: int) -> None:
    class Part(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

    held = ctypes.create_string_buffer(8)
    ours, theirs = Part(ctypes.addressof(held), 8), Part(0x400000, 8)
    checked(LIBC.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0))


def run_setuid() -> None:
    if "euid=0" not in subprocess.run([at("setuid_id")], capture_output=True, text=True, check=False).stdout:
        raise PermissionError(errno.EPERM, "the program has no more rights than this one")


def raise_limit(limit: int) -> None:
    try:
        resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except ValueError as error:
        raise PermissionError(errno.EPERM, str(error)) from error


def fork_many() -> None:
    made = []
    try:
        for _ in range(1000):
            pid = os.fork()
            if pid == 0:
                signal.pause()
            made.append(pid)
    finally:
        for pid in made:
            os.kill(pid, signal.SIGKILL)
        for pid in made:
            os.waitpid(pid, 0)


def leave_group() -> None:
    for path in WORDS["roots"]:
        write(f"{path}/cgroup.procs", str(os.getpid()))


ANN, DAEMON = int(WORDS["rank"]), int(WORDS["daemon"])

ATTEMPTS: dict[str, Callable[[], Any]] = {
    "read the daemon's identity": lambda: read(at("node_json")),
    "read the node's private key": lambda: read(at("key")),
    "read the master's token": lambda: read(at("token")),
    "list the daemon's state": lambda: os.listdir(at("state")),
    "list the daemon's run directory": lambda: os.listdir(at("run")),
    "read another job's launch, with its environment": lambda: read(at("launch")),
    "read another job's page": lambda: read(at("page")),
    "write another job's page": lambda: write(at("page")),
    "remove another job's page": lambda: os.unlink(at("page")),
    "connect to another job's socket": lambda: connect(at("socket"), socket.SOCK_SEQPACKET),
    "read another job's orders": lambda: os.listdir(at("orders")),
    "read what another job reports": lambda: os.listdir(at("work")),
    "connect to another account's launcher": lambda: connect(at("launcher")),
    "listen in the place of another account's launcher": lambda: bind(f"{at('launcher')}.new"),
    "read another job's log": lambda: read(at("log")),
    "write another job's log": lambda: write(at("log")),
    "link another job's log": lambda: os.link(at("log"), "log"),
    "list another job's checkpoints": lambda: os.listdir(at("checkpoints")),
    "read another job's checkpoint": lambda: read(at("shard")),
    "write another job's checkpoint": lambda: write(at("shard")),
    "rename another job's checkpoints": lambda: os.rename(at("checkpoints"), f"{at('checkpoints')}.mine"),
    "list another job's images": lambda: os.listdir(at("images")),
    "list the names of jobs": lambda: os.listdir(at("names")),
    "list another job's temporary files": lambda: os.listdir(at("temporary")),
    "read a file in another job's /tmp": lambda: read("/tmp/secret"),
    "read another job's segment of shared memory": lambda: read("/dev/shm/secret"),
    "reach another job's /tmp by its process": lambda: os.listdir(f"/proc/{ANN}/root/tmp"),
    "reach another job's /tmp by the daemon's directory": lambda: os.listdir(at("places")),
    "make a job's directory on storage": lambda: os.mkdir(f"{at('storage')}/mine"),
    "remove the storage's token": lambda: os.unlink(f"{at('storage')}/.ganger-token"),
    "put code into what other jobs import": lambda: make(f"{at('inject')}/torch.py"),
    "make a directory in the run directory": lambda: os.mkdir(f"{at('run')}/mine"),
    "make a directory for launchers": lambda: os.mkdir(f"{os.path.dirname(os.path.dirname(at('launcher')))}/0"),
    "rename its own run directory": lambda: os.rename(at("own_run"), f"{at('own_run')}.old"),
    "put an order into its own run directory": lambda: make(f"{at('own_run')}/orders/9.json"),
    "read another process's environment": lambda: read(f"/proc/{ANN}/environ"),
    "see another process's command line": lambda: read(f"/proc/{ANN}/cmdline"),
    "open another process's arena": lambda: os.listdir(f"/proc/{ANN}/fd"),
    "open another process's memory": lambda: read(f"/proc/{ANN}/mem"),
    "open the daemon's memory": lambda: read(f"/proc/{DAEMON}/mem"),
    "take a descriptor of another process": lambda: get_descriptor(ANN),
    "read another process's memory": lambda: read_memory(ANN),
    "trace another process": lambda: checked(LIBC.ptrace(PTRACE_ATTACH, ANN, 0, 0)),
    "trace the daemon": lambda: checked(LIBC.ptrace(PTRACE_ATTACH, DAEMON, 0, 0)),
    "kill another process": lambda: os.kill(ANN, signal.SIGKILL),
    "kill another account's launcher": lambda: os.kill(int(WORDS["launcher_pid"]), signal.SIGKILL),
    "kill the daemon": lambda: os.kill(DAEMON, signal.SIGKILL),
    "kill process 1": lambda: os.kill(1, signal.SIGKILL),
    "open the memory of process 1": lambda: read("/proc/1/mem"),
    "leave its control groups": leave_group,
    "raise its memory limit": lambda: write(at("memory_limit"), "-1"),
    "thaw its control group": lambda: write(at("freezer"), at("thaw_word")),
    "mount": lambda: checked(LIBC.mount(b"none", b"/mnt", b"tmpfs", 0, None)),
    "make a device": lambda: os.mknod("null", 0o20666, os.makedev(1, 3)),
    "open the machine's disk": lambda: read(at("disk")),
    "become root": lambda: os.setuid(0),
    "take root's group": lambda: os.setgroups([0]),
    "become root by a setuid program": run_setuid,
    "give a file away": lambda: os.chown(at("own_file"), 0, 0),
    "run before others": lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
    "open more files than it may": lambda: raise_limit(resource.RLIMIT_NOFILE),
    "leave a dump of its memory": lambda: raise_limit(resource.RLIMIT_CORE),
    "fork without end": fork_many,
}


def attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "allowed"


for name, action in ATTEMPTS.items():
    print(json.dumps({"attempt": name, "result": attempt(action)}), flush=True)
