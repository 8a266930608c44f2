"""State images from live tensors and back into them, without a copy in between where the device allows it.

The format is ganger.injob.state_image's. A writer reports its progress after every piece, so that filled parts can be
streamed; a reader takes tensors as their bytes arrive.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Protocol

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
MAX_PENDING_PIECES = 512  # below IOV_MAX


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
    tree: Any, tensors: Sequence[torch.Tensor], *, step: int, samples: int, rank: int, world: int
) -> ImagePlan:
    """Lay an image out. `tree` is tagged JSON whose tensor references index `tensors`."""
    table: list[dict[str, Any]] = []
    offsets: list[int] = []
    position = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        entry: dict[str, Any] = {
            "dtype": str(tensor.dtype)[len("torch.") :],
            "shape": list(tensor.shape),
            "offset": position,
            "bytes": size,
            "device": tensor.device.type,
        }
        if not tensor.is_contiguous() and _is_dense(tensor):
            entry["strides"] = list(tensor.stride())
        table.append(entry)
        offsets.append(position)
        position = state_image.aligned(position + size)
    header = {
        "format": state_image.VERSION,
        "step": step,
        "samples": samples,
        "rank": rank,
        "world": world,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device_model": device_model(tensors),
        "tensors": table,
        "tree": tree,
    }
    preamble, encoded = state_image.lay_out(header, position, state_image.preferred_digest())
    return ImagePlan(preamble, encoded, tuple(tensors), tuple(offsets))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one block without gap or overlap, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Sink(Protocol):
    """Takes the image front to back."""

    def put(self, data: Any) -> None: ...

    def room(self, size: int) -> memoryview | None:
        """Return the memory of the next `size` bytes, so that a device copies them there; None if the sink has none.

        `put` copies no part of that memory again. Raises ArenaTooSmallError."""

    def flush(self) -> None: ...


def write_image(plan: ImagePlan, sink: Sink) -> str:
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
    sink.flush()
    return trailer[-8:][::-1].hex()


def host_views(
    tensor: torch.Tensor, room: Callable[[int], memoryview | None] = lambda size: None
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in logical order, in parts. Each is valid until the next one.

    Bytes of a device are copied to `room(size)` where there is one, else through two staging buffers.
    """
    if tensor.numel() == 0:
        return
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        yield host_view(flat)
        return
    place = room(flat.numel())
    if place is not None:
        yield from copied_views(flat, torch.frombuffer(place, dtype=torch.uint8), COPIES_AHEAD)
        return
    size = min(TRANSFER_BYTES, flat.numel())
    yield from copied_views(flat, _staging_buffer(2 * size), 2)


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


def _staging_buffer(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


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
            view = memoryview(bytes(view))  # staging buffers are used again before the gathered write
        self._pending.append(view)
        self._pending_bytes += len(view)
        if len(view) >= 64 << 10 or self._pending_bytes >= 1 << 20 or len(self._pending) >= MAX_PENDING_PIECES:
            self.flush()

    def room(self, size: int) -> memoryview | None:
        return None

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
        start, end = self._filled, self._filled + len(view)
        if end > len(self._arena):
            raise ArenaTooSmallError(end, len(self._arena))
        if len(view) and self._address + start != _address(view):
            _copy(self._arena[start:end], view)
        self._filled = end
        self._progress(end)

    def room(self, size: int) -> memoryview:
        end = self._filled + size
        if end > len(self._arena):
            raise ArenaTooSmallError(end, len(self._arena))
        return self._arena[self._filled : end]

    def flush(self) -> None:
        pass


def _address(view: memoryview) -> int:
    """Return the address of a view's memory; 0 for read-only memory, which is never an arena."""
    return 0 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy `source` to `target`. Large copies release the interpreter lock, so that threads of the script continue."""
    if source.readonly or len(source) < 64 << 10:
        target[:] = source
        return
    size = len(source)
    to, start = (ctypes.c_ubyte * size).from_buffer(target), (ctypes.c_ubyte * size).from_buffer(source)
    ctypes.memmove(to, start, size)


class ArenaTooSmallError(Exception):
    def __init__(self, needed_bytes: int, arena_bytes: int) -> None:
        super().__init__(f"the state needs {needed_bytes} bytes, the arena has {arena_bytes}; raise --gpu-memory")


def durable_shard(directory: str, rank: int, size: int, write: Callable[[int], None]) -> None:
    """Write rank-K.shard durably: temporary name, `write(descriptor)`, fsync, rename, fsync of the directory.

    Raises OSError. A failed write leaves no file behind, so a full disk gets its space back.
    """
    os.makedirs(directory, exist_ok=True)
    final = os.path.join(directory, f"rank-{rank}.shard")
    part = final + ".part"
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # a full disk shows here, before half a state is written
            _reserve(descriptor, size)
            write(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(part, final)
    except BaseException:
        try:
            os.unlink(part)
        except OSError:
            pass
        raise
    _sync_directory(directory)


def _reserve(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    image: OpenImage, destinations: dict[int, torch.Tensor], device_of: Callable[[str], torch.device]
) -> dict[int, torch.Tensor]:
    """Read every tensor: into its destination where one is given, else into a new tensor.

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
    if not _is_dense(made):
        raise ImageError("HEADER", f"strides {strides} do not fit the shape {shape}")
    return made
