"""The two ways to touch the words of a control page. A job maps its pages: a load or a store costs nanoseconds. What
looks after many jobs reads and writes files: a mapped file that its job cuts off ends all processes by SIGBUS, a
system call only fails. Aligned words of 8 bytes arrive whole either way."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Union

from ganger.injob.page_layout import PAGE_BYTES

_WORD = struct.Struct("<Q")


class PageError(Exception):
    """A control page cannot be used; the message names the page and the reason."""


class MappedPage:
    """Loads and stores. Takes over ``descriptor``."""

    def __init__(self, descriptor: int, writable: bool = True) -> None:
        try:
            self._memory = mmap.mmap(descriptor, PAGE_BYTES, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self._bytes = memoryview(self._memory)
        self.words = self._bytes.cast("Q")

    def read(self, first: int, count: int) -> Sequence[int]:
        return self.words[first : first + count].tolist()

    def close(self) -> None:
        self.words.release()
        self._bytes.release()
        self._memory.close()


class FilePage:
    """System calls, some 0.3 us each. Takes over ``descriptor``. Reading a page that was cut off raises PageError."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @property
    def words(self) -> FilePage:
        return self

    def __getitem__(self, word: int) -> int:
        return self.read(word, 1)[0]

    def __setitem__(self, word: int, value: int) -> None:
        # Does not repair a truncated file: the next read reports it.
        os.pwrite(self._descriptor, _WORD.pack(value), 8 * word)

    def read(self, first: int, count: int) -> Sequence[int]:
        data = os.pread(self._descriptor, 8 * count, 8 * first)
        if len(data) != 8 * count:
            raise PageError(f"control page {self._path} was cut off by its job")
        return struct.unpack(f"<{count}Q", data)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


Access = Union[MappedPage, FilePage]
# Numbers below 2^64 by index (see `Word`).
Words = Union[memoryview, FilePage]
