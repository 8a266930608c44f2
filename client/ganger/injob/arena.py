"""The memfd in which a parked state waits: how a launcher makes it, and how a process recognises it as its own.

A descriptor's number means something only in a process that inherited the descriptor. A rank's environment reaches
further: into children whose own file may have that number. So the environment names the file too, and its seal is
checked before anything is written.

How memory is made reachable before it is needed: a page fault for every 4 KiB takes longer than to copy it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

VARIABLE = "GANGER_ARENA"


def make_arena(existing: int | None, name: str, size: int) -> int:
    """Return a memfd of at least ``size`` bytes, the existing one if there is one. Raises OSError."""
    if existing is None:
        existing = os.memfd_create(_memfd_name(name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(existing, size)
        # A job that shrank it would kill the daemon that streams from it.
        fcntl.fcntl(existing, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    elif os.fstat(existing).st_size < size:
        os.ftruncate(existing, size)
    return existing


def recover_arena(pid: int, name: str) -> int | None:
    """Find the arena of a rank that another launcher started, among the rank's own descriptors; None without one."""
    wanted = f"/memfd:{_memfd_name(name)} (deleted)"
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return None
    for entry in entries:
        path = f"/proc/{pid}/fd/{entry}"
        try:
            if os.readlink(path) == wanted:
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # closed since it was listed
    return None


def arena_variable(descriptor: int) -> str:
    """Return the value of GANGER_ARENA for a process that inherits ``descriptor``: number, device and inode."""
    status = os.fstat(descriptor)
    return f"{descriptor}:{status.st_dev}:{status.st_ino}"


def inherited_arena(value: str) -> int | None:
    """Return the descriptor that ``value`` of GANGER_ARENA names; None if this process did not inherit the arena."""
    try:
        descriptor, device, inode = map(int, value.split(":"))
        status = os.fstat(descriptor)
        # Only a memfd made with sealing can have this seal.
        is_sealed = bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except (ValueError, OSError, OverflowError):
        return None
    return descriptor if is_sealed and (status.st_dev, status.st_ino) == (device, inode) else None


def _memfd_name(name: str) -> str:
    # The kernel allows 249 bytes; slashes are fine.
    return f"ganger {name}"[:240]


_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
# One call keeps the process from mapping anything else meanwhile, so from allocating too: a few milliseconds each.
_AT_ONCE_BYTES = 16 << 20

# by ctypes, as mmap.madvise keeps the interpreter's lock
_libc = ctypes.CDLL(None)


def enter_pages(mapping: mmap.mmap, size: int) -> None:
    """Enter the first `size` bytes of a writable mapping into the page table, allocated if they are not there yet.

    Others go on meanwhile. Kernels before 5.14 cannot do it, and memory may lack: then the faults come later.
    """
    _advise(mapping, size, _MADV_POPULATE_WRITE)


def leave_pages(mapping: mmap.mmap) -> None:
    """Take a shared mapping's pages out of the page table, so that closing it takes no time. The data stay."""
    _advise(mapping, len(mapping), _MADV_DONTNEED)


def _advise(mapping: mmap.mmap, size: int, advice: int) -> None:
    # while it lives, the mapping cannot be closed
    first = ctypes.c_ubyte.from_buffer(mapping)
    start = ctypes.addressof(first)
    for offset in range(0, size, _AT_ONCE_BYTES):
        length = min(_AT_ONCE_BYTES, size - offset)
        if _libc.madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(length), ctypes.c_int(advice)):
            return
