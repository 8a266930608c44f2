"""Complete checkpoints of a job on storage, recorded by the master or not, and their verification.

If one is damaged, the master decides which older one is used.
"""

from __future__ import annotations

import errno
import heapq
from dataclasses import dataclass
from pathlib import Path

from ganger.injob import state_image as image

from ganger_daemon.checkpoints.layout import (
    MANIFEST,
    Entry,
    Manifest,
    checkpoints_directory,
    complete,
    parse_final,
    read_manifest,
)
from ganger_daemon.checkpoints.manifest import Described, describe_shard
from ganger_daemon.core.outcomes import FoundCheckpoint
from ganger_daemon.node.safe_files import open_plain

# More than a job keeps; a job may have filled its directory with others.
_MOST = 16


def newest_found(storage: Path, job_uid: str, before_epoch: int) -> tuple[FoundCheckpoint, ...]:
    """Return the complete checkpoints of attempts before `before_epoch`, newest first, at most 16. Blocks.

    Those that cannot be read are left out."""
    directory = checkpoints_directory(storage, job_uid)
    try:
        names = [name for name in complete(directory) if name.epoch < before_epoch]
    except OSError:
        return ()
    found = []
    for name in heapq.nlargest(_MOST, names, key=lambda name: (name.epoch, name.step)):
        try:
            one = read_manifest(directory / str(name))
        except (OSError, ValueError):
            continue
        found.append(FoundCheckpoint(name.step, name.epoch, f"checkpoints/{name}", one.size_bytes, one.time))
    return tuple(found)


# Errors of the files themselves; others may pass.
_LASTING = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EUCLEAN, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.ENXIO)


@dataclass(frozen=True, slots=True)
class Verified:
    path: Path
    step: int
    world: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A checkpoint that cannot be read. `is_lasting`: false if the cause may pass, as a storage server that is away."""

    path: Path
    why: str
    is_lasting: bool = True


def verify(directory: Path, ranks: tuple[int, ...] | None = None) -> Verified | Unreadable:
    """Check manifest, sizes and digests, and that each shard is the one its manifest names. Blocks.

    `ranks`: only the shards that these ranks start from are read. In a larger world than the one that saved, several
    ranks start from one shard."""
    try:
        manifest = read_manifest(directory)
        name = parse_final(directory.name)
        if name is not None and (manifest.step, manifest.epoch) not in ((name.step, name.epoch), (name.step, None)):
            is_of = f"is of step {manifest.step} and epoch {manifest.epoch}"
            return Unreadable(directory, f"{MANIFEST} {is_of}, its directory is {directory.name}")
        files = {entry.rank: (Path(file).name, entry) for file, entry in manifest.files.items()}
        if len(files) != manifest.world or not all(0 <= rank < manifest.world for rank in files):
            return Unreadable(directory, f"{MANIFEST} lists {len(files)} of {manifest.world} shards")
        wanted = set(files) if ranks is None else {rank % manifest.world for rank in ranks}
        for rank, (file, entry) in sorted(files.items()):
            if why := _trouble_with(directory / file, entry, manifest, is_read=rank in wanted):
                return Unreadable(directory, f"{file} {why}")
    except OSError as error:
        return Unreadable(directory, f"{error.filename or directory}: {error.strerror}", error.errno in _LASTING)
    except ValueError as error:
        return Unreadable(directory, str(error))
    return Verified(directory, manifest.step, manifest.world, manifest.size_bytes)


def _trouble_with(shard: Path, entry: Entry, manifest: Manifest, is_read: bool) -> str:
    """Return why a shard is not the one that its manifest names; empty if it is. Raises OSError."""
    with open_plain(shard, is_jobs_directory=True) as file:
        actual = file.seek(0, 2)
    if actual != entry.bytes:
        return f"has {actual} bytes, {MANIFEST} says {entry.bytes}"
    if not is_read:
        return ""
    try:
        found = describe_shard(shard)
    except image.ImageError as error:
        return f"is damaged: {error}"
    return _difference(found, entry, manifest)


def _difference(found: Described, entry: Entry, manifest: Manifest) -> str:
    """Return how a shard differs from its entry in the manifest; empty if it does not."""
    if found.digest != entry.digest:
        return f"has digest {found.digest}, {MANIFEST} says {entry.digest}"
    if (found.rank, found.world, found.step) != (entry.rank, manifest.world, manifest.step):
        is_of = f"is rank {found.rank} of {found.world} at step {found.step}"
        return f"{is_of}, {MANIFEST} says rank {entry.rank} of {manifest.world} at step {manifest.step}"
    if entry.header_digest and found.header_digest != entry.header_digest:
        return f"has a header of digest {found.header_digest}, {MANIFEST} says {entry.header_digest}"
    return ""
