"""Files of one daemon: where everything lies (docs/reference/protocols.md), and access where jobs can write too.
Whatever a job has put in the place of a file, the daemon neither waits for it, nor follows it elsewhere, nor fails at
it for ever. `path_trouble` finds other accounts that could replace a directory."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ganger.injob.launcher.namespaces import TEMPORARY, in_own_thread, separate
from ganger.injob.launcher.process_record import sync
from ganger.text import os_failure, os_reason

from ganger_daemon.node.accounts import OR_ALL_AS_ROOT, Account, closed_step, give_directory

log = logging.getLogger(__name__)

# None of the files that are read whole is larger; a job may make one that is.
LARGEST_BYTES = 64 << 20


def make_directory(path: Path) -> None:
    """Private to this user; what a job has put in its place, or its parent's, goes."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError):
        for part in (path.parent, path):
            if not part.is_dir():
                part.unlink(missing_ok=True)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)


def write_json(path: Path, fields: Any, durable: bool = False, mode: int = 0o600) -> None:
    """Replaces the file whole, or what a job has put in its place; `durable` waits for the disk; `mode`: of the
    file. In a directory of another account, OSError where that account is quicker."""
    new = path.with_name(path.name + ".new")
    for place in (new, path):
        _clear(place)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    if path.parent.stat().st_uid != os.geteuid():
        # never a file that the account has linked there
        new.unlink(missing_ok=True)
        flags |= os.O_EXCL
    fd = os.open(new, flags, 0o600)
    with os.fdopen(fd, "w") as file:
        if mode != 0o600:
            os.fchmod(fd, mode)
        json.dump(fields, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(new, path)
    if durable:
        sync(path.parent)


def write_hint(path: Path, fields: Any) -> None:
    """Write notes that save the next daemon a message; errors are ignored."""
    try:
        write_json(path, fields)
    except OSError as error:
        log.warning("note not written", extra={"path": str(path), "error": os_failure(error)})


def _clear(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(kind):
        remove_tree(path)
    elif not stat.S_ISREG(kind):
        path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """A directory with all in it, a file, or nothing; what cannot be removed stays. No link is followed. Blocks."""
    with suppress(OSError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink(missing_ok=True)
        elif _is_deep(path):
            subprocess.run(["rm", "-rf", "--", str(path)], check=False, stderr=subprocess.DEVNULL)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_deep(path: Path) -> bool:
    """Nothing of ours is. The library goes down with a descriptor and a frame for each level, until it has none."""
    level = [path]
    for _ in range(8):
        below = []
        for directory in level:
            try:
                with os.scandir(directory) as entries:
                    below += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
            except OSError:
                continue
        if not below:
            return False
        level = below
    return True


def sync_file(path: Path) -> None:
    """Waits until a file that is there, and its name, are on the disk."""
    for each in (path, path.parent):
        sync(each)


def open_plain(path: Path, is_jobs_directory: bool = False) -> BinaryIO:
    """Open for reading what a job could have put there: a plain file only, no pipe without a writer, no link.
    `is_jobs_directory`: its directory must be no link either. Raises OSError."""
    follow = os.O_NOFOLLOW if is_jobs_directory else 0
    parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | follow)
    try:
        fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(parent)
    _check_plain(fd, path)
    return os.fdopen(fd, "rb")


def open_plain_to_write(path: Path) -> BinaryIO:
    """Open for writing a plain file that a job could have replaced; made if there is none. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    _check_plain(fd, path)
    return os.fdopen(fd, "r+b", buffering=0)


def _check_plain(fd: int, path: Path) -> None:
    """Closes the descriptor and raises OSError if it is not of a plain file."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no plain file", str(path))


def extents(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file between two offsets that hold data, without its holes, as (from, to)."""
    while start < end:
        try:
            begin = os.lseek(file.fileno(), start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # Nothing but a hole follows
        if begin >= end:
            return
        start = min(end, os.lseek(file.fileno(), begin, os.SEEK_HOLE))
        yield begin, start


def read_plain(path: Path, most_bytes: int = LARGEST_BYTES, is_jobs_directory: bool = False) -> bytes:
    """Return the content of a plain file of at most `most_bytes`. Raises OSError: EFBIG, unread, if it is larger."""
    with open_plain(path, is_jobs_directory) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"has {size} bytes, at most {most_bytes} are read", str(path))
        return file.read(most_bytes)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if it is missing, half written, or not an object."""
    try:
        fields = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


_MOST_LINKS = 40


def path_trouble(path: Path, *, is_file: bool = False) -> str:
    """Return what lets another account replace ``path`` or what is in it, for people; empty if nothing does.

    Each existing component, and each symbolic link on the way, has to belong to this user or to root. Others may write
    into a directory only where it is sticky (/tmp, /dev/shm), and not into the last one. What does not exist is made
    by this process. ``is_file``: the last one is a file, which others may not write to either."""
    current, waiting, links = Path("/"), list(Path(os.path.abspath(path)).parts[1:]), 0
    while waiting:
        step = current / waiting.pop(0)
        try:
            status = step.lstat()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{step} cannot be looked at: {os_reason(error)}"
        if status.st_uid not in (0, os.geteuid()):
            return f"{step} belongs to {_user(status.st_uid)}"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                return f"{path} has too many symbolic links"
            target = Path(os.path.normpath(current / step.readlink()))
            current, waiting = Path("/"), [*target.parts[1:], *waiting]
            continue
        if is_file and not waiting and stat.S_ISREG(status.st_mode):
            is_open = status.st_mode & 0o022
            return f"others may write to {step} (mode {stat.S_IMODE(status.st_mode):04o})" if is_open else ""
        if not stat.S_ISDIR(status.st_mode):
            return f"{step} is no directory"
        if status.st_mode & 0o022 and (not waiting or not status.st_mode & stat.S_ISVTX):
            return f"others may write into {step} (mode {stat.S_IMODE(status.st_mode):04o})"
        current = step
    return ""


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


# sun_path holds 108 bytes with its end.
LOCK = "daemon.lock"
"""In the run directory and the state directory of a daemon; locked while it lives."""
MAX_SOCKET_PATH = 107
_SHARED_MEMORY = "/dev/shm"
# Begins the name of what is being removed.
_GONE = ".gone-"
# Directory of checkpoints that are on their way to this node.
INCOMING = ".incoming"
_LONGEST_SOCKET = len("/00000000-0000-0000-0000-000000000000/18446744073709551615/job.sock")


class DirectoryError(Exception):
    """A directory of the daemon cannot be used; the message says what to do."""


class DirectoryNameError(DirectoryError):
    """The name of a directory can never be used."""


class GangPaths:
    """One gang's local part: `job` is durable, `run` lies in a tmpfs. Hints for the next daemon are `wanted`, the
    newest order obeyed, and `local`, the gang's cores and memory baselines; the pages count.

    `account`: whose processes they are; None: the daemon's own. Of another account, `job` is the daemon's alone, the
    ranks read what is in `run`, and they and their launcher write into `work`, which is theirs."""

    def __init__(
        self, job: Path, run: Path, job_uid: str, epoch: int, work: Path | None = None, given: int = 2
    ) -> None:
        """`given`: how many steps at the end of `run` and `work` may have to be made."""
        self.job, self.run, self.job_uid, self.epoch = job, run, job_uid, epoch
        self._work, self._given = work or job, given
        self.account: Account | None = None
        # Whether this process's own launcher records the ends of an account's ranks.
        self.are_restored = False
        # Whether their /tmp and /dev/shm are no other gang's.
        self.has_places = False
        self.gang = job / "gang.json"
        self.wanted = job / "wanted.json"
        self.local = job / "local.json"
        self.outcome = job / "outcome.json"
        self.socket = run / "job.sock"
        self.gate = run / "in.sock"
        self.group = f"{job_uid}-{epoch}"

    @property
    def uid(self) -> int:
        """Of its ranks and their launcher."""
        return os.geteuid() if self.account is None else self.account.uid

    @property
    def work(self) -> Path:
        return self.job if self.account is None else self._work

    @property
    def rendezvous(self) -> Path:
        return (self.run if self.account is None else self._work) / "rendezvous.json"

    @property
    def orders(self) -> Path:
        return (self.job if self.account is None else self.run) / "orders"

    @property
    def read_mode(self) -> int:
        """Of the files that ranks read; those of an account have its group, from their directory."""
        return 0o600 if self.account is None else 0o640

    def make_for(self, account: Account | None) -> None:
        """Make the directories of ranks that run as an account. Idempotent. Raises OSError."""
        self.account = account
        if account is None:
            make_directory(self.orders)
            return
        make_directory(self.job)
        for place, mode in ((self.run, 0o2750), (self._work, 0o700)):
            base = place.parents[self._given - 1]
            give_directory(base, str(place.relative_to(base)), account, mode, is_its=place == self._work)
        give_directory(self.run, "orders", account, 0o2750, is_its=False)

    def second(self, name: str) -> GangPaths:
        """Return the paths of a second set of processes of the same account, which are part of this gang's."""
        work = self._work.with_name(f"{self._work.name}.{name}")
        found = GangPaths(self.run / name, self.run / name, self.job_uid, self.epoch, work, given=1)
        # beside the other one: a socket's path is short
        found.account, found.gate = self.account, self.gate.with_suffix(f".{name}"[:5])
        return found

    def launch(self, rank: int) -> Path:
        return self.job / f"rank-{rank}.launch.json"

    def restore(self, rank: int) -> Path:
        return self.orders.parent / f"rank-{rank}.restore.json"

    def exit(self, rank: int) -> Path:
        return (self.job if self.are_restored else self.work) / f"rank-{rank}.exit.json"

    def error(self, rank: int) -> Path:
        return self.work / f"rank-{rank}.error.json"

    def reason(self, rank: int, what: str) -> Path:
        """Return the file that says why a rank lacks `what`: BOUNDARIES (it obeys no order), OFFLOAD or CHECKPOINT."""
        return self.work / f"rank-{rank}.no-{what}.json"

    def name(self, rank: int) -> str:
        """Return the launcher's name of a rank."""
        return f"{self.job_uid}/{self.epoch}/rank-{rank}"

    def discard(self) -> None:
        """Rename the directories at once and remove them in a thread: a job may have left many files."""
        gone = []
        seconds = self._work.parent.glob(f"{self._work.name}.*")
        for path in dict.fromkeys((self.run, *seconds, self._work, self.job)):
            place = path.parent.parent / f"{_GONE}{uuid.uuid4()}"
            try:
                path.rename(place)
                gone.append(place)
                path.parent.rmdir()
            except OSError:
                pass  # It is not there, or other epochs of the job live there
        _remove_beside(gone)


class DaemonPaths:
    """`machine_uuid`: identity of this daemon; it names what all daemons of a machine make in one place. `own_name`: of
    this daemon's cgroup, unique among the daemons of this machine; `temporary`: of the jobs' own temporary files, one
    for each gang."""

    def __init__(self, state: Path, run: Path, machine_uuid: str = "") -> None:
        self.state, self.run = state, run
        self.own_name = f"ganger-{_short(machine_uuid)}"
        self.jobs = state / "jobs"
        self.logs = state / "logs"
        self.work = state / "work"
        self.temporary = state / "tmp"
        # Of gangs whose nodes do not all see the storage.
        self.checkpoints = state / "checkpoints"
        self.launchers = run / "launchers"
        # An entry of PYTHONPATH: no colon, which the state directory may have in its name.
        self.inject = run / "inject"

    def prepare(self, *, are_accounts_served: bool = False) -> None:
        """Make the directories, private to this user, but for a way through to what jobs of other accounts have there,
        if those are served or left. Raises DirectoryError."""
        if len(str(self.run)) + _LONGEST_SOCKET > MAX_SOCKET_PATH:
            room = MAX_SOCKET_PATH - _LONGEST_SOCKET
            raise DirectoryNameError(
                f"run directory {self.run} is too long for sockets: name one of at most {room} characters"
            )
        if os.pathsep in str(self.run):
            raise DirectoryNameError(
                f"run directory {self.run} has {os.pathsep!r} in its name, which PYTHONPATH cannot hold: name another"
                " with --run-dir"
            )
        for path in (self.state, self.run, self.jobs, self.logs, self.temporary, self.launchers, self.checkpoints):
            make_private(path)
        # An account that could replace a socket in it would receive the environments of jobs.
        if trouble := path_trouble(self.launchers):
            raise DirectoryError(f"run directory {self.run} is not safe: {trouble}; name another with --run-dir")
        is_open = are_accounts_served or (self.work.is_dir() and any(self.work.iterdir()))
        for path in (self.run, self.launchers):
            path.chmod(0o711 if is_open else 0o700)
        if is_open:
            make_private(self.work)
            for path in (self.state, self.work, self.checkpoints):
                path.chmod(0o711)
        if are_accounts_served:
            self._check_way()

    def _check_way(self) -> None:
        if self.run.resolve().is_relative_to(_SHARED_MEMORY):
            raise DirectoryNameError(
                f"run directory {self.run} is in {_SHARED_MEMORY}, which jobs of other accounts have of their own:"
                f" choose another --run-dir, {OR_ALL_AS_ROOT}"
            )
        for path, flag in ((self.work, "--state-dir"), (self.launchers, "--run-dir")):
            if why := closed_step(path):
                raise DirectoryNameError(
                    f"jobs of other accounts cannot reach {path}: {why}; choose another {flag}, {OR_ALL_AS_ROOT}"
                )
        package = Path(__file__).parent
        if why := closed_step(package):
            raise DirectoryNameError(
                f"jobs of other accounts cannot read {package}: {why}; install Ganger elsewhere, {OR_ALL_AS_ROOT}"
            )

    def private_places_trouble(self) -> str:
        """Return why gangs cannot have a /tmp and a /dev/shm of their own here; empty if they can."""
        for path, flag in ((self.state, "--state-dir"), (self.run, "--run-dir")):
            if path.resolve().is_relative_to(TEMPORARY):
                return f"{path} is in {TEMPORARY}, where jobs would not see it: choose another {flag}"
        for program in (Path(__file__).resolve(), Path(sys.prefix).resolve()):
            if program.is_relative_to(TEMPORARY):
                return f"{program} is in {TEMPORARY}, where jobs would not see it: install Ganger elsewhere"
        try:
            in_own_thread(separate)
        except OSError as error:
            return f"no mounts can be made here: {os_failure(error)}"
        return ""

    def sweep(self) -> None:
        """Remove directories that a former daemon had renamed and not removed."""
        gone = [path for place in (self.jobs, self.run, self.work) for path in place.glob(f"{_GONE}*")]
        _remove_beside([*gone, *self.checkpoints.glob(f"{INCOMING}/*")])

    def of(self, job_uid: str, epoch: int) -> GangPaths:
        """Raises ValueError for a uid that could leave the directory."""
        checked = str(uuid.UUID(job_uid))
        places = [place / checked / str(epoch) for place in (self.jobs, self.run, self.work)]
        return GangPaths(places[0], places[1], checked, epoch, places[2])

    def existing(self) -> tuple[GangPaths, ...]:
        """Every gang with something here, in a fixed order."""
        found: list[GangPaths] = []
        # What is renamed is being removed: it may go while it is listed.
        for job in sorted(path for path in self.jobs.iterdir() if not path.name.startswith(_GONE)):
            try:
                found += [self.of(job.name, int(path.name)) for path in sorted(job.iterdir()) if path.name.isdigit()]
            except (ValueError, NotADirectoryError):
                continue  # Not ours
        return tuple(found)


def make_private(path: Path) -> None:
    """Make a directory for this user alone. Raises DirectoryError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DirectoryError(
            f"cannot make {path}: {os_reason(error)}; choose another with --state-dir or --run-dir"
        ) from error


def choose_run_directory(state: Path, node: Mapping[str, Any]) -> Path:
    """Return the run directory for a daemon with this state directory; `node` are the fields of its node.json.

    It is the former one if that still exists, because it has the control pages of the gangs; else one in a tmpfs of
    this user."""
    former = str(node.get("run_directory") or "")
    if former and os.access(former, os.W_OK):
        return Path(former)
    base = next((path for path in run_bases() if _is_usable(path)), state / "run")
    return base / _short(str(node["machine_uuid"]))


def run_bases() -> tuple[Path, ...]:
    """Return the directories in a tmpfs, of this user's daemons, in which a daemon has its run directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    bases = (
        Path("/run/ganger") if os.geteuid() == 0 else None,
        Path(runtime) / "ganger" if runtime else None,
        Path(f"/dev/shm/ganger-{os.getuid()}"),
    )
    return tuple(path for path in bases if path is not None)


def is_run_name(name: str) -> bool:
    """Return whether a run directory of a daemon may have this name."""
    return re.fullmatch(r"[0-9a-f]{12}", name) is not None


def _is_usable(path: Path) -> bool:
    return os.access(path.parent, os.W_OK) and os.pathsep not in str(path) and not path_trouble(path)


def _short(machine_uuid: str) -> str:
    return hashlib.sha256(machine_uuid.encode()).hexdigest()[:12]


def _remove_beside(paths: Sequence[Path]) -> None:
    def remove() -> None:
        for path in paths:
            remove_tree(path)

    threading.Thread(target=remove, name="remove", daemon=True).start()
