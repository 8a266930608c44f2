"""Launchers of this node: one per user, interpreter, library and relevant environment, started when first needed. They
outlive the daemon; one that died is replaced at the next use and its ranks are adopted; one with older code (see
`code_of`) serves the ranks it has and gets no new ones."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import ganger
from ganger.injob.bootstrap import prepare_inject_directory
from ganger.injob.launcher.client import Launcher, LauncherError, start_launcher
from ganger.injob.launcher.process_record import startup_variables
from ganger.launch_command import starts_python
from ganger.text import os_failure

from ganger_daemon.node.accounts import OR_ALL_AS_ROOT, Account, Becoming, closed_step, give_directory, start_as
from ganger_daemon.node.log_store import bound_log
from ganger_daemon.node.process_identity import ProcessId, RankProcess, has_other_user, parent_of

log = logging.getLogger(__name__)

# Besides what an interpreter reads once: what decides which code it finds. Everything else is set after the fork.
_ALSO_MATTERS = ("PYTHONPATH",)
# Of all jobs that give none: each attempt of a job has the same order of sets, and all jobs share a launcher.
HASH_SEED = "0"
_HELPFUL = ("PATH", "HOME", "USER", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX")
# A launcher ends after so long without a connection and without ranks.
_IDLE_S = 120.0
# A launcher that no gang needs is let go after this.
_UNUSED_S = 120.0
_STOP_S = 0.5
# One that is importing answers when it is done.
_LIST_S = 10.0
_LEAST_S = 0.05
# Of those that gangs of an account have alone, so many import PyTorch ahead: each takes more than 100 MiB for it.
_MOST_PRELOADED = 16
# Most that the log of a launcher takes of the run directory.
_LOG_BYTES = 4 << 20
# How long the log of a launcher that has ended is kept after its last line, for people.
_LOG_KEPT_S = 3600.0
# Of other accounts, the newest count.
_MOST_LAUNCHERS = 1_000

__all__ = ["LauncherError", "Launchers", "interpreter_of"]

_PARTS = ("injob", "protocol", "training")
# In the place of a path, so that the launcher has a name that no job's has.
_OF_RESTORER = ":restorer"


def code_of(package: Path | None = None) -> str:
    """Eight hex digits that change with any source file a launcher imports ahead of time.

    Looks at every file's size and time at each call, and at the contents only when one of those changed."""
    root = package or Path(ganger.__file__).parent
    files = sorted([root / "__init__.py", *(path for part in _PARTS for path in (root / part).rglob("*.py"))])
    facts = []
    for path in files:
        try:
            state = path.stat()
        except OSError:
            continue  # it went between the listing and the look: the next call sees that
        facts.append((path, state.st_size, state.st_mtime_ns))
    return _digest(root, tuple(facts))


@lru_cache(maxsize=4)
def _digest(root: Path, facts: tuple[tuple[Path, int, int], ...]) -> str:
    found = hashlib.sha256()
    for path, _, _ in facts:
        found.update(str(path.relative_to(root)).encode() + b"\0")
        try:
            found.update(path.read_bytes())
        except OSError:
            found.update(b"\0")
    return found.hexdigest()[:8]


def children_of(launcher: Launcher) -> dict[str, RankProcess]:
    """Ranks by name. Raises LauncherError."""
    found: dict[str, RankProcess] = {}
    children = launcher.list()
    is_foreign = launcher.uid != os.geteuid()
    # ranks may have a parent that is the launcher's child
    own = {launcher.pid, *(int(entry["pid"]) for entry in children if entry["kind"] == "root")}
    for entry in children:
        if entry["kind"] == "rank":
            process = ProcessId(int(entry["pid"]), int(entry["start_ticks"]))
            # A launcher of another account speaks for that account's processes only.
            if is_foreign and has_other_user(process.pid, launcher.uid):
                continue
            found[str(entry["name"])] = RankProcess(process, parent_of(process.pid) in own)
    return found


def interpreter_of(
    command: tuple[str, ...], environment: Mapping[str, str], directory: str, otherwise: str = sys.executable
) -> str:
    """The Python a command starts, as an absolute path; `otherwise` for a command that is no Python."""
    if not starts_python(command):
        return otherwise
    if os.sep in command[0]:
        path = os.path.normpath(os.path.join(directory, command[0]))
        return path if _is_program(path) else otherwise
    places = environment.get("PATH", os.defpath).split(os.pathsep)
    paths = (os.path.join(directory, place, command[0]) for place in places if place)
    return next(filter(_is_program, paths), otherwise)


def _is_program(path: str) -> bool:
    # not by os.access, which judges by this process's user and not by the one that looks (`seen_by`)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(mode) and bool(mode & 0o111)


_OLDEST = (3, 9)


def interpreter_for_accounts() -> str:
    """Return a Python that every account can execute, for commands that are no Python: this process's, else the
    system's. Blocks. Raises ValueError."""
    system = shutil.which("python3", path=os.defpath)
    for path in filter(None, (sys.executable, system)):
        if closed_step(Path(path)):
            continue
        test = f"import sys; sys.exit(sys.version_info < {_OLDEST})"
        if path == sys.executable or subprocess.run([path, "-I", "-c", test], check=False).returncode == 0:
            return path
    raise ValueError(
        f"jobs of other accounts need a Python that they can execute: {closed_step(Path(sys.executable))}, and there is"
        f" no python3 of the system: install one, {OR_ALL_AS_ROOT}"
    )


class Launchers:
    """Thread-safe; every call may block for as long as a launcher takes to start. `interpreter`: of launchers for
    commands that are no Python."""

    def __init__(self, directory: Path, inject: Path, preload: bool = True, interpreter: str = sys.executable) -> None:
        self.interpreter = interpreter
        # Returns the cgroup.procs files that an account's launcher enters; what it starts it takes with it.
        self.enclose: Callable[[Account], Sequence[str]] = lambda account: ()
        # Of each rank; a launcher of an account has them from its start.
        self.limits: Mapping[str, tuple[int, int]] = {}
        self._directory = directory
        self._inject = inject
        self._preload = preload
        self._lock = threading.Lock()
        self._known: dict[str, Launcher] = {}
        self._used_at: dict[str, float] = {}
        self._starting: dict[str, threading.Lock] = {}
        self._warm = ""
        self._is_closed = False
        # Gang that a launcher serves alone, by the launcher's name.
        self._holders: dict[str, str] = {}

    @property
    def inject(self) -> str:
        return prepare_inject_directory(str(self._inject))

    @staticmethod
    def key(
        interpreter: str, environment: Mapping[str, str], account: Account | None = None, *, is_private: bool = False
    ) -> str:
        """Return the name of a launcher. Another account's begins with its uid, as its socket's directory.
        `is_private`: it has one gang at a time (`take`)."""
        # `python` and `python3` of one directory are one interpreter; links in different ones are environments apart
        place = os.path.dirname(os.path.abspath(interpreter))
        # one that has left a group gets another launcher
        owner = "" if account is None else str((account.uid, account.gid, account.groups, *(["private"] * is_private)))
        parts = [owner, place, os.path.realpath(interpreter)]
        parts += [f"{name}={value}" for name, value in sorted(_base(environment).items())]
        name = f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}-{code_of()}"
        return name if account is None else f"{account.uid}/{name}"

    def take(self, key: str, gang: str) -> str:
        """Return the name of the first launcher of this kind that no other gang holds, and let the gang hold it: its
        mounts are the gang's until `give_up`. After the first ones its number is part of the name."""
        kind, _, code = key.rpartition("-")
        with self._lock:
            names = itertools.chain((key,), (f"{kind}.{number}-{code}" for number in itertools.count(1)))
            found = next(name for name in names if self._holders.get(name, gang) == gang)
            self._holders[found] = gang
        return found

    def hold(self, key: str, gang: str) -> None:
        """Note that a gang has held a launcher under a former daemon."""
        with self._lock:
            self._holders[key] = gang

    def give_up(self, key: str, gang: str) -> None:
        """Let other gangs have a launcher that this one has held."""
        with self._lock:
            if self._holders.get(key) == gang:
                del self._holders[key]

    def socket_path(self, key: str) -> Path:
        return self._directory / f"{key}.sock"

    @staticmethod
    def is_own(key: str) -> bool:
        """Return whether a launcher is this process's user's."""
        return bool(key) and "/" not in key

    @property
    def restorer_key(self) -> str:
        """Name of the launcher that restores the images of accounts."""
        return self.key(sys.executable, {"PYTHONPATH": _OF_RESTORER})

    def restorer(self) -> tuple[str, Launcher]:
        """Return the launcher that restores the images of accounts, and its name: nothing of a user's runs in it.
        Raises LauncherError."""
        key = self.restorer_key
        return key, self.get(key, sys.executable, {}, preload=False)

    def running_restorer(self) -> Launcher | None:
        """Return the launcher that restores the images of accounts, if it runs."""
        return self.running(self.restorer_key)

    def running(self, key: str) -> Launcher | None:
        """A launcher that answers now, or None. Starts nothing."""
        launcher = self._connected(key)
        if launcher is None:
            return None
        try:
            launcher.info()
        except (LauncherError, OSError):
            with self._lock:
                if self._known.get(key) is launcher:
                    del self._known[key]
            launcher.close()
            return None
        with self._lock:
            self._used_at[key] = time.monotonic()
        return launcher

    def _connected(self, key: str) -> Launcher | None:
        """Return the one connection to a launcher, made if there is none; None where none listens, or once closed."""
        with self._lock:
            known = self._known.get(key)
        if known is not None or not self.socket_path(key).exists():
            return known
        try:
            new = Launcher(str(self.socket_path(key)), uid=_uid_of(key))
        except LauncherError:
            return None
        with self._lock:
            # another thread may have connected meanwhile
            launcher = None if self._is_closed else self._known.setdefault(key, new)
        if launcher is not new:
            new.close()
        return launcher

    def _sockets(self) -> list[tuple[Path, int]]:
        """Return the sockets of all launchers, and the uids of their users."""
        own = [(path, os.geteuid()) for path in sorted(self._directory.glob("*.sock"))]
        # By their logs, as an account may make any number of sockets in its directory.
        logs = sorted(self._directory.glob("*-*-*.log"), key=lambda path: path.stat().st_mtime)
        keys = [_key_of(log) for log in logs[-_MOST_LAUNCHERS:]]
        found = [(self.socket_path(key), _uid_of(key)) for key in keys]
        return own + [(path, uid) for path, uid in found if uid != os.geteuid() and os.path.lexists(path)]

    def children(self) -> dict[int, dict[str, RankProcess]]:
        """Return the ranks of all launchers, by uid and name, also those that a former daemon did not note."""
        found: dict[int, dict[str, RankProcess]] = {}
        left: dict[int, float] = {}
        for path, uid in self._sockets():
            began = time.monotonic()
            try:
                # all of an account's together: they could keep a daemon from starting
                with Launcher(str(path), max(left.get(uid, _LIST_S), _LEAST_S), uid) as launcher:
                    found.setdefault(uid, {}).update(children_of(launcher))
            except (LauncherError, OSError) as error:
                log.debug("launcher does not answer", extra={"key": path.stem, "cause": str(error)})
            if uid != os.geteuid():
                left[uid] = left.get(uid, _LIST_S) - (time.monotonic() - began)
        return found

    def warm_up(self) -> None:
        """Start a launcher for our own interpreter before any job, if PyTorch can be imported. Does not block."""
        if self._preload and importlib.util.find_spec("torch") is not None:
            threading.Thread(target=self._warm_up, name="launcher-warm-up", daemon=True).start()

    def _warm_up(self) -> None:
        environment = {name: value for name, value in os.environ.items() if _travels(name)}
        environment.setdefault("PYTHONHASHSEED", HASH_SEED)
        self._warm = self.key(sys.executable, environment)
        try:
            self.get(self._warm, sys.executable, environment)
        except (LauncherError, OSError) as error:
            log.warning("no launcher ahead of time", extra={"error": str(error)})

    def let_go(self, used: Collection[str]) -> None:
        """Disconnect from launchers that no gang needs any more. They end by themselves once they have no ranks."""
        now = time.monotonic()
        with self._lock:
            unused = [
                key
                for key in self._known
                if key not in used and key != self._warm and now - self._used_at.get(key, now) > _UNUSED_S
            ]
            for key in unused:
                self._known.pop(key).close()

    def tend_logs(self) -> None:
        """Keep the logs of launchers small (what a script prints before it is settled, and whatever an account's
        launcher writes), and remove those of launchers that are gone. Blocks. Raises OSError."""
        latest = time.time() - _LOG_KEPT_S
        for path in self._directory.glob("*.log"):
            bound_log(path, _LOG_BYTES)
            if path.stat().st_mtime < latest:
                self._remove_log(path)

    def _remove_log(self, path: Path) -> None:
        """Remove the log of a launcher that has ended: it has removed its socket."""
        key = _key_of(path)
        with self._lock:
            starting = self._starting.setdefault(key, threading.Lock())
        # A launcher that starts has no socket yet.
        if starting.acquire(blocking=False):
            try:
                if not os.path.lexists(self.socket_path(key)):
                    path.unlink()
            finally:
                starting.release()

    def stop_idle(self, older_only: bool) -> None:
        """End launchers without ranks: all, or those with other code than ours. Others end with their last rank."""
        ours = code_of()
        for path, uid in self._sockets():
            if older_only and path.stem.endswith(f"-{ours}"):
                continue
            try:
                # one that still imports finds the request when it is done
                with Launcher(str(path), _STOP_S, uid) as launcher:
                    launcher.stop()
                log.info("idle launcher stopped", extra={"key": path.stem})
            except (LauncherError, OSError) as error:
                log.debug("launcher goes on", extra={"key": path.stem, "cause": str(error)})

    def close(self) -> None:
        """Disconnect for good; launchers go on."""
        with self._lock:
            self._is_closed = True
            for launcher in self._known.values():
                launcher.close()
            self._known.clear()

    def get(
        self,
        key: str,
        interpreter: str,
        environment: Mapping[str, str],
        account: Account | None = None,
        *,
        preload: bool = True,
    ) -> Launcher:
        """A launcher that answers, started if need be: by an account's own program where one is given. `preload`:
        false for one that starts no scripts. Raises LauncherError when none can be started."""
        with self._lock:
            starting = self._starting.setdefault(key, threading.Lock())
        with starting:
            launcher = self.running(key)
            if launcher is not None:
                return launcher
            log.info("launcher starts", extra={"key": key, "interpreter": interpreter})
            base, inject = _base(environment), self.inject
            groups: tuple[str, ...] = ()
            if account is not None:
                _make_place(self._directory, account)
                groups = tuple(self.enclose(account))
                base.update(HOME=account.home, USER=account.name, LOGNAME=account.name)
            for name in _HELPFUL:
                if name in environment or (account is None and name in os.environ):
                    base[name] = environment.get(name, os.environ.get(name, ""))
            base.setdefault("PATH", os.defpath)

            def start(
                command: Sequence[str], variables: Mapping[str, str], output: BinaryIO
            ) -> subprocess.Popen[bytes]:
                assert account is not None, "without one it starts by itself"
                return start_as(Becoming(account, command, variables, groups, self.limits), inject, output)

            start_launcher(
                interpreter,
                str(self.socket_path(key)),
                inject=inject,
                env=base,
                # Beside the directory of an account, which could lead it elsewhere.
                log=str(self._directory / f"{key.replace('/', '-')}.log"),
                idle_s=_IDLE_S,
                preload=self._preload and preload and _number_of(key) < _MOST_PRELOADED,
                uid=None if account is None else account.uid,
                start=None if account is None else start,
            )
            launcher = self.running(key)
            if launcher is None:
                raise LauncherError("NOT_STARTED", f"the launcher of {interpreter} does not answer; see its log")
            return launcher


def _number_of(key: str) -> int:
    """Return the number of a launcher among those of its kind (see `Launchers.take`)."""
    number = key.rpartition("-")[0].partition(".")[2]
    return int(number) if number.isdecimal() else 0


def _key_of(log_path: Path) -> str:
    """Return the name of the launcher that a log is of."""
    # With a uid before it there are two signs: kind and code have one between them.
    return log_path.stem.replace("-", "/", 1) if log_path.stem.count("-") > 1 else log_path.stem


def _uid_of(key: str) -> int:
    """Return the uid of the user of a launcher with this key, or with this socket in the directory of launchers."""
    uid, _, name = key.partition("/")
    return int(uid) if name and uid.isdecimal() else os.geteuid()


def _make_place(directory: Path, account: Account) -> None:
    """Make the directory of an account's launchers. Raises LauncherError."""
    try:
        give_directory(directory, str(account.uid), account, 0o700, is_its=True)
    except OSError as error:
        raise LauncherError(
            "NOT_STARTED", f"no directory for launchers of {account.name}: {os_failure(error)}"
        ) from error


def _travels(name: str) -> bool:
    """Return whether a job submitted from an environment like ours would have this variable."""
    return name.startswith(("LC_", "TORCH_", "PYTORCH_")) or name in {
        "LANG",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "PYTHONHASHSEED",
        "PYTHONHOME",
        "PYTHONPATH",
        *_HELPFUL,
    }


def _base(environment: Mapping[str, str]) -> dict[str, str]:
    base = startup_variables(environment)
    base.update({name: environment[name] for name in _ALSO_MATTERS if name in environment})
    return base
