"""What a script changes outside of its process, and whether a second run would repeat it.

An audit hook sees every file that is opened for writing, renamed or removed, every process that is started, every
database and every connection. Replay can keep out of files what the script writes again by `open`, and skips
`torch.save`; all else would be done twice. Nor may a second run find another answer to what the script looks for: a
file that it made itself, a listing with that file in it, a file that it read before it wrote it. Of directories that it
looks for and then makes (its output directory), a second run is told that they are not there (`made_directories`).

What the agent does and what only the interpreter does (byte code, caches, workers of a DataLoader, temporary files that
are removed again) does not count. C code that opens files by itself (HDF5, safetensors) is not seen.

Imports no torch: it watches from the first line of the script.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from typing import Any, Callable

from ganger.training.made_directories import MadeDirectories, NotThereError
from ganger.training.replay import opens_for_script
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
        self._ours = tuple(os.path.join(os.path.abspath(path), "") for path in _own_directories())
        self._stat = os.stat
        self._acts = self._table()

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
        self._acts = {"open": self._opened_later, "os.mkdir": self._made_later}
        for event in ("os.link", "os.symlink"):
            self._acts[event] = lambda given: self._written(_absolute(given[1]))
        for event in ("os.remove", "shutil.rmtree"):
            self._acts[event] = lambda given: self._lost_later(_resolved(*(*given, -1)[:2]))
        self._acts["os.rename"] = self._renamed_later
        self._acts["os.truncate"] = lambda given: self._lost_later(_resolved(given[0], -1))

    def _opened_later(self, given: Any) -> None:
        name, _, flags = given
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if writes and isinstance(name, (str, bytes, os.PathLike)) and _actor()[0] is not None:
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

    def _table(self) -> dict[str, Callable[[Any], None]]:
        acts: dict[str, Callable[[Any], None]] = {
            "open": self._opened,
            "os.listdir": self._listing,
            "os.scandir": self._listing,
            "os.mkdir": self._directory_made,
            "os.fork": lambda _: self._started("a process"),
            "os.forkpty": lambda _: self._started("a process"),
            "os.system": lambda given: self._started(_text(given[0])),
            "os.exec": lambda given: self._started(_text(given[0])),
            "os.posix_spawn": lambda given: self._started(_text(given[0])),
            "os.spawn": lambda given: self._started(_text(given[1])),
            "pty.spawn": lambda given: self._started(_text(given[0])),
            "subprocess.Popen": lambda given: self._started(_text(given[0])),
            "sqlite3.connect": self._database,
            "socket.connect": lambda given: self._connected("connected to", given[1]),
            "socket.bind": lambda given: self._connected("listened at", given[1]),
            "tempfile.mkstemp": self._temporary_made,
            "tempfile.mkdtemp": self._temporary_made,
            "shutil.rmtree": self._tree_removed,
            "os.rename": lambda given: self._changed("renamed", *given[:2], directories=given[2:4]),
            "os.link": lambda given: self._changed("linked", *given[:2], directories=given[2:4]),
            "os.symlink": lambda given: self._changed("linked", given[1], directories=given[2:3]),
            "os.truncate": lambda given: self._changed("cut off", given[0]),
        }
        for event, verb in (("remove", "removed"), ("rmdir", "removed")):
            acts[f"os.{event}"] = functools.partial(self._changed_one, verb, 1)
        for event, at in (("chmod", 2), ("chown", 3), ("utime", 3), ("setxattr", 9), ("removexattr", 9)):
            acts[f"os.{event}"] = functools.partial(self._changed_one, "changed the attributes of", at)
        return acts

    def _hook(self, event: str, given: Any) -> None:
        act = self._acts.get(event)
        if act is None or not self._is_active:
            return
        try:
            self._mark()
            act(given)
        except NotThereError:
            raise
        except Exception as problem:  # in the middle of any line of the script
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
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if not writes:
            if not str(name).endswith(_CODE):
                self._looks_for(name)
                self._read(_absolute(name))
            return
        path = _absolute(name)
        if self._is_ignored(path) or sys._getframe(2).f_globals.get("__name__") == "tempfile":
            return  # an event of tempfile's own tells of the latter
        actor, place = _actor()
        if actor is None:
            return
        if mode is None or not set(mode) & set("wax") or not opens_for_script(sys._getframe(2)):
            self._refuse(f"{_named(actor)} wrote {name} {place}, which a second run would write again")
            return
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
        """`path` is not there."""
        # a path is resolved through what may be links: that decides nothing
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
        if not _may_exist(sys._getframe(2)):
            self._changed("made", given[0], directories=given[2:3])
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

    def _changed_one(self, verb: str, at: int, given: Any) -> None:
        self._changed(verb, given[0], directories=given[at : at + 1])

    def _changed(self, verb: str, *names: Any, directories: Any = ()) -> None:
        places = [*directories, *([-1] * len(names))]
        paths = [_resolved(name, place) for name, place in zip(names, places)]
        if all(self._is_ignored(path) for path in paths):
            return
        actor, place = _actor()
        if actor is not None:
            named = " to ".join(str(name) if not isinstance(name, int) else path for name, path in zip(names, paths))
            self._refuse(f"{_named(actor)} {verb} {named} {place}, which a second run would do again")

    def _tree_removed(self, given: Any) -> None:
        self._changed("removed", given[0])

    def _started(self, what: str) -> None:
        actor, place = _actor()
        if actor is not None:
            self._refuse(f"{_named(actor)} started {what} {place}, which a second run would do again")

    def _database(self, given: Any) -> None:
        if given[0] not in (":memory:", b":memory:"):
            actor, place = _actor()
            if actor is not None:
                self._refuse(f"{_named(actor)} opened the database {_text(given[0])} {place}, and may write it again")

    def _connected(self, verb: str, address: Any) -> None:
        actor, place = _actor()
        if actor is not None:
            where = ":".join(map(str, address[:2])) if isinstance(address, tuple) else _text(address)
            self._refuse(f"{_named(actor)} {verb} {where} {place}, which a second run would do again")

    def _drawn(self) -> None:
        """Random bytes of the system are about to be drawn."""
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
    home = os.path.expanduser("~")
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or "root"
    environment = os.environ
    return [
        path
        for path in (
            environment.get("GANGER_JOB_DIR", ""),
            os.path.dirname(environment.get("GANGER_PAGE", "")),
            environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"),
            environment.get("TORCHINDUCTOR_CACHE_DIR")
            or os.path.join(environment.get("TMPDIR", "/tmp"), f"torchinductor_{user}"),
            environment.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton"),
            environment.get("MPLCONFIGDIR") or os.path.join(home, ".config", "matplotlib"),
        )
        if path
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
        # numpy draws before it sets the seed of a generator that is given one
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
        name, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        is_ours = name == __name__ or (package_of(name) == "ganger" and frame.f_code.co_name == "_open_diverted")
        is_standard = is_standard_file(file)
        if not is_ours and actor == "":
            if package_of(name) in ("importlib", "zipimport", "linecache", "tokenize", "inspect") or (
                package_of(name) in _ASKS_MACHINE and is_standard
            ):
                return None, ""
            if name == "tempfile" and frame.f_code.co_name == "_get_default_tempdir":
                return None, ""  # it tries once where temporary files can be made
            if not is_standard:
                if package_of(name) == "ganger" or (
                    package_of(name) in ("torch", "triton") and not name.startswith(_TORCH_WRITERS)
                ):
                    return None, ""
                actor = name
        if actor != "" and is_own(name):
            return actor, f"at {os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return actor, "in a thread or at the end"


def _named(actor: str) -> str:
    return "it" if actor == "" or is_own(actor) else package_of(actor)


def _may_exist(frame: Any) -> bool:
    """Return whether a directory is made by a call that is content with one that is there."""
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    is_tolerant = frame is not None and frame.f_code.co_name in ("makedirs", "mkdir")
    return is_tolerant and bool(frame.f_locals.get("exist_ok"))


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
