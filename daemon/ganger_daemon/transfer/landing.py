"""Where an image arrives: an arena's memory, mapped before the first byte comes, so that receiving only copies.

All of it happens without the interpreter's lock, which the daemon's other threads need meanwhile.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from types import TracebackType

from ganger.injob.pretouch import enter_pages, leave_pages

_LOOK_SECONDS = 0.002
# An arena that has not grown for so long will not: its job may have no memory left. It is filled as the bytes come.
_PATIENCE_SECONDS = 5.0


class Landing:
    """`size` bytes of the arena behind `fd`. Raises OSError, ValueError (the arena is smaller)."""

    def __init__(self, fd: int, size: int) -> None:
        self._mapping = mmap.mmap(fd, size)
        self.view = memoryview(self._mapping)

    def __enter__(self) -> Landing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # the pages first: unmapping holds the lock, and is quick when there is nothing left to unmap
        leave_pages(self._mapping)
        self.view.release()
        self._mapping.close()

    def enter(self, size: int) -> None:
        """Make the first `size` bytes, which are allocated, reachable without a fault."""
        enter_pages(self._mapping, size)


def wait_for_pages(fd: int, size: int, cancelled: threading.Event) -> None:
    """Waits while somebody else allocates the first `size` bytes of a memory file: who allocates a page is charged for
    it, and that has to be the job."""
    there, grown = 0, time.monotonic()
    while not cancelled.wait(_LOOK_SECONDS):
        blocks = os.fstat(fd).st_blocks * 512
        if blocks > there:
            there, grown = blocks, time.monotonic()
        if there >= size or time.monotonic() - grown > _PATIENCE_SECONDS:
            return
