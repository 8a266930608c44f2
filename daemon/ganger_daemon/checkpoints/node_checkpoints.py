"""Checkpoints on the nodes' own disks, for gangs whose nodes do not all see the storage: served to other daemons file
by file, fetched from them, verified, and removed once no job starts from them.

Below the directory of a node lies what would lie on storage: UID/checkpoints/STEP-EPOCH. The leader of a gang has all
of its shards. Jobs that run as accounts write there, so no step of a path is followed that is a link."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple
from weakref import WeakValueDictionary

from ganger.injob.launcher.process_record import sync
from ganger.injob.state_image import ImageError
from ganger.text import os_failure
from ganger.wire.endpoints import EndpointError

from ganger_daemon.checkpoints.gang_checkpoints import remove_before
from ganger_daemon.checkpoints.storage import (
    IMAGES,
    LASTING,
    MANIFEST,
    PLACES,
    Manifest,
    Shard,
    Unreadable,
    complete,
    describe_shard,
    give_storage,
    has_shard,
    parse_final,
    read_manifest,
    room_missing,
    shard_name,
    verify,
)
from ganger_daemon.node.accounts import Account
from ganger_daemon.node.daemon_files import INCOMING, remove_tree
from ganger_daemon.transfer.state_stream import (
    LINE_S,
    StreamError,
    StreamRequest,
    connect,
    limit_silence,
    parse_line,
    read_line,
)

# As the master makes them, and others that cannot lead out of a directory.
_UID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_DIRECTORY: Final = re.compile(rf"({'|'.join(PLACES)})/\d+-\d+(\.tmp)?")
_FILE: Final = re.compile(rf"({re.escape(MANIFEST)}|rank-\d+\.shard)")
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES: Final = 1 << 20
_MANIFEST_MOST_BYTES: Final = 16 << 20
# Of a connection that broke: tries to go on without a further byte. Pauses begin with the first, and double.
_TRIES: Final = 4
_PAUSE_S, _PAUSE_MOST_S = 0.1, 2.0
# Unfinished checkpoints of a gang that is gone are removed so long after their last change.
_SWEPT_AFTER_S: Final = 600.0
# What a node reports at most; of further ones nothing is removed.
KEPT_MOST: Final = 1_000


class FetchError(Exception):
    """A checkpoint cannot be fetched; the message has the reason of each node that was asked. `is_lasting`: all of them
    have answered, and none has it undamaged."""

    def __init__(self, message: str, is_lasting: bool = False) -> None:
        super().__init__(message)
        self.is_lasting = is_lasting


class KeptCheckpoint(NamedTuple):
    """A checkpoint on this node's disk; `path` is relative to the job's directory."""

    job_uid: str
    path: str


class CheckpointFile:
    """One file of a checkpoint, as a source of the stream server. Raises StreamError for a name that is none."""

    def __init__(self, directory: Path, request: StreamRequest) -> None:
        folder, _, name = request.file.rpartition("/")
        if not (_UID.fullmatch(request.job_uid) and _DIRECTORY.fullmatch(folder) and _FILE.fullmatch(name)):
            raise StreamError("this is no file of a checkpoint", retry=False)
        try:
            with _opened(directory, f"{request.job_uid}/{folder}") as parent:
                self._descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        except OSError as error:
            # A daemon that is out of descriptors, for one, has it nevertheless.
            is_lasting = error.errno in LASTING
            raise StreamError(f"{request.file} is not here: {os_failure(error)}", retry=not is_lasting) from error
        status = os.fstat(self._descriptor)
        self._size = status.st_size
        if not stat.S_ISREG(status.st_mode) or not self._size:
            os.close(self._descriptor)
            raise StreamError(f"{request.file} is no plain file", retry=False)

    def progress(self) -> tuple[int, int]:
        return self._size, self._size

    def valid(self) -> bool:
        return True

    def open_arena(self) -> int:
        return self._descriptor


_locks: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
_locks_guard = threading.Lock()


def _lock_of(final: Path) -> threading.Lock:
    """Return the lock of a checkpoint's place on this node's disk."""
    with _locks_guard:
        lock = _locks.get(final)
        if lock is None:
            lock = _locks[final] = threading.Lock()
        return lock


@contextmanager
def _opened(base: Path, name: str) -> Iterator[int]:
    """Open a directory below `base`, no step to which may be a link. Raises OSError."""
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for step in Path(name).parts:
            inner = os.open(step, _OPEN, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _owner_of(path: str, account: Account | None) -> Account | None:
    """Return whose the files of a checkpoint are; None: this process's, as process images are, for a restore has its
    rights."""
    return None if path.startswith(f"{IMAGES}/") else account


@contextmanager
def _as_fetch_errors() -> Iterator[None]:
    """Have what fails on this node's disk raised as FetchError."""
    try:
        yield
    except OSError as error:
        raise FetchError(os_failure(error)) from error


def _is_same(path: Path, shard: Shard) -> bool:
    """Return whether a file is a shard as its node described it. Blocks. Raises OSError."""
    try:
        found = describe_shard(path)
    except (FileNotFoundError, ImageError):
        return False
    return (found.size_bytes, found.digest) == (shard.size_bytes, shard.digest)


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches files of checkpoints into `directory`, as this daemon. `token`, `tls`: as of the state stream.
    `patience_s`: how long nodes are tried again that may give a checkpoint later. A daemon that is being restarted is
    back by then."""

    directory: Path
    token: str
    tls: str = ""
    patience_s: float = 30.0

    def shard(self, stream: str, job_uid: str, unfinished: Path, shard: Shard, account: Account | None) -> None:
        """Fetch a member's shard into the directory of an unfinished checkpoint of this node. Blocks. Raises OSError
        and StreamError."""
        folder = f"{unfinished.parent.name}/{unfinished.name}"
        with _opened(self.directory, f"{job_uid}/{folder}") as parent:
            name = shard_name(shard.rank)
            # One of the same size may be of an earlier stop at this step.
            if _is_same(unfinished / name, shard):
                return
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
            self._file(stream, job_uid, f"{folder}/{name}", parent, name, shard.size_bytes, account)
            if not _is_same(unfinished / name, shard):
                raise StreamError(f"{name} is not the one that its node reported")

    def checkpoint(self, streams: Sequence[str], job_uid: str, path: str, account: Account | None) -> Manifest:
        """Return the manifest of a checkpoint on this node's disk, fetched from the first of `streams` that has it if
        it is not there yet, whole and verified. Blocks. Raises FetchError."""
        final = self._final(job_uid, path)
        # A start and a copy may want the same one: the second finds what the first has fetched, and replaces nothing.
        with _lock_of(final), _as_fetch_errors():
            found = verify(final)
            return found if isinstance(found, Manifest) else self._whole(streams, job_uid, path, account)

    def part(
        self,
        streams: Sequence[str],
        job_uid: str,
        path: str,
        ranks: tuple[int, ...],
        by_node: list[list[int]],
        account: Account | None,
    ) -> Path:
        """Return a directory on this node's disk with the shards of a checkpoint from which these ranks start, fetched
        and verified in the same way. It counts as no copy of the checkpoint.

        `by_node`: the ranks of each node. If they are divided otherwise than when it was saved, it has all shards: a
        script may shard its state by the ranks of a node, and reads those of others then. Blocks. Raises FetchError."""
        final, owner = self._final(job_uid, path), _owner_of(path, account)
        unfinished = final.with_name(f"{final.name}.tmp")
        with _lock_of(final), _as_fetch_errors():
            if isinstance(verify(final, ranks), Manifest):
                return final
            place = f"{job_uid}/{unfinished.parent.name}"
            self._make_place(job_uid, unfinished.parent.name, account)
            with _opened(self.directory, place) as parent, suppress(FileExistsError):
                # What a member has saved there need not be fetched.
                os.mkdir(unfinished.name, 0o700, dir_fd=parent)
            with _opened(self.directory, f"{place}/{unfinished.name}") as parent:
                if owner is not None and os.fstat(parent).st_uid == os.geteuid():
                    os.fchown(parent, owner.uid, owner.gid)
                self._from_any(
                    streams,
                    lambda stream: self._fill(stream, job_uid, path, unfinished, parent, owner, (ranks, by_node)),
                )
            remove_before(unfinished)
            return unfinished

    def _final(self, job_uid: str, path: str) -> Path:
        final = self.directory / job_uid / path
        if not (_UID.fullmatch(job_uid) and _DIRECTORY.fullmatch(path)) or parse_final(final.name) is None:
            raise FetchError(f"{path} of {job_uid} is no checkpoint")
        return final

    def _from_any(self, streams: Sequence[str], fetch: Callable[[str], Manifest]) -> Manifest:
        """Fetch from the first of `streams` that can give it, in rounds while one of them may be able to later."""
        until, pause_s = time.monotonic() + self.patience_s, _PAUSE_S
        while True:
            reasons, is_lasting = [], True
            for stream in streams:
                try:
                    return fetch(stream)
                except (OSError, StreamError, EndpointError, ValueError) as error:
                    reasons.append(f"{stream}: {os_failure(error) if isinstance(error, OSError) else error}")
                    is_lasting &= isinstance(error, ValueError) or (isinstance(error, StreamError) and not error.retry)
            if not streams:
                raise FetchError("no node that has it is there")
            if is_lasting or time.monotonic() + pause_s > until:
                raise FetchError("; ".join(reasons), is_lasting)
            time.sleep(pause_s)
            pause_s = min(_PAUSE_MOST_S, 2 * pause_s)

    def _whole(self, streams: Sequence[str], job_uid: str, path: str, account: Account | None) -> Manifest:
        owner = _owner_of(path, account)
        (self.directory / INCOMING).mkdir(mode=0o700, exist_ok=True)
        incoming = Path(tempfile.mkdtemp(prefix=f"{job_uid}-", dir=self.directory / INCOMING))
        # By its final name it is verified: epoch and step are part of it.
        staged = incoming / Path(path).name
        try:
            staged.mkdir(mode=0o700)
            with _opened(staged, "") as parent:
                found = self._from_any(
                    streams, lambda stream: self._fill(stream, job_uid, path, staged, parent, owner, None)
                )
                if owner is not None:
                    os.fchown(parent, owner.uid, owner.gid)
            self._settle(staged, job_uid, path, account)
            return found
        finally:
            remove_tree(incoming)

    def _fill(
        self,
        stream: str,
        job_uid: str,
        path: str,
        directory: Path,
        parent: int,
        owner: Account | None,
        part: tuple[tuple[int, ...], list[list[int]]] | None,
    ) -> Manifest:
        """Fetch the files of a checkpoint into `directory`, open as `parent`, that are not there undamaged, and verify
        them. `part`: the ranks that start from it and those of each node; None for all of it."""
        self._file(stream, job_uid, f"{path}/{MANIFEST}", parent, MANIFEST, _MANIFEST_MOST_BYTES, owner)
        manifest = read_manifest(directory)
        ranks = part[0] if part is not None and part[1] == manifest.by_node else None
        wanted = [one for one in sorted(manifest.files.items()) if ranks is None or one[1].rank in ranks]
        if foreign := [name for name, _ in wanted if not _FILE.fullmatch(name)]:
            raise ValueError(f"{MANIFEST} names {foreign[0][:40]!r}, which is no shard")
        missing = [(name, entry) for name, entry in wanted if not has_shard(directory / name, entry, manifest)]
        if lacks := room_missing(self.directory, sum(entry.bytes for _, entry in missing)):
            raise OSError(errno.ENOSPC, f"{lacks} bytes are missing on this node", str(self.directory))
        for name, entry in missing:
            self._file(stream, job_uid, f"{path}/{name}", parent, name, entry.bytes, owner)
        found = verify(directory, ranks, is_whole=ranks is None)
        if isinstance(found, Unreadable):
            raise ValueError(f"it is damaged: {found.why}") if found.is_lasting else OSError(found.why)
        return found

    def _settle(self, staged: Path, job_uid: str, path: str, account: Account | None) -> None:
        """Move a verified checkpoint to its place."""
        place, _, name = path.partition("/")
        self._make_place(job_uid, place, account)
        with _opened(self.directory, f"{job_uid}/{place}") as parent:
            with suppress(FileNotFoundError):
                # A damaged or former one.
                shutil.rmtree(name, dir_fd=parent)
            os.rename(staged, name, dst_dir_fd=parent)
            os.fsync(parent)
        sync(self.directory / job_uid)

    def _make_place(self, job_uid: str, place: str, account: Account | None) -> None:
        if account is not None:
            give_storage(self.directory, job_uid, account)
        else:
            (self.directory / job_uid / place).mkdir(parents=True, exist_ok=True)

    def _file(
        self, stream: str, job_uid: str, file: str, parent: int, name: str, most_bytes: int, account: Account | None
    ) -> int:
        """Fetch one file, going on where a connection broke; return its size."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        part = f"{name}.part"
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=parent)
        with os.fdopen(os.open(part, flags, 0o600, dir_fd=parent), "wb") as target:
            left, pause_s = _TRIES, _PAUSE_S
            while True:
                before = target.tell()
                try:
                    size = self._receive(
                        stream, StreamRequest(self.token, job_uid, 0, 0, 0, before, file), target, most_bytes
                    )
                    break
                except (StreamError, TimeoutError, BlockingIOError, ConnectionError) as error:
                    left, pause_s = (_TRIES, _PAUSE_S) if target.tell() > before else (left - 1, 2 * pause_s)
                    # What has nothing to go on with may come from another node.
                    if not left or not target.tell() or (isinstance(error, StreamError) and not error.retry):
                        raise
                time.sleep(pause_s)
            target.flush()
            os.fsync(target.fileno())
            if account is not None:
                os.fchown(target.fileno(), account.uid, account.gid)
        os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)
        return size

    def _receive(self, stream: str, request: StreamRequest, target: BinaryIO, most_bytes: int) -> int:
        with connect(stream, self.tls) as connection:
            limit_silence(connection, LINE_S)
            connection.sendall(request.line())
            answer = parse_line(read_line(connection))
            if "error" in answer:
                raise StreamError(str(answer["error"]), retry=bool(answer.get("retry", True)))
            size, there = int(answer.get("size", 0)), request.offset
            if not 0 < size <= most_bytes:
                raise StreamError(f"{request.file} has {size} bytes, at most {most_bytes} are expected", retry=False)
            while there < size:
                found = connection.recv(min(_PIECE_BYTES, size - there))
                if not found:
                    raise StreamError("the other side closed the connection before the file was complete")
                there += target.write(found)
            if not parse_line(read_line(connection)).get("whole"):
                raise StreamError("the node could not send all of it")
            return size


def kept(directory: Path) -> tuple[KeptCheckpoint, ...]:
    """Return the complete checkpoints on a node's disk, at most `KEPT_MOST`. Blocks."""
    found: list[KeptCheckpoint] = []
    with suppress(OSError):
        for job in sorted(directory.iterdir()):
            if not _UID.fullmatch(job.name) or job.is_symlink():
                continue
            for place in PLACES:
                with suppress(OSError):
                    found += [KeptCheckpoint(job.name, f"{place}/{name}") for name in complete(job / place)]
    return tuple(found[:KEPT_MOST])


def sweep(directory: Path, live: Collection[str]) -> None:
    """Remove what gangs that are gone have left: unfinished checkpoints, and directories of jobs without any. Blocks.
    `live`: as of `remove`."""
    latest = time.time() - _SWEPT_AFTER_S
    with suppress(OSError):
        for job in directory.iterdir():
            if job.name in live or not _UID.fullmatch(job.name) or job.is_symlink():
                continue
            for place in PLACES:
                with suppress(OSError), _opened(directory, f"{job.name}/{place}") as parent:
                    for name in os.listdir(parent):
                        is_old = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime < latest
                        if is_old and name.endswith(".tmp"):
                            shutil.rmtree(name, dir_fd=parent)
            with suppress(OSError):
                is_used = any((job / place).is_dir() and os.listdir(job / place) for place in PLACES)
                if not is_used and job.stat().st_mtime < latest:
                    remove_tree(job)


def remove(directory: Path, removable: Collection[KeptCheckpoint], live: Collection[str]) -> None:
    """Remove checkpoints from a node's disk, and with the last one the job's directory. Blocks. `live`: jobs that have
    a gang on this node, which may be writing another one."""
    for job_uid, path in removable:
        place, _, name = path.partition("/")
        if not (_UID.fullmatch(job_uid) and _DIRECTORY.fullmatch(path)):
            continue
        with suppress(OSError), _opened(directory, f"{job_uid}/{place}") as parent:
            # Renamed first, so that no reader finds half of one under its name.
            with suppress(FileNotFoundError):
                # A daemon was killed while it removed a former one.
                shutil.rmtree(f".trash-{name}", dir_fd=parent)
            os.rename(name, f".trash-{name}", src_dir_fd=parent, dst_dir_fd=parent)
            shutil.rmtree(f".trash-{name}", dir_fd=parent)
    for job_uid in {job_uid for job_uid, _ in removable if _UID.fullmatch(job_uid)}.difference(live):
        # A job may have closed its own directories.
        with suppress(OSError):
            if not any(complete(directory / job_uid / place) for place in PLACES):
                remove_tree(directory / job_uid)
