"""Layout of a job's checkpoints on storage, the storage token, and free space.

A checkpoint exists when its directory has its final name `STEP-EPOCH` and a readable manifest: the rename decides. The
token proves that this node sees the cluster's storage.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ganger_daemon.node.safe_files import read_plain

MANIFEST = "MANIFEST.json"
MANIFEST_FORMAT = 1
# Enough for tens of thousands of shards; a job may have written a larger file.
_MANIFEST_MOST_BYTES = 16 << 20
_FINAL = re.compile(r"^(\d+)-(\d+)$")
_UNFINISHED = re.compile(r"^(\d+|\{step\})-(\d+)\.tmp$")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    step: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.step}-{self.epoch}"


def checkpoints_directory(storage: Path, job_uid: str) -> Path:
    return storage / job_uid / "checkpoints"


def unfinished_template(storage: Path, job_uid: str, epoch: int) -> str:
    """Return the directory that ranks write to. They replace `{step}`, not yet known when the order is written."""
    return str(checkpoints_directory(storage, job_uid) / f"{{step}}-{epoch}.tmp")


def parse_final(name: str) -> CheckpointName | None:
    match = _FINAL.match(name)
    return CheckpointName(int(match.group(1)), int(match.group(2))) if match else None


def parse_unfinished(name: str) -> CheckpointName | None:
    match = _UNFINISHED.match(name)
    if match is None or match.group(1) == "{step}":
        return None
    return CheckpointName(int(match.group(1)), int(match.group(2)))


def complete(directory: Path) -> tuple[CheckpointName, ...]:
    """Names of the published checkpoints in a job's directory, oldest first."""
    if not directory.is_dir():
        return ()
    found = [parse_final(path.name) for path in directory.iterdir() if (path / MANIFEST).exists()]
    return tuple(sorted(name for name in found if name is not None))


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One shard in a manifest. `header_digest`: empty in manifests of earlier versions."""

    rank: int
    bytes: int
    digest: str
    header_digest: str = ""


class Manifest(msgspec.Struct, frozen=True, gc=False):
    """The fields of a manifest that are read; others are skipped."""

    step: int
    world: int
    files: dict[str, Entry]
    format: int = MANIFEST_FORMAT
    epoch: int | None = None
    job_uid: str = ""
    time: float = 0.0

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(entry.bytes for entry in self.files.values())


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest in a checkpoint's directory. Raises OSError, or ValueError if it is damaged or too new."""
    content = read_plain(directory / MANIFEST, _MANIFEST_MOST_BYTES, is_jobs_directory=True)
    try:
        found = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is not a manifest: {error}") from error
    if found.format > MANIFEST_FORMAT:
        raise ValueError(f"{MANIFEST} has format {found.format}; this Ganger reads formats up to {MANIFEST_FORMAT}")
    if len(found.files) != found.world:
        raise ValueError(f"{MANIFEST} lists {len(found.files)} of {found.world} shards")
    return found


TOKEN_FILE = ".ganger-token"
# A checkpoint needs its size and a fifth: shards are written beside the old ones before those go.
_ROOM_NUMERATOR, _ROOM_DENOMINATOR = 6, 5


def token_found(storage: Path | None) -> str:
    """The token in the storage directory; empty when there is none."""
    if storage is None:
        return ""
    try:
        return (storage / TOKEN_FILE).read_text().strip()
    except OSError:
        return ""


def room_missing(storage: Path, size_bytes: int) -> int:
    """Return the bytes missing for a checkpoint of this size; 0 if it fits or the file system does not report it."""
    free = free_bytes(storage)
    return 0 if free is None else max(0, size_bytes * _ROOM_NUMERATOR // _ROOM_DENOMINATOR - free)


def free_bytes(storage: Path) -> int | None:
    """Return the free bytes; None if the file system does not report them."""
    try:
        state = os.statvfs(storage)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize
