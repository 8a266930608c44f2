"""Whether a checkpoint on storage can be trusted. Which older one is taken when it cannot is for the master to say."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from ganger.injob import image

from .layout import MANIFEST, read_manifest

_MODEL_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Verified:
    path: Path
    step: int
    world: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """`is_lasting` is false for what storage may get over: a server that is away says nothing about the files."""

    path: Path
    why: str
    is_lasting: bool = True


def describe_shard(path: Path) -> tuple[int, str, str]:
    """(bytes, "algorithm:hex", model of the devices its state was on) of a shard, every byte of it read and checked.
    Raises image.ImageError or OSError."""
    with open(path, "rb") as file:
        preamble = image.parse_preamble(file.read(64))
    summary = image.verify(str(path))
    digest = f"{'xxh3_64' if preamble.digest_kind == 1 else 'crc32'}:{summary.digest}"
    # What a job says of itself, for people to read.
    model = str(image.read_header(str(path)).get("device_model", ""))[:_MODEL_CHARACTERS]
    return summary.total_bytes, digest, model


def verify(directory: Path, ranks: tuple[int, ...] | None = None) -> Verified | Unreadable:
    """Checks manifest, sizes and digests; only the shards that `ranks` start from are read where that is given: in a
    larger world than the one that saved, more than one from the same."""
    try:
        fields = read_manifest(directory)
        step, world = int(fields["step"]), int(fields["world"])
        files = {int(entry["rank"]): (name, entry) for name, entry in fields["files"].items()}
        if sorted(files) != list(range(world)):
            return Unreadable(directory, f"{MANIFEST} lists {len(files)} of {world} shards")
        size = 0
        for rank, (name, entry) in sorted(files.items()):
            shard = directory / Path(name).name
            actual = shard.stat().st_size
            size += actual
            if actual != int(entry["bytes"]):
                return Unreadable(directory, f"{shard.name} has {actual} bytes, {MANIFEST} says {entry['bytes']}")
            if ranks is not None and rank not in {one % world for one in ranks}:
                continue
            _, digest, _ = describe_shard(shard)
            if digest != str(entry["digest"]):
                return Unreadable(directory, f"{shard.name} has digest {digest}, {MANIFEST} says {entry['digest']}")
    except OSError as error:
        lasting = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EUCLEAN)
        return Unreadable(directory, f"{error.filename or directory}: {error.strerror}", lasting)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Unreadable(directory, f"{type(error).__name__}: {error}")
    except image.ImageError as error:
        return Unreadable(directory, f"{shard.name}: {error}")
    return Verified(directory, step, world, size)
