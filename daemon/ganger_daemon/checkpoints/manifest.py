"""Shards of a checkpoint, their completeness, and the manifest; the launcher writes and renames.

A job writes the shard files, so no size that they state makes this process allocate much memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from ganger.injob import state_image as image

from ganger_daemon.checkpoints.layout import MANIFEST_FORMAT, CheckpointName, checkpoints_directory
from ganger_daemon.node.safe_files import open_plain


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's durable part. `digest` is "algorithm:hex" of its data, `header_digest` the same of its header;
    `device_model` the name of the accelerators its state was on, empty without any."""

    rank: int
    file: str
    size_bytes: int
    digest: str
    device_model: str = ""
    header_digest: str = ""


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a member reports to the leader of one agreement: its durable shards, or (`refusal`) why there are none."""

    agreement: int
    step: int = 0
    shards: tuple[Shard, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Gathering:
    """Shards of one agreement, collected until every rank has reported its own."""

    world: int
    step: int
    shards: Mapping[int, Shard] = field(default_factory=dict)

    def add(self, step: int, shards: tuple[Shard, ...]) -> Gathering:
        """Return the gathering with these shards added. Shards of a newer step replace those of an older one."""
        if step < self.step:
            return self
        known = dict(self.shards) if step == self.step else {}
        known.update({shard.rank: shard for shard in shards if 0 <= shard.rank < self.world})
        return Gathering(self.world, step, known)

    @property
    def complete(self) -> bool:
        return len(self.shards) == self.world

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards.values())


def manifest(gathering: Gathering, job_uid: str, epoch: int, time_seconds: float) -> dict[str, Any]:
    assert gathering.complete, "a manifest is written when all shards are there"
    return {
        "format": MANIFEST_FORMAT,
        "job_uid": job_uid,
        "epoch": epoch,
        "step": gathering.step,
        "world": gathering.world,
        "time": time_seconds,
        "files": {
            shard.file: {
                "rank": shard.rank,
                "bytes": shard.size_bytes,
                "digest": shard.digest,
                "header_digest": shard.header_digest,
                "device_model": shard.device_model,
            }
            for _, shard in sorted(gathering.shards.items())
        },
    }


def directories(storage: Path, job_uid: str, epoch: int, step: int) -> tuple[Path, Path]:
    """Return the directory that ranks write to, and its final name."""
    parent = checkpoints_directory(storage, job_uid)
    final = parent / str(CheckpointName(step, epoch))
    return final.with_name(final.name + ".tmp"), final


# The state beside its tensors, as JSON, of which only a few fields are decoded here.
_HEADER_MOST_BYTES = 128 << 20
_PIECE_BYTES = 1 << 20
_MODEL_CHARACTERS = 200
_ALGORITHMS = {image.XXH3: "xxh3_64", image.CRC32: "crc32"}


class _Header(msgspec.Struct, frozen=True, gc=False):
    """The fields of an image's header that identify it; the others are skipped."""

    step: int = 0
    rank: int = 0
    world: int = 1
    device_model: str = ""


@dataclass(frozen=True, slots=True)
class Described:
    """A shard whose bytes have all been read and match its digests. `digest`, `header_digest`: "algorithm:hex"."""

    size_bytes: int
    digest: str
    header_digest: str
    step: int
    rank: int
    world: int
    device_model: str

    def shard(self, rank: int, file: str) -> Shard:
        """Return the manifest's entry for it. `file`: its name in the checkpoint's directory."""
        return Shard(rank, file, self.size_bytes, self.digest, self.device_model, self.header_digest)


def describe_shard(path: Path) -> Described:
    """Read all of a shard and check its digests. Blocks. Raises image.ImageError or OSError."""
    with open_plain(path, is_jobs_directory=True) as file:
        size = os.fstat(file.fileno()).st_size
        preamble = image.parse_preamble(_exactly(file, min(size, image.PREAMBLE_BYTES)))
        if size != preamble.total_bytes:
            raise image.ImageError("TRUNCATED", f"the image has {preamble.total_bytes} bytes, its file {size}")
        if preamble.header_bytes > _HEADER_MOST_BYTES:
            text = f"the state has {preamble.header_bytes} bytes beside its tensors; at most {_HEADER_MOST_BYTES}"
            raise image.ImageError("HEADER", text)
        if preamble.chunk_bytes != image.CHUNK_BYTES:
            text = f"the image has a digest for each {preamble.chunk_bytes} bytes, not for each {image.CHUNK_BYTES}"
            raise image.ImageError("HEADER", text)
        encoded = _exactly(file, preamble.header_bytes)
        image.check_header(preamble, encoded)
        header = _header_of(encoded)
        del encoded
        digests = image.ChunkDigests(preamble.digest_kind, preamble.chunk_bytes)
        left = preamble.data_bytes
        while left:
            piece = _exactly(file, min(_PIECE_BYTES, left))
            digests.update(piece)
            left -= len(piece)
        trailer = _exactly(file, preamble.trailer_bytes)
        image.check_trailer(digests.trailer(), trailer)
    algorithm = _ALGORITHMS[preamble.digest_kind]
    return Described(
        size_bytes=size,
        digest=f"{algorithm}:{int.from_bytes(trailer[-8:], 'little'):016x}",
        header_digest=f"{algorithm}:{preamble.header_digest:016x}",
        step=header.step,
        rank=header.rank,
        world=header.world,
        # A text of the job, for people.
        device_model=header.device_model[:_MODEL_CHARACTERS],
    )


def _header_of(encoded: bytes) -> _Header:
    try:
        return msgspec.json.decode(encoded, type=_Header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise image.ImageError("HEADER", f"the image's header cannot be read: {error}") from error


def _exactly(file: BinaryIO, size: int) -> bytes:
    found = file.read(size)
    if len(found) != size:
        raise image.ImageError("TRUNCATED", f"the image ends {size - len(found)} bytes too early")
    return found
