"""Reading a state image: its header, its tensors as their bytes arrive, and single pieces of it, all against digests.

The format is ganger.injob.state_image's; image_io writes it.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Callable, Protocol

import torch

from ganger.injob import state_image
from ganger.injob.state_image import ImageError, Preamble
from ganger.training.image_io import PIECE_BYTES, TRANSFER_BYTES, host_view, is_dense
from ganger.training.state_codec import dtype_named


class ByteSource(Protocol):
    # whether `fill` can copy to an accelerator
    reaches_devices: bool

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from byte `offset` of the image. Raises ImageError (TRUNCATED), OSError."""

    def fill(self, target: torch.Tensor, offset: int) -> memoryview:
        """The same for a contiguous tensor of bytes; returns them as they lie in host memory. Copies to an accelerator
        may still be under way on return."""


class FileSource:
    reaches_devices = False

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_into(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise ImageError("TRUNCATED", f"the image ends at byte {offset + done}")
            done += count

    def fill(self, target: torch.Tensor, offset: int) -> memoryview:
        view = host_view(target)
        self.read_into(view, offset)
        return view


class ArenaSource:
    """Reads mapped memory that may still be filling; `wait(n)` returns once n bytes are there, or raises."""

    reaches_devices = True

    def __init__(self, arena: memoryview, wait: Callable[[int], None]) -> None:
        self._arena = arena
        self._wait = wait
        self._bytes = torch.frombuffer(arena, dtype=torch.uint8)

    def read_into(self, view: memoryview, offset: int) -> None:
        end = self._arrived(offset, len(view))
        view[:] = self._arena[offset:end]

    def fill(self, target: torch.Tensor, offset: int) -> memoryview:
        end = self._arrived(offset, target.numel())
        target.copy_(self._bytes[offset:end], non_blocking=True)
        return self._arena[offset:end]

    def _arrived(self, offset: int, size: int) -> int:
        end = offset + size
        if end > len(self._arena):
            raise ImageError("TRUNCATED", f"the image wants byte {end} of an arena of {len(self._arena)} bytes")
        self._wait(end)
        return end


@dataclass(frozen=True)
class OpenImage:
    """An image whose header has arrived."""

    preamble: Preamble
    header: dict[str, Any]
    source: ByteSource

    @property
    def step(self) -> int:
        return int(self.header["step"])

    @property
    def tree(self) -> Any:
        return self.header["tree"]


def open_image(source: ByteSource) -> OpenImage:
    """Open an image. Raises ImageError and OSError."""
    start = bytearray(state_image.PREAMBLE_BYTES)
    source.read_into(memoryview(start), 0)
    preamble = state_image.parse_preamble(start)
    encoded = bytearray(preamble.header_bytes)
    source.read_into(memoryview(encoded), state_image.PREAMBLE_BYTES)
    return OpenImage(preamble, state_image.parse_header(preamble, encoded), source)


def read_tensors(
    image: OpenImage,
    destinations: dict[int, torch.Tensor],
    device_of: Callable[[str], torch.device],
    skipped: Collection[int] = (),
) -> dict[int, torch.Tensor]:
    """Read every tensor: into its destination where one is given, else into a new tensor. `skipped` are not returned.

    All of it is checked against the digests before this returns. Raises ImageError, OSError, ValueError (a destination
    of another shape). After an error the destinations hold a mixture and must not be used.
    """
    table, preamble = image.header["tensors"], image.preamble
    digests = state_image.ChunkDigests(preamble.digest_kind, preamble.chunk_bytes)
    position, result = 0, dict[int, torch.Tensor]()
    for index in sorted(range(len(table)), key=lambda i: (table[i]["offset"], i)):
        entry = table[index]
        if entry["offset"] < position:
            raise ImageError("HEADER", f"entry {index} of the image's tensor table overlaps another")
        if index in skipped:
            continue
        _skip(image, position, entry["offset"], digests)
        result[index] = _read_tensor(image, entry, destinations.get(index), device_of, digests)
        position = entry["offset"] + entry["bytes"]
    _skip(image, position, preamble.data_bytes, digests)
    found = bytearray(preamble.trailer_bytes)
    # the last bytes: with them all of the image has arrived
    image.source.read_into(memoryview(found), preamble.trailer_offset)
    state_image.check_trailer(digests.trailer(), bytes(found))
    return result


def _skip(image: OpenImage, start: int, end: int, digests: state_image.ChunkDigests) -> None:
    while start < end:
        gap = bytearray(min(end - start, TRANSFER_BYTES))
        image.source.read_into(memoryview(gap), image.preamble.data_offset + start)
        digests.update(gap)
        start += len(gap)


def _read_tensor(
    image: OpenImage,
    entry: dict[str, Any],
    destination: torch.Tensor | None,
    device_of: Callable[[str], torch.device],
    digests: state_image.ChunkDigests,
) -> torch.Tensor:
    try:
        dtype, shape = dtype_named(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        expected = _element_count(shape) * torch.empty(0, dtype=dtype).element_size()
    except (ValueError, TypeError, KeyError) as error:
        raise ImageError("HEADER", f"a tensor of the image cannot be made here: {error}") from error
    if expected != entry["bytes"]:
        raise ImageError("HEADER", f"a tensor of shape {shape} and {dtype} has {expected} bytes, not {entry['bytes']}")
    if destination is not None and (tuple(destination.shape) != shape or destination.dtype != dtype):
        raise ValueError(
            f"the saved tensor is {shape} {dtype}, the script's is {tuple(destination.shape)} {destination.dtype}: "
            "the script or its data changed since the state was saved"
        )
    if destination is None:
        destination = _new_tensor(entry, shape, dtype, device_of(entry.get("device", "cpu")))
    reachable = destination.device.type == "cpu" or image.source.reaches_devices
    direct = reachable and destination.is_contiguous()
    target = destination.detach() if direct else torch.empty(shape, dtype=dtype)
    flat = target.reshape(-1).view(torch.uint8)
    step = PIECE_BYTES if flat.device.type == "cpu" else TRANSFER_BYTES
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        digests.update(image.source.fill(piece, image.preamble.data_offset + entry["offset"] + start))
    if not direct:
        with torch.no_grad():
            destination.detach().copy_(target)
    return destination


def _element_count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        if size < 0:
            raise ValueError(f"negative size in shape {shape}")
        count *= size
    return count


def _new_tensor(
    entry: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    strides = entry.get("strides")
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=device)
    made = torch.empty_strided(shape, tuple(int(n) for n in strides), dtype=dtype, device=device)
    if not is_dense(made):
        raise ImageError("HEADER", f"strides {strides} do not fit the shape {shape}")
    return made


class PieceReader:
    """Reads pieces of an image's data. Of the image only the chunks that they are in are read, against their digests.

    Raises ImageError, OSError."""

    def __init__(self, image: OpenImage) -> None:
        self._source, self._preamble = image.source, image.preamble
        self._name = f"rank {image.header['rank']}"
        self._trailer = bytearray(self._preamble.trailer_bytes)
        self._source.read_into(memoryview(self._trailer), self._preamble.trailer_offset)
        digest = state_image.digest_of(self._preamble.digest_kind, self._trailer[:-8])
        state_image.check_trailer(bytes(self._trailer[:-8]) + digest.to_bytes(8, "little"), bytes(self._trailer))
        self._number = -1
        self._chunk = bytearray()

    def read(self, start: int, size: int) -> bytearray:
        """Return `size` bytes from byte `start` of the data."""
        found = bytearray()
        while len(found) < size:
            number, inside = divmod(start + len(found), self._preamble.chunk_bytes)
            found += memoryview(self._verified(number))[inside : inside + size - len(found)]
        return found

    def _verified(self, number: int) -> bytearray:
        if number != self._number:
            first, end = number * self._preamble.chunk_bytes, (number + 1) * self._preamble.chunk_bytes
            chunk = bytearray(min(end, self._preamble.data_bytes) - first)
            self._source.read_into(memoryview(chunk), self._preamble.data_offset + first)
            digest = state_image.digest_of(self._preamble.digest_kind, chunk)
            if digest.to_bytes(8, "little") != self._trailer[8 * number : 8 * number + 8]:
                raise ImageError(
                    "DIGEST", f"the image of {self._name} is damaged: chunk {number} differs from its digest"
                )
            self._number, self._chunk = number, chunk
        return self._chunk
