"""Writes out what a script has written into its files and Python still keeps in memory.

What of it the next process would not write again is lost otherwise: a rank that is saved or moved ends without its exit
handlers.
"""

from __future__ import annotations

import fcntl
import gc
import io
import os
import stat
import weakref
from typing import Any

_WRITERS = frozenset({io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom})
# Device and inode.
_FileId = tuple[int, int]


class Unflushed:
    """The files of this process but those that are ours; `page` is one."""

    def __init__(self, page: str) -> None:
        # Nor are these lost: standard output and error are written line by line.
        self._ours = frozenset([_file_to_write(1), _file_to_write(2), _file_to_write(page)])
        self._known: dict[int, _FileId] = {}
        self._writers: list[weakref.ref[Any]] = []

    def flush(self) -> None:
        """Flush every regular file that is open for writing. The heap is searched (up to tenths of a second where it is
        large) only when others are open than the last time; a file that cannot be flushed, as its disk may be full, is
        left to the script."""
        open_now = self._open_now()
        writers: list[Any] = [reference() for reference in self._writers]
        if open_now != self._known or any(_descriptor_of(writer) not in open_now for writer in writers):
            writers = [item for item in gc.get_objects() if type(item) in _WRITERS] if open_now else []
            writers = [writer for writer in writers if _descriptor_of(writer) in open_now]
            self._known, self._writers = open_now, [weakref.ref(writer) for writer in writers]
        for writer in writers:
            try:
                writer.flush()
            except (OSError, ValueError):
                continue

    def _open_now(self) -> dict[int, _FileId]:
        """Files by descriptor."""
        found = {number: _file_to_write(number) for number in map(int, os.listdir("/proc/self/fd"))}
        return {number: file for number, file in found.items() if file is not None and file not in self._ours}


def _file_to_write(file: int | str) -> _FileId | None:
    """None unless it is one that outlives this process; of a descriptor, unless it is open for writing."""
    try:
        if isinstance(file, int) and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return None
        status = os.stat(file)
    except OSError:
        return None  # not open, as that of the listing itself
    outlives_us = stat.S_ISREG(status.st_mode) and status.st_nlink > 0
    return (status.st_dev, status.st_ino) if outlives_us else None


def _descriptor_of(writer: Any) -> int:
    try:
        return int(writer.fileno()) if writer.writable() else -1
    except (OSError, ValueError, AttributeError):
        return -1  # closed, detached, in memory, or no more
