"""What a script changes outside of its process, and whether a second run would repeat it.

An audit hook sees every file that is opened for writing, renamed or removed, every process that is started, every
database and every connection. Replay can keep out of files what the script writes again by `open`, and skips
`torch.save`; all else would be done twice. Nor may a second run find another answer to what the script looks for: a
file that it made itself, a listing with that file in it, a file that it read before it wrote it.

Of directories that it looks for and then makes (its output directory), a second run is told that they are not there
(`replay.MadeDirectories`).

What the agent does and what only the interpreter does (byte code, caches, workers of a DataLoader, temporary files that
are removed again) does not count. C code that opens files by itself (HDF5, safetensors) is not seen.

Imports no torch: it watches from the first line of the script.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
from typing import Any, Callable

from ganger.training.replay import MadeDirectories, NotThereError, opens_for_script
from ganger.training.script_frames import is_own, is_standard_file, package_of

# Beyond that many, what was read is not kept; then writing into any file that was there before is a reason.
MOST_READS = 100_000
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_CODE = (".py", ".pyc", ".so")
# Of torch, these write files for the script; the others keep caches, and start workers and compilers.
_TORCH_WRITERS = tuple(
    f"torch.{name}"
    for name in ("serialization", "distributed.checkpoint", "profiler", "autograd.profiler", "onnx", "package", "hub")
)
# These ask the machine what it is, and run a program to find out.
_ASKS_MACHINE = frozenset({"ctypes", "platform", "uuid", "webbrowser"})
_NUMPY_SEED_BITS = 128
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Of an audit event, where the program that is started is.
_STARTS = {"os.system": 0, "os.exec": 0, "os.posix_spawn": 0, "os.spawn": 1, "pty.spawn": 0, "subprocess.Popen": 0}
# Of an audit event, what is done, and where the paths and the descriptors of their directories are.
_CHANGES = {
    "os.rename": ("renamed", slice(0, 2), slice(2, 4)),
    "os.link": ("linked", slice(0, 2), slice(2, 4)),
    "os.symlink": ("linked", slice(1, 2), slice(2, 3)),
    "os.truncate": ("cut off", slice(0, 1), slice(0)),
    "os.remove": ("removed", slice(0, 1), slice(1, 2)),
    "os.rmdir": ("removed", slice(0, 1), slice(1, 2)),
    "shutil.rmtree": ("removed", slice(0, 1), slice(0)),
    "os.chmod": ("changed the attributes of", slice(0, 1), slice(2, 3)),
    "os.chown": ("changed the attributes of", slice(0, 1), slice(3, 4)),
    "os.utime": ("changed the attributes of", slice(0, 1), slice(3, 4)),
    "os.setxattr": ("changed the attributes of", slice(0, 1), slice(0)),
    "os.removexattr": ("changed the attributes of", slice(0, 1), slice(0)),
}
_Path = str


class OutsideChanges:
    """Of one process. `reason` is why the script cannot be run a second time; '' while it can."""

    def __init__(self) -> None:
        self.reason = ""
        # While the script is run again: called with the reason before the change is made; does not return.
        self.before_repeating: Callable[[str], object] | None = None
        self._is_active = False
        self._is_settled = False
        # Before the first pass: what is drawn later is part of the state, or of no further use.
        self.is_in_setup = True
        self._reads: set[_Path] = set()
        self._listed: set[_Path] = set()
        self._missing: set[_Path] = set()
        self._made: set[_Path] = set()
        # Directories that were looked for, once they are made; with the reason to give where they cannot be marked.
        self._unmarked: dict[_Path, str] = {}
        self._directories = MadeDirectories()
        self._temporary: set[_Path] = set()
        # Temporary files of the script that were there at the last `check`.
        self.held: set[_Path] = set()
        self._ours = tuple(os.path.join(os.path.abspath(path), "") for path in _own_directories() if path)
        self._stat = os.stat
        self._acts: dict[str, Callable[[Any], None]] = {
            "open": self._opened,
            "os.listdir": self._listing,
            "os.scandir": self._listing,
            "os.mkdir": self._directory_made,
            "os.fork": lambda _: self._acted("started a process"),
            "os.forkpty": lambda _: self._acted("started a process"),
            "sqlite3.connect": self._database,
            "socket.connect": lambda given: self._acted(f"connected to {_address(given[1])}"),
            "socket.bind": lambda given: self._acted(f"listened at {_address(given[1])}"),
            "tempfile.mkstemp": self._temporary_made,
            "tempfile.mkdtemp": self._temporary_made,
        }
        for event, at in _STARTS.items():
            self._acts[event] = lambda given, at=at: self._acted(f"started {_text(given[at])}")  # type: ignore[misc]
        for event, (verb, names, places) in _CHANGES.items():
            self._acts[event] = functools.partial(self._changed, verb, names, places)

    def watch(self) -> None:
        """From now on; a hook of the interpreter cannot be removed."""
        self._is_active = True
        sys.addaudithook(self._hook)
        os.register_at_fork(after_in_child=self.end)
        for name in ("stat", "lstat"):
            _note_lookups(name, self._looks_for, self._looked_for)
        _note_drawn(self._drawn)

    def end(self) -> None:
        self._is_active = False

    def settle(self) -> None:
        """What the script does from now on is not done again. It must not change what is, though: what was read, looked
        for or listed before is to be found alike by a second run."""
        if self._is_settled:
            return
        self._is_settled = True
        self.before_repeating = None
        self._acts = {
            "open": self._opened_later,
            "os.mkdir": self._made_later,
            "os.link": lambda given: self._written(_absolute(given[1])),
            "os.symlink": lambda given: self._written(_absolute(given[1])),
            "os.remove": lambda given: self._lost_later(_resolved(given[0], given[1])),
            # Before Python 3.11 without a descriptor.
            "shutil.rmtree": lambda given: self._lost_later(_resolved(*(*given, -1)[:2])),
            "os.truncate": lambda given: self._lost_later(_resolved(given[0], -1)),
            "os.rename": self._renamed_later,
        }

    def _opened_later(self, given: Any) -> None:
        name, _, flags = given
        if flags & _WRITES and isinstance(name, (str, bytes, os.PathLike)) and _actor()[0] is not None:
            self._written(_absolute(name))

    def _made_later(self, given: Any) -> None:
        path = _resolved(given[0], given[2])
        if not (self._exists(path) or self._is_ignored(path)):
            self._note_directory(path)

    def _renamed_later(self, given: Any) -> None:
        self._lost_later(_resolved(given[0], given[2]))
        self._written(_resolved(given[1], given[3]))

    def _lost_later(self, path: _Path) -> None:
        is_listed = os.path.dirname(path) in self._listed and path not in self._made
        if (path in self._reads or is_listed) and not self._is_ignored(path) and _actor()[0] is not None:
            verb = "read" if path in self._reads else "listed"
            self._refuse(f"it {verb} {path} before it removed it, and a second run would not find it")

    def check(self) -> str:
        """Return the reason, that a temporary file of the script is still there included."""
        self._mark()
        if self.held and not self.reason:
            self.held = {path for path in self.held if self._exists(path)}
            if self.held:
                return f"it keeps temporary files ({min(self.held)}), which a second run would not find"
        return self.reason

    def saved(self, path: Any) -> None:
        """torch.save is about to write `path`, which no hook reports."""
        self._written(_absolute(path))

    def loaded(self, path: Any) -> None:
        self._looks_for(path)
        self._read(_absolute(path))

    # -- the hook

    def _hook(self, event: str, given: Any) -> None:
        act = self._acts.get(event)
        if act is None or not self._is_active:
            return
        try:
            self._mark()
            act(given)
        except NotThereError:
            raise
        except Exception as problem:  # In the middle of any line of the script
            self._refuse(f"what it changes outside cannot be followed ({type(problem).__name__}: {problem})")

    def _refuse(self, reason: str) -> None:
        if self.before_repeating is not None:
            self.before_repeating(reason)
        if not self.reason:
            self.reason = reason

    # -- what the script does

    def _opened(self, given: Any) -> None:
        name, mode, flags = given
        if isinstance(name, int) or name is None:
            return
        if not flags & _WRITES:
            if not str(name).endswith(_CODE):
                self._looks_for(name)
                self._read(_absolute(name))
            return
        path = _absolute(name)
        if self._is_ignored(path) or sys._getframe(2).f_globals.get("__name__") == "tempfile":
            return  # An event of tempfile's own tells of the latter
        if mode is None or not set(mode) & set("wax") or not opens_for_script(sys._getframe(2)):
            self._acted(f"wrote {name}", "which a second run would write again")
        elif _actor()[0] is not None:
            self._written(path)

    def _read(self, path: _Path) -> None:
        if self._is_settled:
            return
        if self._exists(path):
            if len(self._reads) < MOST_READS:
                self._reads.add(path)
        else:
            self._missing.add(path)

    def _looks_for(self, path: Any) -> None:
        """Raise FileNotFoundError while the script is run again, where the first run did not find the path."""
        if not self._is_active or self._is_settled or not isinstance(path, (str, os.PathLike)):
            return
        if self.before_repeating is not None:
            self._directories.hide(_absolute(path))
        elif (made := self._directories.made_before(_absolute(path), self._made)) and not _is_in_makedirs():
            self._refuse(f"it looked for {path} after another of its ranks made {made}")

    def _looked_for(self, path: Any) -> None:
        # A path is resolved through what may be links: that decides nothing.
        is_resolving = sys._getframe(2).f_code.co_name in ("_joinrealpath", "realpath")
        is_noted = self._is_active and not self._is_settled and not is_resolving
        if is_noted and isinstance(path, (str, os.PathLike)) and not _is_in_makedirs():
            self._missing.add(_absolute(path))

    def _listing(self, given: Any) -> None:
        path = given[0]
        if isinstance(path, int) or _actor()[0] is None:
            return
        self._looks_for("." if path is None else path)
        self._listed.add(_absolute("." if path is None else path))

    def _written(self, path: _Path) -> None:
        """The script writes by a way that replay keeps out of files. Is it something that it looked for before?"""
        if self._is_ignored(path):
            return
        reason = ""
        if not self._exists(path) and path not in self._made:
            reason = self._found_later(path)
            self._made.add(path)
        elif path in self._reads or (len(self._reads) >= MOST_READS and path not in self._made):
            reason = f"it read {path} before it wrote it, and a second run would read what it wrote"
        if reason:
            self._refuse(reason)

    def _found_later(self, path: _Path) -> str:
        if path in self._missing:
            return f"it looked for {path} before it made it, and a second run would find it"
        if os.path.dirname(path) in self._listed:
            return f"it listed {os.path.dirname(path)} before it made {os.path.basename(path)} there"
        return ""

    def _directory_made(self, given: Any) -> None:
        path = _resolved(given[0], given[2])
        is_new = self._directories.show(path) or not self._exists(path)
        if self._is_ignored(path) or _actor()[0] is None:
            return
        frame: Any = sys._getframe(2)
        is_tolerant = frame.f_code.co_name in ("makedirs", "mkdir") and frame.f_locals.get("exist_ok")
        if not is_tolerant:
            self._changed("made", slice(0, 1), slice(2, 3), given)
        elif is_new and path not in self._made:
            self._note_directory(path)

    def _note_directory(self, path: _Path) -> None:
        """A directory is about to be made. What was looked for there before is not to be found by a second run."""
        reason = self._found_later(path)
        self._made.add(path)
        inside = os.path.join(path, "")
        absent = {one for one in self._missing | self._listed if one == path or one.startswith(inside)}
        if os.path.dirname(path) in self._listed:
            self._refuse(reason)
        elif absent:
            self._missing -= absent
            self._listed -= absent
            self._unmarked[path] = reason or f"it looked for {min(absent)} before it made {path}"

    def _mark(self) -> None:
        """Mark the directories that were looked for before, as soon as they are there."""
        due, self._unmarked = self._unmarked, {}
        for path, reason in due.items():
            if not self._exists(path):
                self._unmarked[path] = reason
            elif not self._directories.mark(path):
                self._refuse(reason)

    def _changed(self, verb: str, names: slice, places: slice, given: Any) -> None:
        named = list(itertools.zip_longest(given[names], given[places], fillvalue=-1))
        paths = [_resolved(name, place) for name, place in named]
        if not all(map(self._is_ignored, paths)):
            shown = (path if isinstance(name, int) else str(name) for (name, _), path in zip(named, paths))
            self._acted(f"{verb} {' to '.join(shown)}")

    def _database(self, given: Any) -> None:
        if given[0] not in (":memory:", b":memory:"):
            self._acted(f"opened the database {_text(given[0])}", "and may write it again")

    def _acted(self, what: str, consequence: str = "which a second run would do again") -> None:
        actor, place = _actor()
        if actor is not None:
            # A library acts for the script.
            named = "it" if actor == "" or is_own(actor) else package_of(actor)
            self._refuse(f"{named} {what} {place}, {consequence}")

    def _drawn(self) -> None:
        if not (self._is_active and self.is_in_setup):
            return
        actor, place = _actor()
        if actor is not None and is_own(actor) and place.startswith("at "):
            self._refuse(f"it drew random numbers of the system {place}, which a second run would draw otherwise")

    def _temporary_made(self, given: Any) -> None:
        path = _absolute(given[0])
        self._temporary.add(path)
        actor, _ = _actor()
        if actor is not None and is_own(actor):
            self.held.add(path)

    # -- paths

    def _exists(self, path: _Path) -> bool:
        try:
            self._stat(path)
        except (OSError, ValueError):
            return False
        return True

    def _is_ignored(self, path: _Path) -> bool:
        if path.startswith(_NOT_FILES) or path.startswith(self._ours) or f"{os.sep}__pycache__" in path:
            return True
        return any(path == made or path.startswith(made + os.sep) for made in self._temporary)


def _own_directories() -> list[str]:
    """Directories of the agent and of caches, which another run finds as this one left them."""
    home, environment = os.path.expanduser("~"), os.environ
    user = environment.get("USER") or environment.get("LOGNAME") or "root"
    inductor = os.path.join(environment.get("TMPDIR", "/tmp"), f"torchinductor_{user}")
    return [
        environment.get("GANGER_JOB_DIR", ""),
        os.path.dirname(environment.get("GANGER_PAGE", "")),
        environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"),
        environment.get("TORCHINDUCTOR_CACHE_DIR") or inductor,
        environment.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton"),
        environment.get("MPLCONFIGDIR") or os.path.join(home, ".config", "matplotlib"),
    ]


def _note_lookups(name: str, before: Callable[[Any], None], when_missing: Callable[[Any], None]) -> None:
    """Have both called at each call of a function of `os`, with its path: they may raise FileNotFoundError."""
    original = getattr(os, name)

    @functools.wraps(original)
    def noted(path: Any, *arguments: Any, **options: Any) -> Any:
        is_path = options.get("dir_fd") is None
        try:
            if is_path:
                before(path)
            return original(path, *arguments, **options)
        except (FileNotFoundError, NotADirectoryError):
            if is_path:
                when_missing(path)
            raise

    for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if original in supported:
            supported.add(noted)
    setattr(os, name, noted)
    accessor = getattr(sys.modules.get("pathlib"), "_normal_accessor", None)
    if getattr(accessor, name, None) is original:
        setattr(accessor, name, noted)  # Python 3.10 keeps its own reference there


def _note_drawn(note: Callable[[], None]) -> None:
    """Call `note` before os.urandom is used, as by uuid4, secrets, SystemRandom and generators without a seed."""
    original = os.urandom

    @functools.wraps(original)
    def noted(size: int, /) -> bytes:
        caller = sys._getframe(1)
        # Numpy draws before it sets the seed of a generator that is given one.
        if caller.f_code.co_name != "getrandbits" or caller.f_locals.get("k") != _NUMPY_SEED_BITS:
            note()
        return original(size)

    for holder, name in ((os, "urandom"), (random, "_urandom")):
        setattr(holder, name, noted)


def _actor() -> tuple[str | None, str]:
    """The module that makes the present change, and the line of the script where; None for what does not count."""
    actor: str | None = ""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name, file, function = str(frame.f_globals.get("__name__")), frame.f_code.co_filename, frame.f_code.co_name
        package = package_of(name)
        is_ours = name == __name__ or (package == "ganger" and function == "_open_diverted")
        if actor == "" and not is_ours:
            is_standard = is_standard_file(file)
            is_asking = package in _ASKS_MACHINE and is_standard
            # It tries once where temporary files can be made.
            is_trying = name == "tempfile" and function == "_get_default_tempdir"
            if is_asking or is_trying or package in ("importlib", "zipimport", "linecache", "tokenize", "inspect"):
                return None, ""
            if not is_standard:
                is_inside = package in ("torch", "triton") and not name.startswith(_TORCH_WRITERS)
                if is_inside or package == "ganger":
                    return None, ""
                actor = name
        if actor != "" and is_own(name):
            return actor, f"at {os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return actor, "in a thread or at the end"


def _is_in_makedirs() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("makedirs", "mkdir") and package_of(frame.f_globals.get("__name__")) in ("os", "pathlib"):
            return True
        if not is_standard_file(frame.f_code.co_filename) and name not in ("noted", "_looked_for"):
            return False
        frame = frame.f_back
    return False


def _absolute(path: Any) -> _Path:
    return os.path.abspath(os.fsdecode(path))


def _resolved(path: Any, directory: Any) -> _Path:
    """The absolute path of a file given by a descriptor, or by a name below one."""
    try:
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}")
        if isinstance(directory, int) and directory >= 0:
            return os.path.join(os.readlink(f"/proc/self/fd/{directory}"), os.fsdecode(path))
    except OSError:
        return "/dev/null"
    return _absolute(path)


def _text(given: Any) -> str:
    if isinstance(given, (list, tuple)):
        return " ".join(map(_text, given))
    return os.fsdecode(given) if isinstance(given, (bytes, os.PathLike)) else str(given)


def _address(given: Any) -> str:
    return ":".join(map(str, given[:2])) if isinstance(given, tuple) else _text(given)
