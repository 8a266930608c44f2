"""One log stream per rank, across suspends, moves and restarts: segments (rank, epoch) with logical offsets. Ranks
append to their own segment, which is copied to storage as it grows and sealed when its epoch ends here. What a lost
node had not copied, or the limit has removed by punching a hole, is reported as lost. Beside them lies the job's metric
series, in one bounded file, which is merged with its copy on storage."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ganger.protocol import metric_series
from ganger.protocol.metric_series import MetricSeries

from ganger_daemon.node.accounts import Account
from ganger_daemon.node.daemon_files import (
    extents,
    open_plain,
    open_plain_to_write,
    read_json,
    read_plain,
    remove_tree,
    write_json,
)

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 10
SEGMENT_LIMIT_BYTES = 1 << 30
# Most bytes copied at one time of a log that grows: the gang does not wait for more.
PORTION_BYTES = 64 << 20
_NOTES = re.compile(r"^rank-(\d+)\.json$")
_SEGMENT = re.compile(r"^rank-(\d+)\.(\d+)\.log$")
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
# Blocks are freed in pages; behind every offset of a file in a tmpfs.
_PAGE, _FAR = 4096, 1 << 62
_SERIES = "series.json"


@dataclass(frozen=True, slots=True)
class Segment:
    """One epoch's part of a rank's log. `length`: bytes written; `dropped`: bytes that the limit removed."""

    epoch: int
    length: int
    sealed: bool
    path: Path | None
    available: int
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    offset: int
    data: bytes
    lost_bytes: int = 0


class LogStore:
    """Segments of all jobs below `local`, and their copies below the storage directory once there is one."""

    def __init__(self, local: Path, storage: Path | None = None, limit_bytes: int = SEGMENT_LIMIT_BYTES) -> None:
        self._local = local
        self.storage = storage
        self._limit = limit_bytes
        # How long logs of a job without gangs here are kept after its last write; None: for ever, or not set yet.
        self.kept_s: float | None = None

    def segment_path(self, job_uid: str, rank: int, epoch: int) -> Path:
        return self._local / job_uid / f"rank-{rank}.{epoch}.log"

    def begin(self, job_uid: str, rank: int, epoch: int, account: Account | None = None) -> Path:
        """Path of the segment for a rank about to start; its directory exists afterwards. `account`: which may write to
        it, and open it again by /dev/stdout."""
        path = self.segment_path(job_uid, rank, epoch)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600, exist_ok=True)
        if account is not None:
            os.chown(path, account.uid, account.gid)
        self._note(job_uid, rank, epoch, sealed=False)
        return path

    def mirror(self, job_uid: str, rank: int, epoch: int, sealed: bool = False) -> None:
        """Enforce the limit and bring the copy on storage up to date. `sealed`: no bytes follow."""
        path = self.segment_path(job_uid, rank, epoch)
        try:
            length = path.stat().st_size
        except FileNotFoundError:
            return
        # The length first: if the copy does not come about, the reader knows how much is missing.
        self._note(job_uid, rank, epoch, sealed=sealed)
        self._enforce_limit(job_uid, rank, epoch, path)
        directory = self._storage_directory(job_uid)
        if directory is None:
            return
        with open_plain(path) as source, open_plain_to_write(directory / path.name) as target:
            _copy(source, target, length, self._limit if sealed else PORTION_BYTES)
            if sealed:
                os.fsync(target.fileno())

    def is_too_large(self, job_uid: str, ranks: Iterable[int], epoch: int) -> bool:
        """Return whether the log of a rank takes more of the disk than it may."""
        paths = (self.segment_path(job_uid, rank, epoch) for rank in ranks)
        return any(held_bytes(path) > self._limit for path in paths)

    def mirror_all(self, job_uid: str, ranks: Iterable[int], epoch: int, sealed: bool = False) -> None:
        """Mirror the logs of all ranks. Blocks. A failed copy is logged, and the next one catches up."""
        for rank in ranks:
            try:
                self.mirror(job_uid, rank, epoch, sealed)
            except OSError as error:
                log.warning("log not copied", extra={"job_uid": job_uid, "rank": rank, "error": str(error)})

    def series(self, job_uid: str, written: Iterable[tuple[int, Path]] = ()) -> MetricSeries:
        """Return the job's metric series. `written`: files of attempts that run here, by epoch. Blocks."""
        storage = self._storage_directory(job_uid, create=False)
        kept = [read_json(directory / _SERIES) for directory in (self._local / job_uid, storage) if directory]
        parts = [metric_series.parsed(str(one.get("series", ""))) for one in kept]
        for epoch, path in written:
            try:
                text = read_plain(path, metric_series.LARGEST_BYTES, is_jobs_directory=True)
            except OSError:
                continue  # Nothing was logged, or the job has put something else there
            parts.append(metric_series.parsed(text.decode("ascii", "replace"), epoch))
        return metric_series.merged(parts)

    def mirror_series(self, job_uid: str, epoch: int, written: Path) -> None:
        """Merge the file of an attempt into the series here and on storage. Blocks. Raises OSError."""
        series = self.series(job_uid, [(epoch, written)])
        if not series.points:
            return
        storage = self._storage_directory(job_uid)
        for directory in (self._local / job_uid, storage):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_json(directory / _SERIES, {"series": series.text()})

    def segments(self, job_uid: str, rank: int) -> tuple[Segment, ...]:
        """All known segments of a rank, by epoch: local ones, else their copies. Empty when the rank is not known."""
        found: dict[int, Segment] = {}
        for directory in filter(None, (self._storage_directory(job_uid, create=False), self._local / job_uid)):
            notes = _read_notes(directory, rank)
            for epoch, note in notes.items():
                path = directory / f"rank-{rank}.{epoch}.log"
                available = path.stat().st_size if path.exists() else 0
                length = max(available, int(note.get("length", 0)))
                sealed = bool(note.get("sealed"))
                known = found.get(epoch)
                if known is None or available >= known.available:
                    dropped = max(int(note.get("dropped", 0)), known.dropped if known else 0)
                    length = max(length, known.length if known else 0)
                    sealed = sealed or bool(known and known.sealed)
                    found[epoch] = Segment(epoch, length, sealed, path if available else None, available, dropped)
        return tuple(found[epoch] for epoch in sorted(found))

    def end(self, job_uid: str, rank: int) -> int:
        """Logical offset right after the last byte known."""
        return sum(segment.length for segment in self.segments(job_uid, rank))

    def read(self, job_uid: str, rank: int, offset: int) -> Iterator[Chunk]:
        """Chunks from a logical offset to the present end; bytes that are gone show as `lost_bytes` before a chunk."""
        start = 0
        lost = 0
        segments = self.segments(job_uid, rank)
        for segment in segments:
            end = start + segment.length
            if end > offset:
                inside = max(0, offset - start)
                if inside < segment.dropped:
                    lost += segment.dropped - inside
                    inside = segment.dropped
                for position, data in _pieces(segment, inside):
                    # A hole that its job made is lost, too.
                    yield Chunk(start + position, data, lost + position - inside)
                    lost, inside = 0, position + len(data)
                lost += max(0, segment.length - inside)
            start = end
        if lost:
            yield Chunk(start, b"", lost)

    def forget(self, job_uid: str) -> None:
        """Removes local segments that storage has whole; the others stay until `sweep`."""
        directory = self._storage_directory(job_uid, create=False)
        local = self._local / job_uid
        if directory is None or not local.is_dir():
            return
        for path in sorted(local.glob("rank-*.log")):
            copy = directory / path.name
            if copy.exists() and copy.stat().st_size >= path.stat().st_size:
                path.unlink()
        ranks = [int(match.group(1)) for path in local.iterdir() if (match := _NOTES.match(path.name))]
        if not any(local.glob("rank-*.log")) and all(
            _read_notes(local, rank).keys() <= _read_notes(directory, rank).keys() for rank in ranks
        ):
            remove_tree(local)

    def sweep(self, here: Collection[str], now: float) -> tuple[str, ...]:
        """Remove the local logs of jobs that are not among `here` and wrote last before the time for which logs are
        kept; return their uids. `now`: Unix seconds. Blocks."""
        if self.kept_s is None:
            return ()
        before = now - self.kept_s
        old = [path for path in sorted(self._local.iterdir()) if path.name not in here and _written_last(path) < before]
        for path in old:
            remove_tree(path)
        return tuple(path.name for path in old)

    def _note(self, job_uid: str, rank: int, epoch: int, sealed: bool) -> None:
        path = self.segment_path(job_uid, rank, epoch)
        length = path.stat().st_size
        for directory in filter(None, (self._local / job_uid, self._storage_directory(job_uid))):
            notes = _read_notes(directory, rank)
            old = notes.get(epoch, {})
            new = {"length": length, "sealed": sealed or bool(old.get("sealed")), "dropped": int(old.get("dropped", 0))}
            if old != new:
                notes[epoch] = new
                _write_notes(directory, rank, notes)

    def _enforce_limit(self, job_uid: str, rank: int, epoch: int, path: Path) -> None:
        directory = self._local / job_uid
        notes = _read_notes(directory, rank)
        dropped = int(notes[epoch].get("dropped", 0))
        cut = bound_log(path, self._limit, dropped)
        if cut <= dropped:
            return
        storage = self._storage_directory(job_uid)
        if storage is not None and (storage / path.name).exists():
            _punch(storage / path.name, 0, min(cut, (storage / path.name).stat().st_size))
        notes[epoch]["dropped"] = cut
        _write_notes(directory, rank, notes)

    def _storage_directory(self, job_uid: str, create: bool = True) -> Path | None:
        if self.storage is None:
            return None
        directory = self.storage / job_uid / "logs"
        if create:
            directory.mkdir(parents=True, exist_ok=True)
        return directory


def _written_last(directory: Path) -> float:
    times = [directory.lstat().st_mtime]
    if directory.is_dir() and not directory.is_symlink():
        times += [path.lstat().st_mtime for path in directory.iterdir()]
    return max(times)


def _pieces(segment: Segment, inside: int) -> Iterator[tuple[int, bytes]]:
    if segment.path is None:
        return
    with open_plain(segment.path) as file:
        # Up to the length noted when the segment was listed: what comes later belongs to the next look.
        for begin, end in extents(file, inside, segment.available):
            while begin < end and (data := os.pread(file.fileno(), min(CHUNK_BYTES, end - begin), begin)):
                yield begin, data
                begin += len(data)


def _copy(source: BinaryIO, target: BinaryIO, length: int, most_bytes: int) -> None:
    """Bring a copy up to `length` bytes of its source, or by `most_bytes` of data; holes stay holes. Raises OSError."""
    done = os.fstat(target.fileno()).st_size
    for start, end in extents(source, done, length):
        begin = start
        while begin < end and most_bytes > 0:
            data = os.pread(source.fileno(), min(CHUNK_BYTES, end - begin, most_bytes), begin)
            if not data:
                return
            begin += _write_all(target, data, begin)
            most_bytes -= len(data)
        if begin < end:
            return
    # A copy that hung with its storage ends late, and must not cut what a later one has brought.
    if os.fstat(target.fileno()).st_size < length:
        os.truncate(target.fileno(), length)


def _write_all(target: BinaryIO, data: bytes, offset: int) -> int:
    view = memoryview(data)
    while view:
        written = os.pwrite(target.fileno(), view, offset)
        view, offset = view[written:], offset + written
    return len(data)


def _read_notes(directory: Path, rank: int) -> dict[int, dict[str, int]]:
    """Notes by epoch from rank-K.json; segments that have none (the note was lost) count with their size."""
    notes: dict[int, dict[str, int]] = {}
    try:
        segments = read_json(directory / f"rank-{rank}.json").get("segments", {})
        notes = {int(epoch): {name: int(value) for name, value in note.items()} for epoch, note in segments.items()}
    except (ValueError, TypeError, AttributeError):
        notes = {}
    if directory.is_dir():
        for path in directory.glob(f"rank-{rank}.*.log"):
            match = _SEGMENT.match(path.name)
            if match is not None:
                notes.setdefault(int(match.group(2)), {})
    return notes


def _write_notes(directory: Path, rank: int, notes: dict[int, dict[str, int]]) -> None:
    path = directory / f"rank-{rank}.json"
    write_json(path, {"segments": {str(epoch): note for epoch, note in sorted(notes.items())}})


def held_bytes(path: Path) -> int:
    """Return what a file takes of its disk: less than its size with holes, more with blocks that were allocated behind
    its end. Zero if there is none."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def bound_log(path: Path, limit_bytes: int, dropped: int = 0) -> int:
    """Free blocks of a log to which its programs write on, if it takes more than a limit of its disk. Return the offset
    before which all is gone: `dropped`, that of the last time, if nothing was cut. Raises OSError.

    What a program does with its descriptor counts: `fallocate` behind the end, or writes where a hole was made."""
    if held_bytes(path) <= limit_bytes:
        return dropped
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return dropped
        # Behind the end: a tmpfs frees it by a hole, others by a cut to the same size.
        _free(fd, -(-os.fstat(fd).st_size // _PAGE) * _PAGE, _FAR)
        if held_bytes(path) > limit_bytes:
            os.ftruncate(fd, os.fstat(fd).st_size)
        if held_bytes(path) <= limit_bytes:
            return dropped
        # Down to half, so that it is done rarely; whole pages, for the kernel frees no less.
        cut = max(dropped, (os.fstat(fd).st_size - limit_bytes // 2) // _PAGE * _PAGE)
        return cut if _free(fd, 0, cut) else dropped
    finally:
        os.close(fd)


def _punch(path: Path, start: int, end: int) -> bool:
    """Frees the blocks of [start, end) and keeps the size; False where the file system cannot."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _free(fd, start, end)
    finally:
        os.close(fd)


def _free(fd: int, start: int, end: int) -> bool:
    if end <= start:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, start, end - start) == 0)
