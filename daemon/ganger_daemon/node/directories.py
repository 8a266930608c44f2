"""Where everything of one daemon lies (docs/reference/protocols.md), as paths made from a job's uid and epoch."""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ganger_daemon.node.safe_files import path_trouble, remove_tree

# sun_path holds 108 bytes with its end.
MAX_SOCKET_PATH = 107
# Begins the name of what is being removed.
_GONE = ".gone-"
_LONGEST_SOCKET = len("/00000000-0000-0000-0000-000000000000/18446744073709551615/job.sock")


class DirectoryError(Exception):
    """A directory of the daemon cannot be used; the message says what to do."""


class DirectoryNameError(DirectoryError):
    """The name of a directory can never be used."""


@dataclass(frozen=True, slots=True)
class GangPaths:
    """One gang's local part: `job` is durable, `run` lies in a tmpfs."""

    job: Path
    run: Path
    job_uid: str
    epoch: int

    def launch(self, rank: int) -> Path:
        return self.job / f"rank-{rank}.launch.json"

    def exit(self, rank: int) -> Path:
        return self.job / f"rank-{rank}.exit.json"

    def error(self, rank: int) -> Path:
        return self.job / f"rank-{rank}.error.json"

    def reason(self, rank: int, what: str) -> Path:
        """Return the file with the reason why a rank lacks `what`: BOUNDARIES (no order can be obeyed), OFFLOAD or
        CHECKPOINT."""
        return self.job / f"rank-{rank}.no-{what}.json"

    @property
    def gang(self) -> Path:
        return self.job / "gang.json"

    @property
    def wanted(self) -> Path:
        """File with the newest order obeyed: a hint for the next daemon; the pages count."""
        return self.job / "wanted.json"

    @property
    def local(self) -> Path:
        """File with the gang's cores and memory baselines: a hint for the next daemon."""
        return self.job / "local.json"

    @property
    def outcome(self) -> Path:
        return self.job / "outcome.json"

    @property
    def orders(self) -> Path:
        return self.job / "orders"

    @property
    def socket(self) -> Path:
        return self.run / "job.sock"

    @property
    def rendezvous(self) -> Path:
        return self.run / "rendezvous.json"

    @property
    def group(self) -> str:
        return f"{self.job_uid}-{self.epoch}"

    def name(self, rank: int) -> str:
        """Return the launcher's name of a rank."""
        return f"{self.job_uid}/{self.epoch}/rank-{rank}"

    def discard(self) -> None:
        """Rename the directories at once and remove them in a thread: a job may have left many files."""
        gone = []
        for path in (self.run, self.job):
            place = path.parent.parent / f"{_GONE}{uuid.uuid4()}"
            try:
                path.rename(place)
                gone.append(place)
                path.parent.rmdir()
            except OSError:
                pass  # it is not there, or other epochs of the job live there
        _remove_beside(gone)


@dataclass(frozen=True, slots=True)
class DaemonPaths:
    """`machine_uuid`: identity of this daemon; it names what all daemons of a machine make in one place."""

    state: Path
    run: Path
    machine_uuid: str = ""

    def prepare(self) -> None:
        """Makes the directories, private to this user. Raises DirectoryError."""
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
        for path in (self.state, self.run, self.jobs, self.logs, self.launchers):
            make_private(path)
        # An account that could replace a socket in it would receive the environments of jobs.
        if trouble := path_trouble(self.launchers):
            raise DirectoryError(f"run directory {self.run} is not safe: {trouble}; name another with --run-dir")
        for path in (self.run, self.launchers):
            path.chmod(0o700)

    def sweep(self) -> None:
        """Remove directories that a former daemon had renamed and not removed."""
        _remove_beside([*self.jobs.glob(f"{_GONE}*"), *self.run.glob(f"{_GONE}*")])

    @property
    def own_name(self) -> str:
        """Name of this daemon's cgroup, unique among the daemons of this machine."""
        return f"ganger-{_short(self.machine_uuid)}"

    @property
    def jobs(self) -> Path:
        return self.state / "jobs"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def launchers(self) -> Path:
        return self.run / "launchers"

    @property
    def inject(self) -> Path:
        # an entry of PYTHONPATH: no colon, which the state directory may have in its name
        return self.run / "inject"

    def of(self, job_uid: str, epoch: int) -> GangPaths:
        """Raises ValueError for a uid that could leave the directory."""
        checked = str(uuid.UUID(job_uid))
        return GangPaths(self.jobs / checked / str(epoch), self.run / checked / str(epoch), checked, epoch)

    def existing(self) -> tuple[GangPaths, ...]:
        """Every gang with something here, in a fixed order."""
        found: list[GangPaths] = []
        for job in sorted(self.jobs.iterdir()):
            try:
                found += [self.of(job.name, int(path.name)) for path in sorted(job.iterdir()) if path.name.isdigit()]
            except (ValueError, NotADirectoryError):
                continue  # not ours
        return tuple(found)


def make_private(path: Path) -> None:
    """Make a directory for this user alone. Raises DirectoryError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DirectoryError(
            f"cannot make {path}: {error.strerror}; choose another with --state-dir or --run-dir"
        ) from error


def choose_run_directory(state: Path, node: Mapping[str, Any]) -> Path:
    """Return the run directory for a daemon with this state directory; `node` are the fields of its node.json.

    It is the former one if that still exists, because it has the control pages of the gangs; else one in a tmpfs of
    this user."""
    former = str(node.get("run_directory") or "")
    if former and os.access(former, os.W_OK):
        return Path(former)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    tmpfs = (
        Path("/run/ganger") if os.geteuid() == 0 else None,
        Path(runtime) / "ganger" if runtime else None,
        Path(f"/dev/shm/ganger-{os.getuid()}"),
    )
    base = next((path for path in tmpfs if path is not None and _is_usable(path)), state / "run")
    return base / _short(str(node["machine_uuid"]))


def _is_usable(path: Path) -> bool:
    return os.access(path.parent, os.W_OK) and os.pathsep not in str(path) and not path_trouble(path)


def _short(machine_uuid: str) -> str:
    return hashlib.sha256(machine_uuid.encode()).hexdigest()[:12]


def _remove_beside(paths: Sequence[Path]) -> None:
    def remove() -> None:
        for path in paths:
            remove_tree(path)

    threading.Thread(target=remove, name="remove", daemon=True).start()
