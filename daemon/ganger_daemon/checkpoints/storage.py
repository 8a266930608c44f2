"""Checkpoints on storage: layout, token, free space, shards, and the manifest that publishes them. A checkpoint exists
when its directory has its final name `STEP-EPOCH` and a readable manifest: the rename decides. A job writes the shards,
so no size that they state makes this process allocate much memory."""

from __future__ import annotations

import errno
import heapq
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from ganger.injob import state_image
from ganger.text import os_reason

from ganger_daemon.core.part_facts import FoundCheckpoint
from ganger_daemon.node.accounts import Account, give_directory
from ganger_daemon.node.daemon_files import open_plain, read_plain

MANIFEST = "MANIFEST.json"
MANIFEST_FORMAT = 1
# Enough for tens of thousands of shards; a job may have written a larger file.
_MANIFEST_MOST_BYTES = 16 << 20
CHECKPOINTS, IMAGES = PLACES = ("checkpoints", "images")
"""Directories of a job's checkpoints: what its ranks write, and process images of a job that runs as an account, which
only this process's user can have written."""
_LOGS = "logs"
_FINAL = re.compile(r"^(\d+)-(\d+)$")
_UNFINISHED = re.compile(r"^(\d+|\{step\})-(\d+)\.tmp$")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    step: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.step}-{self.epoch}"


def checkpoints_directory(storage: Path, job_uid: str, place: str = CHECKPOINTS) -> Path:
    return storage / job_uid / place


def give_storage(storage: Path, job_uid: str, account: Account) -> None:
    """Make a job's directories on storage for an account: its checkpoints are that account's, its logs and images this
    process's. Idempotent. Raises OSError, also where a server squashes root and lets it give nothing away."""
    for name in (_LOGS, IMAGES):
        give_directory(storage, f"{job_uid}/{name}", account, 0o700, is_its=False)
    _give_former(storage / job_uid / CHECKPOINTS, account)
    give_directory(storage, f"{job_uid}/{CHECKPOINTS}", account, 0o700, is_its=True)


def _give_former(directory: Path, account: Account) -> None:
    """Give checkpoints to an account that were saved before their job had one. While the directory is this process's,
    no account has put anything there."""
    if not directory.is_dir() or directory.is_symlink() or directory.stat().st_uid != os.geteuid():
        return
    for _, below, files, descriptor in os.fwalk(directory):
        for name in (*below, *files):
            os.chown(name, account.uid, account.gid, dir_fd=descriptor, follow_symlinks=False)


def unfinished_template(storage: Path, job_uid: str, epoch: int) -> str:
    """Return the directory that ranks write to. They replace `{step}`, not yet known when the order is written."""
    return str(checkpoints_directory(storage, job_uid) / f"{{step}}-{epoch}.tmp")


def shard_name(rank: int) -> str:
    return f"rank-{rank}.shard"


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
    # The tasks of each role, of a job in which these numbers may change; else empty. Not in the order of the ranks.
    roles: dict[str, int] = {}
    # Of one on a node's disk: the ranks of each node of the gang that saved it, in the order of the gang.
    by_node: list[list[int]] = []

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(entry.bytes for entry in self.files.values())


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest in a checkpoint's directory. Raises OSError, or ValueError if it is damaged or too new."""
    content = read_plain(directory / MANIFEST, _MANIFEST_MOST_BYTES, is_jobs_directory=True)
    try:
        found = msgspec.json.decode(content, type=Manifest)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is not a manifest: {error}") from error
    if found.format > MANIFEST_FORMAT:
        raise ValueError(f"{MANIFEST} has format {found.format}; this Ganger reads formats up to {MANIFEST_FORMAT}")
    if found.roles and (min(found.roles.values()) < 1 or sum(found.roles.values()) != found.world):
        raise ValueError(f"{MANIFEST} lists {found.roles} tasks of {found.world} ranks")
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


# More than a job keeps; a job may have filled its directory with others.
_MOST = 16
# Errors of the files themselves; others may pass.
LASTING = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EUCLEAN, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.ENXIO)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's durable part, whose bytes match their digests. `digest` is "algorithm:hex" of its data,
    `header_digest` the same of its header; `device_model` the name of the accelerators its state was on, empty without
    any. `step`, `world`: as its header has them, zero in a report."""

    rank: int
    size_bytes: int
    digest: str
    device_model: str = ""
    header_digest: str = ""
    step: int = 0
    world: int = 0


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a member reports to the leader of one agreement: its durable shards, or (`refusal`) why there are none."""

    agreement: int
    step: int = 0
    shards: tuple[Shard, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ShardCollection:
    """Shards of one agreement, collected until every rank has reported its own. `place`: one of PLACES."""

    world: int
    step: int
    shards: Mapping[int, Shard] = field(default_factory=dict)
    place: str = CHECKPOINTS

    def add(self, step: int, shards: tuple[Shard, ...]) -> ShardCollection:
        """Return the collection with these shards added. Shards of a newer step replace those of an older one."""
        if step < self.step:
            return self
        known = dict(self.shards) if step == self.step else {}
        known.update({shard.rank: shard for shard in shards if 0 <= shard.rank < self.world})
        return replace(self, step=step, shards=known)

    @property
    def complete(self) -> bool:
        return len(self.shards) == self.world


def manifest(
    collection: ShardCollection,
    job_uid: str,
    epoch: int,
    time_s: float,
    roles: Mapping[str, int] | None = None,
    by_node: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    assert collection.complete, "a manifest is written when all shards are there"
    return {
        "format": MANIFEST_FORMAT,
        "job_uid": job_uid,
        "epoch": epoch,
        "step": collection.step,
        "world": collection.world,
        "time": time_s,
        **({"roles": dict(roles)} if roles else {}),
        **({"by_node": [list(ranks) for ranks in by_node]} if by_node else {}),
        "files": {
            shard_name(shard.rank): {
                "rank": shard.rank,
                "bytes": shard.size_bytes,
                "digest": shard.digest,
                "header_digest": shard.header_digest,
                "device_model": shard.device_model,
            }
            for _, shard in sorted(collection.shards.items())
        },
    }


def directories(storage: Path, job_uid: str, epoch: int, step: int, place: str = CHECKPOINTS) -> tuple[Path, Path]:
    """Return the directory that shards are written to, and its final name."""
    parent = checkpoints_directory(storage, job_uid, place)
    final = parent / str(CheckpointName(step, epoch))
    return final.with_name(final.name + ".tmp"), final


# The state beside its tensors, as JSON, of which only a few fields are decoded here.
_HEADER_MOST_BYTES = 128 << 20
_PIECE_BYTES = 1 << 20
_MODEL_CHARACTERS = 200
_ALGORITHMS = {state_image.XXH3: "xxh3_64", state_image.CRC32: "crc32"}


class _Header(msgspec.Struct, frozen=True, gc=False):
    """The fields of an image's header that identify it; the others are skipped."""

    step: int = 0
    rank: int = 0
    world: int = 1
    device_model: str = ""


def describe_shard(path: Path) -> Shard:
    """Read all of a shard and check its digests. Blocks. Raises state_image.ImageError and OSError."""
    with open_plain(path, is_jobs_directory=True) as file:
        size = os.fstat(file.fileno()).st_size
        preamble = state_image.parse_preamble(_exactly(file, min(size, state_image.PREAMBLE_BYTES)))
        if size != preamble.total_bytes:
            raise state_image.ImageError("TRUNCATED", f"the image has {preamble.total_bytes} bytes, its file {size}")
        if preamble.header_bytes > _HEADER_MOST_BYTES:
            text = f"the state has {preamble.header_bytes} bytes beside its tensors; at most {_HEADER_MOST_BYTES}"
            raise state_image.ImageError("HEADER", text)
        if preamble.chunk_bytes != state_image.CHUNK_BYTES:
            each = f"a digest for each {preamble.chunk_bytes} bytes, not for each {state_image.CHUNK_BYTES}"
            raise state_image.ImageError("HEADER", f"the image has {each}")
        encoded = _exactly(file, preamble.header_bytes)
        state_image.check_header(preamble, encoded)
        header = _header_of(encoded)
        del encoded
        digests = state_image.ChunkDigests(preamble.digest_kind, preamble.chunk_bytes)
        left = preamble.data_bytes
        while left:
            piece = _exactly(file, min(_PIECE_BYTES, left))
            digests.update(piece)
            left -= len(piece)
        trailer = _exactly(file, preamble.trailer_bytes)
        state_image.check_trailer(digests.trailer(), trailer)
    algorithm = _ALGORITHMS[preamble.digest_kind]
    return Shard(
        rank=header.rank,
        size_bytes=size,
        digest=f"{algorithm}:{int.from_bytes(trailer[-8:], 'little'):016x}",
        # A text of the job, for people.
        device_model=header.device_model[:_MODEL_CHARACTERS],
        header_digest=f"{algorithm}:{preamble.header_digest:016x}",
        step=header.step,
        world=header.world,
    )


def _header_of(encoded: bytes) -> _Header:
    try:
        return msgspec.json.decode(encoded, type=_Header)
    except (ValueError, RecursionError) as error:
        raise state_image.ImageError("HEADER", f"the image's header cannot be read: {error}") from error


def _exactly(file: BinaryIO, size: int) -> bytes:
    found = file.read(size)
    if len(found) != size:
        raise state_image.ImageError("TRUNCATED", f"the image ends {size - len(found)} bytes too early")
    return found


def newest_found(storage: Path, job_uid: str, before_epoch: int) -> tuple[FoundCheckpoint, ...]:
    """Return the complete checkpoints of attempts before `before_epoch`, newest first, at most 16. Blocks.

    Those that cannot be read are left out."""
    try:
        names = [one for one in every(storage, job_uid) if one[0].epoch < before_epoch]
    except OSError:
        return ()
    found = []
    for name, place in heapq.nlargest(_MOST, names, key=lambda one: (one[0].epoch, one[0].step)):
        with suppress(OSError, ValueError):
            found.append(found_checkpoint(storage, job_uid, name, place))
    return tuple(found)


def every(storage: Path, job_uid: str) -> list[tuple[CheckpointName, str]]:
    """Return a job's published checkpoints with their places, oldest first. Raises OSError."""
    found = [(name, place) for place in PLACES for name in complete(checkpoints_directory(storage, job_uid, place))]
    return sorted(found)


def found_checkpoint(storage: Path, job_uid: str, name: CheckpointName, place: str) -> FoundCheckpoint:
    """Return what a published checkpoint's manifest says. Raises OSError and ValueError."""
    one = read_manifest(checkpoints_directory(storage, job_uid, place) / str(name))
    return FoundCheckpoint(name.step, name.epoch, f"{place}/{name}", one.size_bytes, one.time)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A checkpoint that cannot be read. `is_lasting`: false if the cause may pass, as a storage server that is away."""

    why: str
    is_lasting: bool = True


def verify(directory: Path, ranks: tuple[int, ...] | None = None, is_whole: bool = True) -> Manifest | Unreadable:
    """Check manifest, sizes and digests, and that each shard is the one its manifest names. Blocks.

    `ranks`: only the shards that these ranks start from are read. In a larger world than the one that saved, several
    ranks start from one shard. None: all. `is_whole`: whether the others have to be there."""
    try:
        manifest = read_manifest(directory)
        name = parse_final(directory.name)
        if name is not None and (manifest.step, manifest.epoch) not in ((name.step, name.epoch), (name.step, None)):
            is_of = f"is of step {manifest.step} and epoch {manifest.epoch}"
            return Unreadable(f"{MANIFEST} {is_of}, its directory is {directory.name}")
        files = {entry.rank: (Path(file).name, entry) for file, entry in manifest.files.items()}
        if len(files) != manifest.world or not all(0 <= rank < manifest.world for rank in files):
            return Unreadable(f"{MANIFEST} lists {len(files)} of {manifest.world} shards")
        wanted = set(files) if ranks is None else {rank % manifest.world for rank in ranks}
        for rank, (file, entry) in sorted(files.items()):
            if not is_whole and rank not in wanted:
                continue
            if why := _trouble_with(directory / file, entry, manifest, is_read=rank in wanted):
                return Unreadable(f"{file} {why}")
    except OSError as error:
        return Unreadable(f"{error.filename or directory}: {os_reason(error)}", error.errno in LASTING)
    except ValueError as error:
        return Unreadable(str(error))
    return manifest


def has_shard(shard: Path, entry: Entry, manifest: Manifest) -> bool:
    """Return whether a file is the shard that a manifest names, undamaged. Blocks."""
    try:
        return not _trouble_with(shard, entry, manifest, is_read=True)
    except OSError:
        return False


def _trouble_with(shard: Path, entry: Entry, manifest: Manifest, is_read: bool) -> str:
    with open_plain(shard, is_jobs_directory=True) as file:
        actual = file.seek(0, 2)
    if actual != entry.bytes:
        return f"has {actual} bytes, {MANIFEST} says {entry.bytes}"
    if not is_read:
        return ""
    try:
        found = describe_shard(shard)
    except state_image.ImageError as error:
        return f"is damaged: {error}"
    if found.digest != entry.digest:
        return f"has digest {found.digest}, {MANIFEST} says {entry.digest}"
    if (found.rank, found.world, found.step) != (entry.rank, manifest.world, manifest.step):
        is_of = f"is rank {found.rank} of {found.world} at step {found.step}"
        return f"{is_of}, {MANIFEST} says rank {entry.rank} of {manifest.world} at step {manifest.step}"
    if entry.header_digest and found.header_digest != entry.header_digest:
        return f"has a header of digest {found.header_digest}, {MANIFEST} says {entry.header_digest}"
    return ""
