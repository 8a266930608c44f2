"""A small process that starts what is executed: to fork a launcher that has imported PyTorch takes tens of
milliseconds. Forked before anything large is imported, it forks children of the launcher (CLONE_PARENT), each of which
begins only once the launcher has recorded its pid."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import socket
import struct
from collections.abc import Mapping
from typing import Any, Callable, NoReturn

_CLONE_PARENT = 0x00008000
# Number of the clone system call, by machine; elsewhere there is no starter.
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_ANSWER_S = 10.0
_GO = b"g"


class StarterError(Exception):
    """The starter has started no process. ``is_lost``: it does not answer, and can only be ended."""

    def __init__(self, message: str, *, is_lost: bool = False) -> None:
        super().__init__(message)
        self.is_lost = is_lost


class Starter:
    """The launcher's end of the connection. ``end`` it once it is lost (see `StarterError`)."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._pid = pid
        connection.settimeout(_ANSWER_S)

    def hang_up(self) -> None:
        """Close the connection; the starter ends when its last connection is closed."""
        self._connection.close()

    def end(self) -> None:
        """Kill the starter at once, and reap it."""
        self.hang_up()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def start(self, content: Mapping[str, Any], write_end: int, arena: int | None, flags: int = 0) -> tuple[int, int]:
        """Start a child. Return its pid, and the descriptor at which it waits for ``begin``; a child whose descriptor
        is closed before ends. Raises StarterError if no child was started.

        ``flags``: of clone, for a child with new namespaces."""
        go_read, go_write = os.pipe2(os.O_CLOEXEC)
        try:
            descriptors = [go_read, write_end] + ([] if arena is None else [arena])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
            data = json.dumps({"content": content, "flags": flags}).encode()
            self._connection.sendmsg([struct.pack("I", len(data))], rights)
            self._connection.sendall(data)
            (pid,) = struct.unpack("i", _receive(self._connection, 4))
        except (OSError, EOFError, struct.error) as error:
            os.close(go_write)
            raise StarterError(f"the starter does not answer: {error!r}", is_lost=True) from error
        finally:
            os.close(go_read)
        if pid < 0:
            os.close(go_write)
            raise StarterError(f"the starter cannot fork: {os.strerror(-pid)}")
        return pid, go_write


def begin(word: int) -> None:
    """Let a started child continue."""
    try:
        os.write(word, _GO)
    except BrokenPipeError:
        pass  # it was killed meanwhile: its end is noticed as any other's
    finally:
        os.close(word)


def make_starter(run: Callable[[dict[str, Any], int, int | None], NoReturn]) -> Starter | None:
    """Fork a starter, and return it; None on other machine types. ``run``: what its children do with a launch, the
    descriptor for their failures and the descriptor of the arena. Call it before anything large is imported."""
    if platform.machine() not in _SYS_CLONE:
        return None
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            _serve(its, run)
        finally:
            # A child that comes here could not be started: that is no success.
            os._exit(1)
    its.close()
    return Starter(ours, pid)


def _serve(connection: socket.socket, run: Callable[[dict[str, Any], int, int | None], NoReturn]) -> None:
    # Its group's signals are the launcher's to act on; this process ends with its launcher.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    while True:
        try:
            header, rights, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(3 * 4))
            if not header:
                return
            descriptors = list(struct.unpack(f"{len(rights[0][2]) // 4}i", rights[0][2]))
            header += _receive(connection, 4 - len(header)) if len(header) < 4 else b""
            request = json.loads(_receive(connection, struct.unpack("I", header)[0]))
        except (OSError, EOFError):
            return
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        pid = _fork_for_parent(request["flags"])
        if pid == 0:
            connection.close()
            go, write_end, *arena = descriptors
            if os.read(go, 1) != _GO:
                os._exit(127)
            os.close(go)
            run(request["content"], write_end, arena[0] if arena else None)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(struct.pack("i", pid))


def _fork_for_parent(flags: int) -> int:
    """Fork, but as a child of this process's parent. Return the pid, 0 in the child, -errno on failure."""
    python = ctypes.pythonapi
    # Not CDLL, which would let the interpreter go: nothing may happen in between, as in os.fork.
    library = ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid = int(library.syscall(_SYS_CLONE[platform.machine()], flags | _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    return pid if pid > 0 else -ctypes.get_errno()


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("hung up")
        data += more
    return data
