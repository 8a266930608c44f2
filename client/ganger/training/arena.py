"""The arena: host memory that outlives what is in it, shared with the daemon, in which a parked state waits.

A memfd of the launcher. It is allocated ahead of need, because copying into fresh pages costs several times as much.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import torch

from ganger.injob.arena import enter_pages
from ganger.training.image_io import ArenaTooSmallError


class Arena:
    """Maps the memfd at the size it has when it is used: the daemon may grow it while the job runs."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        self._touching: threading.Thread | None = None
        self._pinned = False
        self._touched = 0

    def touch(self, size: int) -> None:
        """Allocate the first `size` bytes in the background, charged to this process's memory limit. The arena may be
        larger than the state will ever be, so no page is touched that will not be used."""
        size = min(size, os.fstat(self.descriptor).st_size)
        if size > self._touched and (self._touching is None or not self._touching.is_alive()):
            self._touched = size
            self._touching = threading.Thread(target=self._allocate, args=(size,), name="ganger-arena", daemon=True)
            self._touching.start()

    def _allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self.descriptor, 0, size)
        except OSError:
            # memory that is not there now may be there when it is needed, and is reported then
            return
        enter_pages(self._map(), size)

    def map_ahead(self, size: int) -> None:
        """Let the first `size` bytes, which are there already or on their way, be reached without page faults."""
        if size > self._touched and self._touching is None:
            self._touched = min(size, os.fstat(self.descriptor).st_size)
            self._touching = threading.Thread(
                target=lambda: enter_pages(self._map(), self._touched), name="ganger-arena", daemon=True
            )
            self._touching.start()

    def view(self, needed_bytes: int = 0) -> memoryview:
        """The whole arena, writable. Raises ArenaTooSmallError."""
        if self._touching is not None:
            self._touching.join()
        size = os.fstat(self.descriptor).st_size
        if size < max(needed_bytes, 1):
            raise ArenaTooSmallError(needed_bytes, size)
        mapping = self._map()
        if not self._pinned:
            self._pin()
        return memoryview(mapping)

    def _map(self) -> mmap.mmap:
        size = os.fstat(self.descriptor).st_size
        if self._mapping is None or len(self._mapping) != size:
            self._mapping = mmap.mmap(self.descriptor, size)
            self._pinned = False
        return self._mapping

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """Bytes [offset, offset + size) as a tensor over the same memory."""
        assert self._mapping is not None, "view() maps the arena first"
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=offset)

    def _pin(self) -> None:
        """Page-lock the mapping, so that devices copy at full speed. Without it copies still work."""
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            return
        assert self._mapping is not None
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)  # type: ignore[no-untyped-call]
        self._pinned = int(status) == 0


def give_free_memory_back() -> None:
    """Release unused memory of the allocators: to the device, and from the C library to the system."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # a C library without it
        pass
