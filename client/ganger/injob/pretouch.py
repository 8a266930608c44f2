"""How memory is made reachable before it is needed: a page fault for every 4 KiB takes longer than to copy it."""

from __future__ import annotations

import ctypes
import mmap

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
