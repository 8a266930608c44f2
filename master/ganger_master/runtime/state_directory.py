"""The master's files: its directory, files beside the database, and those of ended jobs on storage.

STATE_DIR/master.lock is held by the running master; endpoint.json says where it listens and is there only while a
master serves or was killed; token is a secret of the directory's owner, kept across restarts. DATABASE.marks has the
next ids of the database, DATABASE.ended the jobs that have ended, one a line: they show a master that its database is
an older copy, so neither belongs into a backup. No commit waits for them or fails because of them.

Daemons write STORAGE/UID/logs and STORAGE/UID/checkpoints, but only the master knows which jobs have ended. It keeps
only the last finished jobs, so it notes each end beside the files. Directories of jobs that are neither known nor noted
are kept: a master with another database knows none of them, and a suspended job may resume after months.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import secrets
import shutil
import stat
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec
from ganger.job_state import JobState
from ganger.text import os_failure, os_reason
from ganger.wire import endpoints
from ganger.wire.endpoints import EndpointError
from ganger.wire.methods import CallerRole
from ganger.wire.tls import check_directory, tell_end

from ganger_master.core.commands import Marks, RecordedEnd
from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.core.node_model import Counters, Element
from ganger_master.core.settings import CoreSettings

LOCK: Final = "master.lock"
STORAGE_TOKEN: Final = ".ganger-token"


class MasterObstacle(Enum):
    """What kind of thing keeps a master from starting."""

    SETTING = "it was told something that cannot be"
    STATE = "something is in use, full or of another version"
    UNREACHABLE = "its database does not answer"
    RIGHTS = "it may not use what it needs"


class StartError(Exception):
    """The master cannot start; the message says why and what to do."""

    def __init__(self, message: str, obstacle: MasterObstacle = MasterObstacle.STATE) -> None:
        super().__init__(message)
        self.obstacle = obstacle


class StateDirectory:
    """An exclusively held state directory. Closing it, or the end of the process, frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"cannot use state directory {path}: {os_reason(error)}", obstacle_of(error)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise StartError(
                f"another master (pid {holder}) uses {path}: stop it, or name another --state-dir"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        # What a killed master left behind would send clients to a dead address.
        self.remove_endpoint()

    def token(self) -> str:
        """The start-up token, made at the first start."""
        try:
            return endpoints.ensure_token(self.path)[0]
        except (endpoints.EndpointError, OSError) as error:
            raise StartError(os_failure(error), obstacle_of(error)) from error

    def write_endpoint(self, address: str) -> None:
        """Tells clients on this machine where the master listens; call it once requests are served."""
        endpoints.write_endpoint(self.path, address, self.path / endpoints.TOKEN_FILE)

    def remove_endpoint(self) -> None:
        endpoints.remove_endpoint(self.path)

    def close(self) -> None:
        os.close(self._lock)


def storage_token(storage: Path) -> str:
    """The content of the storage's token file, made if it is not there. Raises StartError if it cannot be used."""
    path = storage / STORAGE_TOKEN
    try:
        storage.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            _write_new(path, secrets.token_hex(16) + "\n")
        token = path.read_text().strip()
    except FileNotFoundError as error:
        raise StartError(
            f"--storage {storage}: there is no directory {storage.parent}; mount it or make it, or correct the path",
            MasterObstacle.SETTING,
        ) from error
    except OSError as error:
        raise StartError(f"cannot use storage {storage}: {os_reason(error)}", obstacle_of(error)) from error
    if not token:
        raise StartError(f"{path} is empty: delete it if no other cluster uses this storage")
    return token


def obstacle_of(error: BaseException) -> MasterObstacle:
    """RIGHTS where missing rights are behind an error, else STATE."""
    denied = isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError)
    return MasterObstacle.RIGHTS if denied else MasterObstacle.STATE


def _write_new(path: Path, text: str) -> None:
    # Linked into place whole, so that of two masters on one storage both read the one token that won.
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


log = logging.getLogger(__name__)

# Marks are padded to this length, so that a text never leaves the end of a longer one behind it.
_MARKS_BYTES: Final = 512
_SYNC_S: Final = 10.0
# Bytes of the file of ended jobs; beyond them the older half is dropped.
_ENDED_MOST_BYTES: Final = 32 << 20


class DatabaseMarks:
    """The files beside one database. The store's thread calls all but `take_ended`, `marks` and `ends`."""

    def __init__(self, database: Path) -> None:
        self._marks = database.with_name(f"{database.name}.marks")
        self._ended = database.with_name(f"{database.name}.ended")
        self._fresh: list[tuple[str, RecordedEnd]] = []
        self._synced = 0.0
        # Descriptor of the marks, kept open because opening costs more than writing. -1: none.
        self._descriptor = -1
        self._fails = False

    def marks(self) -> Marks | None:
        """Return the marks; None where there is no file, or one that cannot be read."""
        try:
            return msgspec.json.decode(self._marks.read_bytes(), type=Marks)
        except (OSError, ValueError, RecursionError):
            return None

    def ends(self, uids: Collection[str]) -> dict[str, RecordedEnd]:
        """Return the recorded ends of these jobs, by uid. Blocks."""
        found: dict[str, RecordedEnd] = {}
        try:
            with self._ended.open("rb") as file:
                for line in file:
                    uid, _, end = line.decode(errors="replace").strip().partition(" ")
                    if uid in uids:
                        found[uid] = ended_of(end)
        except OSError:
            pass
        return found

    def note(self, changed: Iterable[Element]) -> None:
        """Record what a commit of these elements has changed."""
        counters, ended = None, []
        for element in changed:
            if isinstance(element, Counters):
                counters = element
            elif isinstance(element, JobRecord) and element.state.is_finished:
                ended.append((element.uid, RecordedEnd(element.state, element.end_time)))
        try:
            if ended:
                self._append(ended)
                self._fresh += ended
            if counters is not None and counters.store:
                self._write(counters)
            self._fails = False
        except OSError as error:
            if not self._fails:
                log.warning("not noted beside the database", extra={"path": str(self._marks), "error": str(error)})
            self._fails = True

    def take_ended(self) -> list[tuple[str, RecordedEnd]]:
        """Return the jobs that have ended since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def _write(self, counters: Counters) -> None:
        text = msgspec.json.encode(Marks.of(counters)).ljust(_MARKS_BYTES - 1) + b"\n"
        now = time.monotonic()
        is_due = now - self._synced > _SYNC_S
        if self._descriptor < 0 or (is_due and not self._is_in_place()):
            self.close()
            self._descriptor = os.open(self._marks, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._descriptor, text, 0)
        if is_due:
            os.fdatasync(self._descriptor)
            self._synced = now

    def _is_in_place(self) -> bool:
        """Return whether the open file is still the one of that name: a person may have moved or removed it."""
        try:
            return os.path.samestat(os.stat(self._marks), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _append(self, ended: Iterable[tuple[str, RecordedEnd]]) -> None:
        text = "".join([f"{uid} {text_of(end)}\n" for uid, end in ended])
        descriptor = os.open(self._ended, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, text.encode())
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > _ENDED_MOST_BYTES:
            lines = self._ended.read_bytes().splitlines(keepends=True)
            fresh = self._ended.with_name(f"{self._ended.name}.new")
            fresh.write_bytes(b"".join(lines[len(lines) // 2 :]))
            fresh.replace(self._ended)


def text_of(end: RecordedEnd) -> str:
    """Return the text of an end, "TIME STATE"; without a state where that is not known."""
    return f"{end.time!r} {end.state.value}" if end.state is not None else f"{end.time!r}"


def ended_of(text: str) -> RecordedEnd:
    """Return the end in a text "TIME STATE". Its state is None where it is missing or of a newer master."""
    time_text, _, state = text.strip().partition(" ")
    try:
        when = float(time_text)
    except ValueError:
        when = 0.0
    return RecordedEnd(JobState(state) if state in set(JobState) else None, when)


LOGS: Final = "logs"
CHECKPOINTS: Final = "checkpoints"
# When its job ended, in Unix seconds, and in which state, as text.
_ENDED: Final = "ended"
_TRASH: Final = ".trash-"


def ends_of(jobs: Mapping[int, JobRecord], gangs: Mapping[int, Gang]) -> dict[str, float]:
    """Return the end of each job by uid, in Unix seconds; infinite while it or one of its gangs may still run."""
    busy = {gang.job for gang in gangs.values()}
    return {
        job.uid: job.end_time if job.state.is_finished and job.number not in busy else math.inf for job in jobs.values()
    }


def may_go(ended: float | None, kept: float | None, now: float) -> bool:
    """Return whether a job's files may be deleted. `ended`: Unix seconds or unknown; `kept`: seconds or for ever."""
    return ended is not None and kept is not None and now - ended > kept


def known_ends(ends: Mapping[str, float], jobs: Mapping[int, JobRecord]) -> dict[str, RecordedEnd]:
    """Return how jobs ended, by uid. `ends`: the result of `ends_of`; jobs that have not ended are left out."""
    states = {job.uid: job.state for job in jobs.values()}
    return {uid: RecordedEnd(states.get(uid), ended) for uid, ended in ends.items() if ended != math.inf}


def note_ended(storage: Path, ends: Mapping[str, RecordedEnd]) -> None:
    """Record on storage which of the jobs with files there have ended. Blocks. Raises OSError."""
    for uid, ended in ends.items():
        directory = storage / uid
        if _is_directory(directory) and not (directory / _ENDED).exists():
            fresh = directory / f"{_ENDED}.new"
            fresh.write_text(f"{text_of(ended)}\n")
            fresh.rename(directory / _ENDED)


def noted_ends(storage: Path, uids: Iterable[str]) -> dict[str, RecordedEnd]:
    """Return the ends of these jobs that storage has a note of, by uid. Blocks."""
    found: dict[str, RecordedEnd] = {}
    for uid in uids:
        with suppress(OSError, UnicodeDecodeError):
            found[uid] = ended_of((storage / uid / _ENDED).read_text())
    return found


def expired(storage: Path, ends: Mapping[str, float], kept: Mapping[str, float | None], now: float) -> list[Path]:
    """Return the directories to delete, with those whose deletion was interrupted. Blocks.

    Unpublished checkpoints of ended jobs are deleted at once. `kept`: seconds by the directory's name, as in `may_go`.
    Raises OSError if storage cannot be read.
    """
    found: list[Path] = []
    for directory in _directories(storage):
        ended = ends[directory.name] if directory.name in ends else _noted(directory)
        if may_go(ended, 0.0, now):
            found += _unfinished(directory / CHECKPOINTS)
        for name, seconds in kept.items():
            if may_go(ended, seconds, now):
                found += [part for part in (directory / f"{_TRASH}{name}", directory / name) if _is_directory(part)]
    return found


def _unfinished(directory: Path) -> list[Path]:
    if not _is_directory(directory):
        return []
    names = (path for path in directory.iterdir() if path.name.endswith(".tmp") or path.name.startswith(_TRASH))
    return [path for path in sorted(names) if _is_directory(path)]


def remove(part: Path) -> None:
    """Delete a directory, and the job's directory with its last part. Blocks. Raises OSError.

    It is renamed first, so that no reader finds an incomplete one.
    """
    trash = part
    if not part.name.startswith(_TRASH):
        trash = part.with_name(f"{_TRASH}{part.name}")
        part.rename(trash)
    shutil.rmtree(trash)
    job = part.parent
    if [path.name for path in job.iterdir()] == [_ENDED]:
        (job / _ENDED).unlink()
    with suppress(OSError):
        job.rmdir()


def _directories(storage: Path) -> Iterator[Path]:
    """Yield the directories of jobs; other files on storage belong to other programs."""
    for path in sorted(storage.iterdir()):
        try:
            is_ours = str(uuid.UUID(path.name)) == path.name
        except ValueError:
            continue
        if is_ours and _is_directory(path):
            yield path


def _noted(directory: Path) -> float | None:
    try:
        return ended_of((directory / _ENDED).read_text()).time or None
    except (OSError, ValueError):
        return None


def _is_directory(path: Path) -> bool:
    """Return whether the path is a directory and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def check_storage(token: str, settings: CoreSettings) -> None:
    """Raise StartError unless storage is where this cluster's checkpoints are: no daemon would be accepted."""
    if token and token != settings.storage_token:
        raise StartError(
            f"--storage {settings.storage} is not the storage of this cluster, where its checkpoints are"
            f" (another {STORAGE_TOKEN}): give the former one, or move all that it holds, that file too, to this one",
            MasterObstacle.SETTING,
        )


def check_certificate(directory: Path) -> None:
    """Raises StartError unless it is a master's, and does."""
    try:
        check_directory(directory, (CallerRole.MASTER,))
        tell_end(directory)
    except EndpointError as error:
        raise StartError(str(error), MasterObstacle.RIGHTS) from error


def check_authority(directory: Path) -> None:
    """Raises StartError unless the directory holds an authority and its key."""
    from ganger.wire.certificate_authority import CertificateError, read_authority

    try:
        read_authority(directory)
    except CertificateError as error:
        raise StartError(f"--authority: {error}", MasterObstacle.RIGHTS) from error
