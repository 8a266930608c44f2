"""Processes as (pid, start time): whether one is alive, how much anonymous memory it has, and signals that cannot
miss."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    pid: int
    start_ticks: int


NOBODY = ProcessId(0, 0)


def start_ticks(pid: int) -> int:
    """Kernel start time in clock ticks; 0 when there is no such process, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # the name in parentheses may hold anything, parentheses too
    fields = stat[stat.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(process: ProcessId) -> bool:
    return process.pid > 0 and process.start_ticks > 0 and start_ticks(process.pid) == process.start_ticks


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signals exactly this process, never a later one of the same pid; False when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def anonymous_bytes(pid: int) -> int | None:
    """Anonymous resident memory of a process; None when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None
