"""Keeps a script's repeated output away from its logs and files while it is brought back to its position.

An unmodified script starts from its first line after a restart, and would print and write again what it has written
before. Until it is where it was, standard output and error go to a replay log, and what it writes into files that are
there already goes to nameless files of the same use; at the end the same Python objects write to the real places again.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import types
import weakref
from typing import Any, Callable

from ganger.training.script_files import is_own, package_of

TAIL_BYTES = 8192
# These open a file because their caller wants it open.
_OPEN_FOR_THEIR_CALLER = frozenset({"codecs", "io", "pathlib"})


class Diversion:
    """On from creation until `end`. Works on descriptors, so output of C code is caught too."""

    def __init__(self, log_path: str) -> None:
        self.log_path = log_path
        self._log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._streams = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in self._streams:
            os.dup2(self._log, number)
        # with what opens the real one: only at the end, for a script may open one file for every line it writes
        self._files: weakref.WeakKeyDictionary[Any, Callable[[], int]] = weakref.WeakKeyDictionary()
        self._open = builtins.open
        self._holders: list[Any] = [builtins, io]
        accessor = getattr(sys.modules.get("pathlib"), "_normal_accessor", None)
        if getattr(accessor, "open", None) is self._open:
            self._holders.append(accessor)  # Python 3.10 keeps its own reference there
        self._put(self._open, self._open_diverted)
        self.active = True

    def end(self) -> None:
        """Let everything flow again. Idempotent."""
        if not self.active:
            return
        self.active = False
        _flush()
        for number, real in self._streams:
            os.dup2(real, number)
            os.close(real)
        for file, open_real in list(self._files.items()):
            if not file.closed:
                _continue_in(file, open_real)
        self._put(self._open_diverted, self._open)
        os.close(self._log)

    def tail(self) -> str:
        """The end of what was diverted, for a message about why it never ended."""
        with self._open(self.log_path, "rb") as file:
            file.seek(max(0, os.path.getsize(self.log_path) - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def _put(self, old: Any, new: Any) -> None:
        for holder in self._holders:
            if holder.open == old:
                holder.open = new

    def _open_diverted(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[Any, int], int] | None = None,
    ) -> Any:
        if not self.active or not _writes_again(file, mode):
            return self._open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        open_real, path = opener or os.open, os.path.abspath(file)
        # neither cut off nor new: it goes on from here, even where it was "w" or "x"
        flags = (os.O_RDWR if "+" in mode else os.O_WRONLY) | (os.O_APPEND if "a" in mode else 0) | os.O_CLOEXEC
        opened = self._open(file, mode, buffering, encoding, errors, newline, True, self._nameless)
        self._files[opened] = lambda: open_real(path, flags)
        return opened

    def _nameless(self, *_: Any) -> int:
        import tempfile

        descriptor, path = tempfile.mkstemp(dir=os.path.dirname(self.log_path))
        os.unlink(path)
        return descriptor


def _writes_again(file: Any, mode: str) -> bool:
    """Whether it is for the script that a file is opened which is there already, to be written from its beginning or
    end. What a library writes it may read again: caches, locks."""
    if isinstance(file, int) or not set(mode) & set("wax") or not os.path.isfile(file):
        return False
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and package_of(frame.f_globals.get("__name__")) in _OPEN_FOR_THEIR_CALLER:
        frame = frame.f_back
    name = frame.f_globals.get("__name__") if frame is not None else None
    # a log is only ever written, whoever has set it up
    return package_of(name) == "logging" or is_own(name)


def _continue_in(file: Any, open_real: Callable[[], int]) -> None:
    try:
        file.flush()
        real = open_real()
    except (OSError, ValueError):
        return  # it is not there any more: what was open would not be either
    os.lseek(real, 0, os.SEEK_END)
    os.dup2(real, file.fileno(), inheritable=False)
    os.close(real)
    if file.seekable():
        file.seek(0, os.SEEK_END)  # forgets what was read ahead


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
