"""State images from live tensors, without a copy in between where the device allows it. image_reading is the way back.

The format is ganger.injob.state_image's. A writer reports its progress after every piece, so that filled parts can be
streamed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Callable, Protocol

import torch

from ganger.injob import state_image
from ganger.injob.state_image import Preamble
from ganger.training.state_codec import device_model

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
    tree: Any,
    tensors: Sequence[torch.Tensor],
    layouts: Mapping[int, dict[str, Any]] = MappingProxyType({}),
    *,
    step: int,
    samples: int,
    rank: int,
    world: int,
) -> ImagePlan:
    """Lay an image out. `tree` is tagged JSON whose tensor references index `tensors`.

    `layouts`: of those that are parts of sharded tensors, by index (`sharded_tensors.layout_of`)."""
    table: list[dict[str, Any]] = []
    offsets: list[int] = []
    position = 0
    for index, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        entry: dict[str, Any] = {
            "dtype": str(tensor.dtype)[len("torch.") :],
            "shape": list(tensor.shape),
            "offset": position,
            "bytes": size,
            "device": tensor.device.type,
        }
        if not tensor.is_contiguous() and is_dense(tensor):
            entry["strides"] = list(tensor.stride())
        if index in layouts:
            entry["sharded"] = layouts[index]
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


def is_dense(tensor: torch.Tensor) -> bool:
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
