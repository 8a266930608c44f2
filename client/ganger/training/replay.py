"""What a script that runs again up to its position must not do twice, nor find: its output, and directories it made.

The script would print and write again what it has written before. Until it is where it was, standard output and error
go to a replay log, and what it writes into files that are there already goes to nameless files of the same use; at the
end the same Python objects write to the real places again. What Python still keeps in memory of the script's files is
written out before a rank is saved or moved, for it ends without its exit handlers.

Directories that a script looks for before it makes them, such as its output directory, must not be found by a second
run. The first run marks such a directory by an extended attribute with the number of its job. While a script is run
again, a marked directory of its job and all in it is not there, until the script makes it. The attribute travels with
the directory to every node that sees it. On a file system without such attributes a directory is not marked. A start of
the job that restores nothing may find what an earlier one made: it takes the mark away, for its own second run is to
find that, too.

Imports no torch, as the agent uses this before the first line of a script.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import gc
import io
import os
import stat
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, Callable

from ganger.training.script_frames import is_own, package_of

TAIL_BYTES = 8192
# These open a file because their caller wants it open.
_OPEN_FOR_THEIR_CALLER = frozenset({"codecs", "io", "pathlib"})


class OutputReplay:
    """On from creation until `end`. Works on descriptors, so output of C code is caught too."""

    def __init__(self, log_path: str) -> None:
        self.log_path = log_path
        self._log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._streams = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in self._streams:
            os.dup2(self._log, number)
        # With what opens the real one: only at the end, for a script may open one file for every line it writes.
        self._files: weakref.WeakKeyDictionary[Any, Callable[[], int]] = weakref.WeakKeyDictionary()
        self._open = builtins.open
        self._holders: list[Any] = [builtins, io]
        accessor = getattr(sys.modules.get("pathlib"), "_normal_accessor", None)
        if getattr(accessor, "open", None) is self._open:
            self._holders.append(accessor)  # Python 3.10 keeps its own reference there
        self._put(self._open, self._open_diverted)
        # Called with what is wrong, before a file is made that was there when the script was stopped.
        self.on_new_file: Callable[[str], object] = lambda _: None
        self.active = True

    def end(self) -> None:
        """Let everything flow again. Idempotent."""
        if not self.active:
            return
        self.active = False
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for number, real in self._streams:
            os.dup2(real, number)
            os.close(real)
        for file, open_real in list(self._files.items()):
            if not file.closed:
                _continue_in(file, open_real)
        self._put(self._open_diverted, self._open)
        os.close(self._log)

    def give_up(self) -> None:
        """End it, and print the last of what was diverted: it may tell why the script has not come to its place."""
        with self._open(self.log_path, "rb") as file:
            file.seek(max(0, os.path.getsize(self.log_path) - TAIL_BYTES))
            tail = file.read().decode(errors="replace")
        self.end()
        print(tail, file=sys.stderr)

    def _put(self, old: Any, new: Any) -> None:
        for holder in self._holders:
            if holder.open == old:
                holder.open = new

    def _open_diverted(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        given = dict(zip(("buffering", "encoding", "errors", "newline", "closefd", "opener"), arguments), **options)
        is_diverted = self.active and given.get("opener") is None and _writes_for_script(file, mode)
        if is_diverted and not os.path.isfile(file):
            self.on_new_file(f"it would make {os.fspath(file)!r}, which was not there")
            is_diverted = False
        if not is_diverted:
            return self._open(file, mode, **given)
        path = os.path.abspath(os.fsdecode(file))
        # Neither cut off nor new: it continues from here, even where it was "w" or "x".
        flags = (os.O_RDWR if "+" in mode else os.O_WRONLY) | (os.O_APPEND if "a" in mode else 0) | os.O_CLOEXEC
        opened = self._open(file, mode, **{**given, "closefd": True, "opener": self._nameless})
        self._files[opened] = lambda: os.open(path, flags)
        return opened

    def _nameless(self, *_: Any) -> int:
        import tempfile

        descriptor, path = tempfile.mkstemp(dir=os.path.dirname(self.log_path))
        os.unlink(path)
        return descriptor


def _writes_for_script(file: Any, mode: str) -> bool:
    is_file = bool(set(mode) & set("wax")) and not isinstance(file, int)
    return is_file and not os.path.abspath(os.fsdecode(file)).startswith("/dev/") and opens_for_script(sys._getframe(2))


def opens_for_script(frame: types.FrameType | None) -> bool:
    """Return whether the code in `frame` opens a file for the script. A library may read its caches and locks again."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name != __name__ and package_of(name) not in _OPEN_FOR_THEIR_CALLER:
            break
        frame = frame.f_back
    name = frame.f_globals.get("__name__") if frame is not None else None
    # A log is only ever written, by user code or by a library.
    return package_of(name) == "logging" or is_own(name)


def _continue_in(file: Any, open_real: Callable[[], int]) -> None:
    try:
        file.flush()
        real = open_real()
    except (OSError, ValueError):
        return  # It is not there any more: what was open would not be either
    os.lseek(real, 0, os.SEEK_END)
    os.dup2(real, file.fileno(), inheritable=False)
    os.close(real)
    if file.seekable():
        file.seek(0, os.SEEK_END)  # Forgets what was read ahead


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
        found = {number: _file_to_write(number) for number in map(int, os.listdir("/proc/self/fd"))}
        open_now = {number: file for number, file in found.items() if file is not None and file not in self._ours}
        writers: list[Any] = [reference() for reference in self._writers]
        if open_now != self._known or any(_descriptor_of(writer) not in open_now for writer in writers):
            writers = [item for item in gc.get_objects() if type(item) in _WRITERS] if open_now else []
            writers = [writer for writer in writers if _descriptor_of(writer) in open_now]
            self._known, self._writers = open_now, [weakref.ref(writer) for writer in writers]
        for writer in writers:
            with contextlib.suppress(OSError, ValueError):
                writer.flush()


def _file_to_write(file: int | str) -> _FileId | None:
    """Return the identity of a regular file that outlives this process and is open for writing, else None."""
    try:
        if isinstance(file, int) and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return None
        status = os.stat(file)
    except OSError:
        return None  # Not open, as that of the listing itself
    outlives_us = stat.S_ISREG(status.st_mode) and status.st_nlink > 0
    return (status.st_dev, status.st_ino) if outlives_us else None


def _descriptor_of(writer: Any) -> int:
    try:
        return int(writer.fileno()) if writer.writable() else -1
    except (OSError, ValueError, AttributeError):
        return -1  # Closed, detached, in memory, or no more


ATTRIBUTE = "user.ganger.made_by"


class NotThereError(FileNotFoundError):
    """What the script looks for was not there in its first run."""


class MadeDirectories:
    """Directories that scripts of one job have looked for and made, in one process. Paths are absolute."""

    def __init__(self) -> None:
        self._job = os.environ.get("GANGER_JOB_ID", "")
        self._attempt = os.environ.get("GANGER_ATTEMPT", "1")
        self._has_others = os.environ.get("WORLD_SIZE", "1") != "1"
        self._shown: set[str] = set()
        # The attempt of this job that has made a directory; "" for none.
        self._makers: dict[str, str] = {}

    def mark(self, path: str) -> bool:
        """Mark a directory that was looked for before; False where that cannot be."""
        if not self._job:
            return False
        try:
            os.setxattr(path, ATTRIBUTE, f"{self._job} {self._attempt}".encode())
        except OSError:
            return False
        return True

    def show(self, path: str) -> bool:
        """The script makes this directory, which is there from now on. Return whether it was marked before."""
        is_first = path not in self._shown
        self._shown.add(path)
        return is_first and bool(self._maker_of(path))

    def hide(self, path: str) -> None:
        """Raise NotThereError for a path that the first run did not find."""
        for directory in _upwards(path):
            if directory in self._shown:
                return
            if self._maker_of(directory):
                raise NotThereError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def made_before(self, path: str, own: set[str]) -> str:
        """Return the directory of `path` that another rank of this attempt has made; "" for none. Directories that this
        process has made are in `own`; the marks of earlier attempts are taken away."""
        if not self._job:
            return ""
        for directory in _upwards(path):
            if directory in own:
                return ""
            maker = self._maker_of(directory)
            if maker == self._attempt and self._has_others:
                return directory
            if maker:
                self._makers[directory] = ""
                with contextlib.suppress(OSError):
                    os.removexattr(directory, ATTRIBUTE)
        return ""

    def _maker_of(self, directory: str) -> str:
        maker = self._makers.get(directory)
        if maker is None:
            try:
                job, _, attempt = os.getxattr(directory, ATTRIBUTE).decode(errors="replace").partition(" ")
            except OSError:
                return ""
            maker = self._makers[directory] = attempt if job == self._job else ""
        return maker


def _upwards(path: str) -> Iterator[str]:
    """Yield the path and the directories that it is in, up to the root."""
    while True:
        yield path
        above = os.path.dirname(path)
        if above == path:
            return
        path = above
