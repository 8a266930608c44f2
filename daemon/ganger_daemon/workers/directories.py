"""Where everything of one daemon lies (docs/protocols.md), as paths made from a job's uid and epoch."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# sun_path holds 108 bytes with its end.
MAX_SOCKET_PATH = 107
_LONGEST_SOCKET = len("/00000000-0000-0000-0000-000000000000/18446744073709551615/job.sock")


class DirectoryError(Exception):
    """A directory of the daemon cannot be used; the message says what to do."""


class DirectoryNameError(DirectoryError):
    """It never could be."""


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

    @property
    def gang(self) -> Path:
        return self.job / "gang.json"

    @property
    def wanted(self) -> Path:
        """The newest order obeyed: a hint for the next daemon; the pages are the truth."""
        return self.job / "wanted.json"

    @property
    def local(self) -> Path:
        """What this daemon gave the gang (cores, memory baselines): a hint too."""
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
        """What the launcher calls this rank."""
        return f"{self.job_uid}/{self.epoch}/rank-{rank}"

    def remove(self) -> None:
        for path in (self.run, self.job):
            shutil.rmtree(path, ignore_errors=True)
            try:
                path.parent.rmdir()
            except OSError:
                pass  # other epochs of the job live there


@dataclass(frozen=True, slots=True)
class DaemonPaths:
    state: Path
    run: Path

    def prepare(self) -> None:
        """Makes the directories, private to this user. Raises DirectoryError."""
        if len(str(self.run)) + _LONGEST_SOCKET > MAX_SOCKET_PATH:
            room = MAX_SOCKET_PATH - _LONGEST_SOCKET
            raise DirectoryNameError(
                f"run directory {self.run} is too long for sockets: name one of at most {room} characters"
            )
        for path in (self.state, self.run, self.jobs, self.logs, self.launchers):
            try:
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise DirectoryError(
                    f"cannot make {path}: {error.strerror}; choose another with --state-dir or --run-dir"
                ) from error

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
        return self.state / "inject"

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


def write_json(path: Path, fields: Any, durable: bool = False) -> None:
    """Replaces the file whole; `durable` waits for the disk."""
    new = path.with_name(path.name + ".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(fields, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(new, path)
    if durable:
        _sync(path.parent)


def sync_file(path: Path) -> None:
    """Waits until a file that is there, and its name, are on the disk."""
    _sync(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when it is missing or half written by a crash."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}
