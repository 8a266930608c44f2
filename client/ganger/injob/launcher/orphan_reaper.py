"""The parent of a launcher: what the launcher has started becomes this small process's when the launcher is killed. So
the end of a rank is recorded also where neither launcher nor daemon is left to see it."""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from ganger.injob.launcher.process_record import from_code, is_recorded, record
from ganger.injob.process_identity import START_FIELD, ProcessId, stat_fields

_PR_SET_CHILD_SUBREAPER = 36
_AGAIN_S = 1.0
_PIECE_BYTES = 1 << 16


class ReaperNotes:
    """The launcher's end of the connection: which of its processes are ranks. A reaper that is gone is no error."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def add(self, process: ProcessId, name: str, exit_path: str) -> None:
        """Note a rank, for as long as it runs."""
        self._send([process.pid, process.start_ticks, name, exit_path])

    def remove(self, pid: int) -> None:
        """Note that the launcher has seen the end of a process."""
        self._send([pid])

    def close(self) -> None:
        self._connection.close()

    def _send(self, fields: Sequence[object]) -> None:
        try:
            self._connection.sendall(json.dumps(fields).encode() + b"\n")
        except OSError:
            pass  # killed: the next launcher finds what it can


def leave_reaper() -> ReaperNotes:
    """Fork, and return in the child; the parent stays as the reaper, and ends as the child does once nothing else is
    left. Call it before anything large is imported."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print("ganger launcher: no orphans can be adopted", file=sys.stderr)
    pid = os.fork()
    if pid:
        ours.close()
        _Reaper(pid, its).run()
    its.close()
    return ReaperNotes(ours)


class _Reaper:
    def __init__(self, launcher: int, notes: socket.socket) -> None:
        self._launcher, self._notes = launcher, notes
        self._received = b""
        self._ranks: dict[int, tuple[int, str, str]] = {}
        self._code: int | None = None

    def run(self) -> NoReturn:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._notes.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(read_end, selectors.EVENT_READ)
            selector.register(self._notes, selectors.EVENT_READ)
            is_late = False
            while self._look():
                for key, _ in selector.select(_AGAIN_S if is_late else None):
                    if key.fileobj == read_end:
                        os.read(read_end, _PIECE_BYTES)
                    elif not self._read():
                        selector.unregister(self._notes)
                # what could not be recorded waits, as a zombie
                is_late = self._code is not None
        os._exit(self._code or 0)

    def _read(self) -> bool:
        """Read the launcher's notes; return whether more may come."""
        while True:
            try:
                data = self._notes.recv(_PIECE_BYTES)
            except OSError:  # there is nothing now
                return True
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                try:
                    pid, *rank = json.loads(line)
                    self._ranks.pop(pid, None)
                    if rank:
                        self._ranks[pid] = (int(rank[0]), str(rank[1]), str(rank[2]))
                except (ValueError, TypeError, IndexError):
                    continue  # of an account's launcher, which may send anything
            if not data:
                return False

    def _look(self) -> bool:
        """Reap what has ended; return whether a child is left."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if found is None:
                return True
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            if found.si_pid == self._launcher:
                self._code = code if code >= 0 else 128 - code
            self._read()
            if not self._is_recorded(found.si_pid, code):
                return True
            # Not before: while it is a zombie, no other process has its pid, and its end can be read.
            os.waitpid(found.si_pid, 0)
            self._ranks.pop(found.si_pid, None)

    def _is_recorded(self, pid: int, code: int) -> bool:
        ticks, name, exit_path = self._ranks.get(pid, (0, "", ""))
        fields = stat_fields(pid)
        if not ticks or not fields or int(fields[START_FIELD]) != ticks or is_recorded(exit_path, pid):
            return True
        try:
            record(exit_path, from_code(name, pid, ticks, code))
        except OSError as error:
            print(f"ganger launcher: cannot record the end of {name}: {error}", file=sys.stderr)
            return not os.path.isdir(os.path.dirname(exit_path))
        return True
