"""Processes as the kernel records them: peers of a Unix socket, start times, states, and families."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

# What `user_of` returns for a process with several uids: no user's.
MIXED_UIDS = -1
# Of `stat_fields`: the time of a process's start, in kernel clock ticks.
START_FIELD = 19
# Files of the kernel that freeze a control group, by name: what is written to freeze it, and to thaw it.
FREEZE_WORDS = {"cgroup.freeze": ("1", "0"), "freezer.state": ("FROZEN", "THAWED")}


class Peer(NamedTuple):
    """Ids of a process, as the kernel translates them for the reader."""

    pid: int
    uid: int
    gid: int


class ProcessId(NamedTuple):
    """``start_ticks``: when it started, in kernel clock ticks. So no signal reaches a later process of that pid."""

    pid: int
    start_ticks: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that connected, or that listened, as it was then. Raises OSError."""
    return Peer(*struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in kernel clock ticks; None if there is none. A zombie counts as gone."""
    fields = stat_fields(pid)
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[START_FIELD])


def user_of(pid: int) -> int | None:
    """Return the uid of a process; None if there is none; MIXED_UIDS if its real, effective, saved and file system uids
    differ, as of a program that runs with another user's rights."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            numbers = next((line.split()[1:] for line in file if line.startswith(b"Uid:")), [])
    except OSError:
        return None
    if not numbers:
        return None
    return int(numbers[0]) if len(set(numbers)) == 1 else MIXED_UIDS


def stands_still(pid: int) -> bool:
    """Return whether the kernel runs nothing of a process: stopped, or gone."""
    fields = stat_fields(pid)
    return not fields or fields[0] in (b"T", b"t", b"Z", b"X")


def family(pid: int) -> set[int]:
    """Return a process, those of its session, and all their descendants. What is gone already is left out."""
    fields = {int(name): stat_fields(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found = {one for one, of in fields.items() if of and (one == pid or int(of[3]) == pid)}
    grew = True
    while grew:
        more = {one for one, of in fields.items() if of and int(of[1]) in found} - found
        found |= more
        grew = bool(more)
    return found


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; none if there is no such process.

    The second field of the file, the program's name, may itself hold spaces and parentheses."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except OSError:
        return []
