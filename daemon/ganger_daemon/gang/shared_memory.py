"""Shared memory that killed ranks of a gang leave: plain files in /dev/shm that were not there before the launch, and
that a process of the gang had. They are removed after its last process; in doubt they stay."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from ganger_daemon.node.node_context import NodeContext

log = logging.getLogger(__name__)

SHARED = Path("/dev/shm")
_LOOK_S = 0.5
# A file is examined so often: a process that is just being forked is not among the gang's yet.
_EXAMINATIONS = 3
# With more files than this no segments are looked for.
_MOST_FILES = 10_000
# Device and inode.
FileId: TypeAlias = tuple[int, int]


class Segments:
    """The segments of one gang on this node."""

    def __init__(self, host: NodeContext, group: str) -> None:
        self._host = host
        self._group = group
        self._own: dict[str, FileId] = {}
        # How often each other file was examined; those from before the launch count as done. None: unknown.
        self._others: dict[FileId, int] | None = None
        self._looked_at = 0.0

    def begin(self) -> None:
        """Note the files that are there before the launch: they do not belong to the gang."""
        self._own, files = {}, plain_files()
        self._others = None if files is None else dict.fromkeys(map(id_of, files.values()), _EXAMINATIONS)

    def journal(self) -> dict[str, Any]:
        done = [list(one) for one, times in (self._others or {}).items() if times >= _EXAMINATIONS]
        own = {name: list(one) for name, one in self._own.items()}
        return {"own": own, "others": None if self._others is None else done}

    def recall(self, left: Mapping[str, Any]) -> None:
        self._own = {str(name): (int(one[0]), int(one[1])) for name, one in left.get("own", {}).items()}
        others = left.get("others")
        self._others = None if others is None else {(int(one[0]), int(one[1])): _EXAMINATIONS for one in others}

    async def look(self, now: float, *, at_once: bool = False) -> bool:
        """Look for new segments; return whether the gang's have changed. Only new files make it read processes."""
        if self._others is None or (now - self._looked_at < _LOOK_S and not at_once):
            return False
        self._looked_at = now
        files = plain_files()
        if files is None:
            return False
        there = {name: id_of(found) for name, found in files.items()}
        own = {name: one for name, one in self._own.items() if there.get(name) == one}
        known, present = set(own.values()), set(there.values())
        self._others = {one: times for one, times in self._others.items() if one in present}
        new = {
            name: found
            for name, found in files.items()
            if there[name] not in known and self._others.get(there[name], 0) < _EXAMINATIONS
        }
        if new:
            held = await asyncio.to_thread(self._held_by_gang)
            for name, found in new.items():
                if found.st_uid in held.get(there[name], ()):
                    own[name] = there[name]
                else:
                    self._others[there[name]] = self._others.get(there[name], 0) + 1
        changed, self._own = own != self._own, own
        return changed

    def remove(self) -> None:
        """Remove the segments, after the gang's last process; those that another process has stay. Blocks."""
        left = {name: one for name, one in self._own.items() if _is_still(name, one)}
        if not left:
            return
        in_use, unreadable = _held_by_any(os.getpid())
        for name, one in left.items():
            if one in in_use or not _is_still(name, one) or _may_be_used_by(unreadable, name):
                log.info("segment left", extra={"group": self._group, "path": str(SHARED / name)})
                continue
            try:
                (SHARED / name).unlink()
            except OSError as error:
                log.warning("segment not removed", extra={"path": str(SHARED / name), "error": str(error)})
                continue
            log.info("segment removed", extra={"group": self._group, "path": str(SHARED / name)})
        self._own = {}

    def _held_by_gang(self) -> dict[FileId, set[int]]:
        found: dict[FileId, set[int]] = {}
        for pid in self._host.cgroups.pids(self._group):
            with suppress(OSError):
                owner = os.stat(f"/proc/{pid}").st_uid
                for one in held_by(pid):
                    found.setdefault(one, set()).add(owner)
        return found


def plain_files() -> dict[str, os.stat_result] | None:
    """Return the files in shared memory itself, by name; None if they cannot be listed or are too many."""
    found: dict[str, os.stat_result] = {}
    try:
        with os.scandir(SHARED) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False)
                if len(found) > _MOST_FILES:
                    return None
    except OSError:
        return None
    return found


def id_of(found: os.stat_result) -> FileId:
    return found.st_dev, found.st_ino


def held_by(pid: int) -> set[FileId]:
    """Return the files in shared memory that a process maps or has open. Raises OSError if that cannot be read."""
    return {*_mapped(Path(f"/proc/{pid}/maps").read_bytes()), *_open_files(f"/proc/{pid}/fd")}


def _mapped(maps: bytes) -> Iterator[FileId]:
    prefix = b"%b/" % os.fsencode(SHARED)
    for line in maps.splitlines() if prefix in maps else ():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(prefix):
            major, minor = fields[3].split(b":")
            yield os.makedev(int(major, 16), int(minor, 16)), int(fields[4])


def _open_files(directory: str) -> Iterator[FileId]:
    for number in os.listdir(directory):
        with suppress(FileNotFoundError):
            # No stat of any other file: on storage that hangs it would not return.
            if os.readlink(f"{directory}/{number}").startswith(f"{SHARED}/"):
                yield id_of(os.stat(f"{directory}/{number}"))


def _held_by_any(own: int) -> tuple[set[FileId], set[int]]:
    found: set[FileId] = set()
    unreadable: set[int] = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid == own:
            continue
        try:
            found |= held_by(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            with suppress(OSError):
                unreadable.add(os.stat(f"/proc/{pid}").st_uid)
    return found, unreadable


def _is_still(name: str, one: FileId) -> bool:
    try:
        found = (SHARED / name).lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and id_of(found) == one


def _may_be_used_by(unreadable: set[int], name: str) -> bool:
    """Return whether a process that cannot be read may have the file.

    Other accounts cannot have a file that only its owner may open, and processes of root have no files of users."""
    try:
        found = (SHARED / name).lstat()
    except OSError:
        return True
    return bool(found.st_mode & 0o066) and bool(unreadable - {0})
