"""State images from live tensors, without a copy in between where the device allows it, and back.

The format is ganger.injob.state_image's. A writer reports its progress after every piece, so that filled parts can be
streamed. A reader takes tensors as their bytes arrive, or single pieces, all of it against digests.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import platform
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Callable, Union

import torch

from ganger.injob import state_image
from ganger.injob.state_image import ImageError, Preamble
from ganger.training.state_codec import device_model, dtype_named

# Small enough that what was copied is still in the processor's cache when it is hashed: together they take little
# longer than the copy alone. And the stream of an image is never far behind the copy that fills it.
PIECE_BYTES = 256 << 10
# Between host and device, and to storage, a call costs more.
TRANSFER_BYTES = 4 << 20
# Copies from a device that are under way at a time, where their target is not reused.
COPIES_AHEAD = 16
MAX_PENDING_PIECES = 512  # Below IOV_MAX
_NONE: Mapping[int, dict[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class ImagePlan:
    """A complete image before its bytes are written: layout, encoded header, tensors in the order of their data."""

    preamble: Preamble
    header: bytes
    tensors: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.preamble.total_bytes


def plan_image(
    tree: Any, tensors: Sequence[torch.Tensor], layouts: Mapping[int, dict[str, Any]] = _NONE, **facts: int
) -> ImagePlan:
    """Lay an image out. `tree` is tagged JSON whose tensor references index `tensors`; `facts` are step, samples, rank
    and world. `layouts`: of those that are parts of sharded tensors, by index (`state_codec.layout_of`)."""
    table: list[dict[str, Any]] = []
    position = 0
    for index, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        dtype, shape = str(tensor.dtype)[len("torch.") :], list(tensor.shape)
        entry = {"dtype": dtype, "shape": shape, "offset": position, "bytes": size, "device": tensor.device.type}
        if not tensor.is_contiguous() and is_dense(tensor):
            entry["strides"] = list(tensor.stride())
        if index in layouts:
            entry["sharded"] = layouts[index]
        table.append(entry)
        position = state_image.aligned(position + size)
    header = {
        "format": state_image.VERSION,
        **facts,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device_model": device_model(tensors),
        "tensors": table,
        "tree": tree,
    }
    preamble, encoded = state_image.lay_out(header, position, state_image.preferred_digest())
    return ImagePlan(preamble, encoded, tuple(tensors), tuple(entry["offset"] for entry in table))


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one block without gap or overlap, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def write_image(plan: ImagePlan, sink: FileSink | ArenaSink) -> str:
    """Write the whole image; returns the 16 hexadecimal digits that stand for its data. Raises OSError of the sink."""
    preamble = plan.preamble
    sink.put(preamble.pack())
    sink.put(plan.header)
    digests = state_image.ChunkDigests(preamble.digest_kind, preamble.chunk_bytes)

    def put(data: Any) -> None:
        sink.put(data)
        digests.update(data)

    position = 0
    for tensor, offset in zip(plan.tensors, plan.offsets):
        if offset > position:
            put(bytes(offset - position))
        piece_bytes = PIECE_BYTES if tensor.device.type == "cpu" else TRANSFER_BYTES
        for view in host_views(tensor, sink.room):
            for start in range(0, len(view), piece_bytes):
                put(view[start : start + piece_bytes])
        position = offset + tensor.numel() * tensor.element_size()
    put(bytes(preamble.data_bytes - position))
    trailer = digests.trailer()
    sink.put(trailer)
    if isinstance(sink, FileSink):
        sink.flush()
    return trailer[-8:][::-1].hex()


def host_views(tensor: torch.Tensor, room: Callable[[int], memoryview | None]) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in logical order, in parts. Each is valid until the next one.

    Bytes of a device are copied to `room(size)` where there is one, else through two staging buffers.
    """
    if tensor.numel() == 0:
        return
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        yield host_view(flat)
    elif (place := room(flat.numel())) is not None:
        yield from copied_views(flat, torch.frombuffer(place, dtype=torch.uint8), COPIES_AHEAD)
    else:
        size = 2 * min(TRANSFER_BYTES, flat.numel())
        yield from copied_views(flat, torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()), 2)


def copied_views(flat: torch.Tensor, target: torch.Tensor, ahead: int) -> Iterator[memoryview]:
    """Copy bytes of a device to host memory in parts of TRANSFER_BYTES, and yield each part once it is there.

    Up to `ahead` parts are under way at a time: the device copies while those before are hashed and written. A target
    that is shorter than `flat` is used again from its start.
    """
    under_way: deque[tuple[torch.Tensor, Any]] = deque()
    for start in range(0, flat.numel(), TRANSFER_BYTES):
        part = flat[start : start + TRANSFER_BYTES]
        at = start % target.numel()
        if len(under_way) == ahead:
            yield _when_copied(*under_way.popleft())
        place = target[at : at + part.numel()]
        place.copy_(part, non_blocking=True)
        done: Any = torch.cuda.Event() if flat.is_cuda else None  # type: ignore[no-untyped-call]
        if done is not None:
            done.record(torch.cuda.current_stream(flat.device))
        under_way.append((place, done))
    while under_way:
        yield _when_copied(*under_way.popleft())


def _when_copied(target: torch.Tensor, done: Any) -> memoryview:
    if done is not None:
        done.synchronize()
    return host_view(target)


def host_view(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, without numpy. The tensor must outlive the view."""
    assert flat.device.type == "cpu"
    assert flat.is_contiguous()
    size = flat.numel() * flat.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(flat.data_ptr())).cast("B")


class FileSink:
    """Writes to a descriptor from its present position; small pieces are gathered."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending: list[memoryview] = []
        self._pending_bytes = 0

    def put(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        if not len(view):
            return
        if len(view) < 64 << 10:
            view = memoryview(bytes(view))  # Staging buffers are used again before the gathered write
        self._pending.append(view)
        self._pending_bytes += len(view)
        if len(view) >= 64 << 10 or self._pending_bytes >= 1 << 20 or len(self._pending) >= MAX_PENDING_PIECES:
            self.flush()

    def room(self, size: int) -> None:
        """It has no memory of its own."""

    def flush(self) -> None:
        while self._pending:
            written = os.writev(self._descriptor, self._pending)
            while written:
                first = self._pending[0]
                if written < len(first):
                    self._pending[0] = first[written:]
                    break
                written -= len(first)
                del self._pending[0]
        self._pending_bytes = 0


class ArenaSink:
    """Copies into mapped memory, and reports the bytes written after each piece. Raises ArenaTooSmallError."""

    def __init__(self, arena: memoryview, progress: Callable[[int], None]) -> None:
        self._arena = arena
        self._address = _address(arena)
        self._progress = progress
        self._filled = 0

    def put(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        target = self.room(len(view))
        if len(view) and self._address + self._filled != _address(view):
            _copy(target, view)
        self._filled += len(view)
        self._progress(self._filled)

    def room(self, size: int) -> memoryview:
        """Return the memory of the next `size` bytes, so that a device copies them there; `put` then does not."""
        end = self._filled + size
        if end > len(self._arena):
            raise ArenaTooSmallError(end, len(self._arena))
        return self._arena[self._filled : end]


def _address(view: memoryview) -> int:
    """Return the address of a view's memory; 0 for read-only memory, which is never an arena."""
    return 0 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy `source` to `target`. Large copies release the interpreter lock, so that threads of the script continue."""
    if source.readonly or len(source) < 64 << 10:
        target[:] = source
        return
    kind = ctypes.c_ubyte * len(source)
    ctypes.memmove(kind.from_buffer(target), kind.from_buffer(source), len(source))


class ArenaTooSmallError(Exception):
    def __init__(self, needed_bytes: int, arena_bytes: int) -> None:
        super().__init__(f"the state needs {needed_bytes} bytes, the arena has {arena_bytes}; raise --gpu-memory")


def durable_shard(directory: str, rank: int, size: int, write: Callable[[int], object]) -> None:
    """Write rank-K.shard durably: temporary name, `write(descriptor)`, fsync, rename, fsync of the directory.

    Raises OSError. A failed write leaves no file behind, so a full disk gets its space back.
    """
    os.makedirs(directory, exist_ok=True)
    final = os.path.join(directory, f"rank-{rank}.shard")
    part = final + ".part"
    try:
        with _opened(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            try:
                # A full disk shows here, before half a state is written.
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
            write(descriptor)
            os.fsync(descriptor)
        os.rename(part, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_shard(directory: str, rank: int) -> Iterator[OpenImage]:
    """Open the shard of a rank. Raises ImageError and OSError."""
    with _opened(os.path.join(directory, f"rank-{rank}.shard"), os.O_RDONLY) as descriptor:
        yield open_image(FileSource(descriptor))


# -- reading


class FileSource:
    """Reads a file. `fill` takes tensors of bytes in host memory only."""

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
        """Fill bytes, on an accelerator too, where copies may be under way on return. Return them as they lie here."""
        end = self._arrived(offset, target.numel())
        target.copy_(self._bytes[offset:end], non_blocking=True)
        return self._arena[offset:end]

    def _arrived(self, offset: int, size: int) -> int:
        end = offset + size
        if end > len(self._arena):
            raise ImageError("TRUNCATED", f"the image wants byte {end} of an arena of {len(self._arena)} bytes")
        self._wait(end)
        return end


ByteSource = Union[FileSource, ArenaSource]
DeviceOf = Callable[[str], torch.device]


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
    preamble = state_image.parse_preamble(_read(source, 0, state_image.PREAMBLE_BYTES))
    encoded = _read(source, state_image.PREAMBLE_BYTES, preamble.header_bytes)
    return OpenImage(preamble, state_image.parse_header(preamble, encoded), source)


def _read(source: ByteSource, offset: int, size: int) -> bytearray:
    found = bytearray(size)
    source.read_into(memoryview(found), offset)
    return found


def read_tensors(
    image: OpenImage, destinations: dict[int, torch.Tensor], device_of: DeviceOf, skipped: Collection[int] = ()
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
    # The last bytes: with them all of the image has arrived.
    found = _read(image.source, preamble.trailer_offset, preamble.trailer_bytes)
    state_image.check_trailer(digests.trailer(), bytes(found))
    return result


def _skip(image: OpenImage, start: int, end: int, digests: state_image.ChunkDigests) -> None:
    while start < end:
        gap = _read(image.source, image.preamble.data_offset + start, min(end - start, TRANSFER_BYTES))
        digests.update(gap)
        start += len(gap)


def _read_tensor(
    image: OpenImage,
    entry: dict[str, Any],
    destination: torch.Tensor | None,
    device_of: DeviceOf,
    digests: state_image.ChunkDigests,
) -> torch.Tensor:
    try:
        dtype, shape = dtype_named(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        if min(shape, default=0) < 0:
            raise ValueError(f"negative size in shape {shape}")
        expected = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
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
        destination = new_tensor(entry, shape, dtype, device_of(entry.get("device", "cpu")))
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


def new_tensor(entry: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
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
        self._trailer = _read(self._source, self._preamble.trailer_offset, self._preamble.trailer_bytes)
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
            size = min(end, self._preamble.data_bytes) - first
            chunk = _read(self._source, self._preamble.data_offset + first, size)
            digest = state_image.digest_of(self._preamble.digest_kind, chunk)
            if digest.to_bytes(8, "little") != self._trailer[8 * number : 8 * number + 8]:
                text = f"the image of {self._name} is damaged: chunk {number} differs from its digest"
                raise ImageError("DIGEST", text)
            self._number, self._chunk = number, chunk
        return self._chunk
