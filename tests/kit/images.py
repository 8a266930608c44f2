"""A state image as a test reads it: whole, with every digest compared."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from ganger.injob import state_image


@dataclass(frozen=True)
class ImageSummary:
    """The properties of a verified image. `digest` is 16 hexadecimal digits and stands for all of its data."""

    step: int
    samples: int
    rank: int
    world: int
    total_bytes: int
    digest: str


def verify_image(source: Path | int) -> ImageSummary:
    """Read the whole image, a file or an open one, and compare every digest. Raises ImageError, OSError."""
    if isinstance(source, int):
        return _verify(source)
    descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _verify(descriptor)
    finally:
        os.close(descriptor)


def _verify(descriptor: int) -> ImageSummary:
    preamble = state_image.parse_preamble(os.pread(descriptor, state_image.PREAMBLE_BYTES, 0))
    header = state_image.parse_header(
        preamble, _read_exactly(descriptor, preamble.header_bytes, state_image.PREAMBLE_BYTES)
    )
    digests = state_image.ChunkDigests(preamble.digest_kind, preamble.chunk_bytes)
    for offset in range(preamble.data_offset, preamble.trailer_offset, preamble.chunk_bytes):
        size = min(preamble.chunk_bytes, preamble.trailer_offset - offset)
        digests.update(_read_exactly(descriptor, size, offset))
    found = _read_exactly(descriptor, preamble.trailer_bytes, preamble.trailer_offset)
    state_image.check_trailer(digests.trailer(), found)
    return ImageSummary(
        step=int(header.get("step", 0)),
        samples=int(header.get("samples", 0)),
        rank=int(header.get("rank", 0)),
        world=int(header.get("world", 1)),
        total_bytes=preamble.total_bytes,
        digest=f"{struct.unpack('<Q', found[-8:])[0]:016x}",
    )


def _read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = os.pread(descriptor, size, offset)
        if not part:
            raise state_image.ImageError("TRUNCATED", f"the image ends at byte {offset}, {size} bytes too early")
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
