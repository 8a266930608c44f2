"""What a rank does with its state when it stops: keep it, park it in the arena, hand it over, write it to storage.

All levels use one image, so a state parked for a pause can be streamed or written to storage later without waking the
job. The arena is a memfd of the launcher. It is allocated ahead of need, because copying into fresh pages costs several
times as much.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Callable, TypeVar

import torch

from ganger.injob.control import Control, Handlers, StopRequest
from ganger.injob.page_layout import Error, PageState, Word
from ganger.injob.state_image import ImageError, enter_pages
from ganger.text import os_failure
from ganger.training.image_io import (
    TRANSFER_BYTES,
    ArenaSink,
    ArenaSource,
    ArenaTooSmallError,
    FileSink,
    ImagePlan,
    OpenImage,
    durable_shard,
    open_image,
    opened_shard,
    write_image,
)
from ganger.training.replay import Unflushed
from ganger.training.state import Captured, Restored, StateMismatchError, TrainingObjects, capture, position_of
from ganger.training.state_codec import StateNotSupportedError, local_part
from ganger.training.state_parts import restore_part


class Arena:
    """Maps the memfd at the size it has when it is used: the daemon may grow it while the job runs."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.mapping: mmap.mmap | None = None
        self._touching: threading.Thread | None = None
        self._pinned = False
        self._touched = 0

    def touch(self, size: int) -> None:
        """Allocate the first `size` bytes in the background, charged to this process's memory limit. The arena may be
        larger than the state will ever be, so no page is touched that will not be used."""
        size = min(size, os.fstat(self.descriptor).st_size)
        if size > self._touched and (self._touching is None or not self._touching.is_alive()):
            self._enter(size, allocates=True)

    def _enter(self, size: int, *, allocates: bool) -> None:
        def enter() -> None:
            try:
                if allocates:
                    os.posix_fallocate(self.descriptor, 0, size)
            except OSError:
                # Memory that is not there now may be there when it is needed, and is reported then.
                return
            enter_pages(self._map(), size)

        self._touched = size
        self._touching = threading.Thread(target=enter, name="ganger-arena", daemon=True)
        self._touching.start()

    def map_ahead(self, size: int) -> None:
        """Let the first `size` bytes, which are there already or on their way, be reached without page faults."""
        if size > self._touched and self._touching is None:
            self._enter(min(size, os.fstat(self.descriptor).st_size), allocates=False)

    def view(self, needed_bytes: int = 0) -> memoryview:
        """The whole arena, writable. Raises ArenaTooSmallError."""
        if self._touching is not None:
            self._touching.join()
        size = os.fstat(self.descriptor).st_size
        if size < max(needed_bytes, 1):
            raise ArenaTooSmallError(needed_bytes, size)
        mapping = self._map()
        if not self._pinned:
            self._pin()
        return memoryview(mapping)

    def _map(self) -> mmap.mmap:
        size = os.fstat(self.descriptor).st_size
        if self.mapping is None or len(self.mapping) != size:
            self.mapping = mmap.mmap(self.descriptor, size)
            self._pinned = False
        return self.mapping

    def _pin(self) -> None:
        """Page-lock the mapping, so that devices copy at full speed. Without it copies still work."""
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            return
        assert self.mapping is not None
        whole = torch.frombuffer(self.mapping, dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)  # type: ignore[no-untyped-call]
        self._pinned = int(status) == 0


def give_free_memory_back() -> None:
    """Release unused memory of the allocators: to the device, and from the C library to the system."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # A C library without it
        pass


_T = TypeVar("_T")

# Below this nothing goes back to the system anyway, and counters that optimizers keep on the CPU stay where they are.
SMALLEST_OFFLOAD_BYTES = 4096
ARENA_POLL_S = 0.0005


class CannotKeepError(Exception):
    """The state could not be parked or written. `ganger_error` is the page's word for it."""

    def __init__(self, error: int, message: str) -> None:
        super().__init__(message)
        self.ganger_error = error


@dataclass(frozen=True)
class _Parked:
    """A state that lies in the arena, or else in its mapped `shard`; `freed` are the storages to fill
    again: (storage, offset in the image, bytes)."""

    step: int
    plan: ImagePlan
    freed: tuple[tuple[Any, int, int], ...]
    shard: mmap.mmap | None = None


class StateKeeper:
    """Carries out a rank's orders on its state. `training` and `position` are called at every boundary anew."""

    def __init__(
        self, control: Control, training: Callable[[], TrainingObjects], position: Callable[[], dict[str, Any]]
    ) -> None:
        self._control = control
        self._page = control.page
        self._training = training
        self._position = position
        self._parked: _Parked | None = None
        self._unflushed = Unflushed(control.page.path)
        self._writer: threading.Thread | None = None
        self._finished: Callable[[], None] | None = None
        self.when_stopped: Callable[[], None] = lambda: None
        self.arena: Arena | None = None if control.arena_fd is None else Arena(control.arena_fd)
        order = control.restore
        if self.arena is not None and order is not None and order.kind == "arena":
            # Long before the first byte comes.
            self.arena.map_ahead(order.size)

    # -- orders

    def handlers(self) -> Handlers:
        return Handlers(
            on_stop=self.stopped,
            on_offload=self.offload,
            on_restore=self.bring_back,
            on_checkpoint=self.checkpoint,
            on_hand_over=self.hand_over,
            on_retune=self.retune,
        )

    def stopped(self, step: int) -> None:
        """The rank stands at `step`: let the device finish, and the page and the series have all there is to report.
        Nothing may follow soon, and a rank that leaves runs no exit handlers."""
        _synchronize()
        if self._control.series is not None:
            self._control.series.flush()
        self.when_stopped()

    def offload(self, request: StopRequest) -> int:
        """Park the state in the arena and free the device memory it used; returns the bytes freed."""
        whole, places = _with_whole_storages(self._capture())
        plan = self._fill_arena(whole, request.step)
        freed = _freed(plan, whole.tensors, places)
        self._parked = _Parked(request.step, plan, freed)
        del whole
        give_free_memory_back()
        return sum(size for _, _, size in freed)

    def bring_back(self, request: StopRequest | None) -> None:
        """Fill the freed storages again. Every tensor is where the script left it, at a new address."""
        parked = self._parked
        if parked is None or (self.arena is None and parked.shard is None):
            return
        memory: Any = parked.shard
        if self.arena is not None and memory is None:
            self.arena.view()
            memory = self.arena.mapping
        with torch.no_grad():
            for storage, offset, size in parked.freed:
                storage.resize_(size)
                target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))
                kept = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
                target.copy_(kept, non_blocking=True)
        _synchronize()
        # Not before: after a failure it is tried again.
        self._parked = None

    def hand_over(self, request: StopRequest) -> None:
        """Leave a complete image in the arena for another rank; the tensors stay."""
        if self._parked is None or not request.offloaded:
            self._parked = _Parked(request.step, self._fill_arena(self._capture(), request.step), ())

    def checkpoint(self, request: StopRequest, *, frees: bool = False) -> None:
        """Write rank-K.shard into the directory the order names; durable on return if the rank exits afterwards.

        `frees`: at such an exit the device memory is freed, too, until `bring_back` reads it from the shard."""
        if "checkpoint" not in request.details:
            raise CannotKeepError(Error.STORAGE_FAILED, f"order {request.seq} names no directory for the checkpoint")
        directory = str(request.details["checkpoint"]).replace("{step}", str(request.step))
        rank, step = self._control.rank, request.step
        self._wait_for_writer()
        if self._parked is not None and self._parked.step == step:
            self._write_arena(directory, self._parked.plan.total_bytes)
        else:
            captured, places = _with_whole_storages(self._capture()) if frees else (self._capture(), ())
            plan = self._plan(captured, step)
            room = 0 if self.arena is None else os.fstat(self.arena.descriptor).st_size
            if not request.exiting and plan.total_bytes <= room:
                self._parked = None
                self._fill_arena(captured, step)
                self._write_behind(directory, plan.total_bytes, request)
                return
            with _reported():
                durable_shard(directory, rank, plan.total_bytes, lambda fd: write_image(plan, FileSink(fd)))
            if frees:
                with open(os.path.join(directory, f"rank-{rank}.shard"), "rb") as file:
                    # Private, as no tensor may be over memory that cannot be written; it stays if the file goes.
                    shard = mmap.mmap(file.fileno(), plan.total_bytes, access=mmap.ACCESS_COPY)
                self._parked = _Parked(step, plan, _freed(plan, captured.tensors, places), shard)
                del captured
                give_free_memory_back()
        self._control.checkpoint_durable(request.seq, step)

    def retune(self, threads: int) -> None:
        """Follow the cores with torch's threads."""
        if threads > 0 and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def tend(self) -> None:
        """Report what a checkpoint written in the background came to, and keep as much of the arena allocated as the
        state may need. Cheap; called now and then while training."""
        if self.arena is not None:
            self.arena.touch(self._page.get(Word.PEAK_DEVICE_BYTES) * 11 // 10)
        finished, self._finished = self._finished, None
        if finished is not None:
            finished()

    # -- starting

    def position_at_start(self) -> dict[str, Any]:
        """The assigned state's position, as soon as the header is there. Ends the process on a bad state."""
        return self._from_assigned_state(position_of)

    def restore_at_start(self) -> Restored | None:
        """Put the assigned state into the script's objects; None if there is none. Ends the process on a bad state.

        A half-restored state must not train, and trying again here would read the same bytes.
        """
        if self._control.restore is None:
            return None
        order, shards = self._control.restore, contextlib.ExitStack()
        shard = None if order.kind == "arena" else lambda rank: shards.enter_context(opened_shard(order.path, rank))
        ranks = range(order.first, order.first + order.ranks)
        with shards:
            restored = self._from_assigned_state(lambda image: restore_part(self._training(), image, shard, ranks))
        _synchronize()
        return restored

    def _from_assigned_state(self, use: Callable[[OpenImage], _T]) -> _T:
        order = self._control.restore
        assert order is not None, "asked only when a state is assigned"
        self._page.set(Word.STATE, PageState.RESTORING)
        try:
            if order.kind == "arena":
                if self.arena is None:
                    raise ImageError("TRUNCATED", "told to restore from the arena, but no arena came with the launch")
                # Mapped, and page-locked for a device, before the first byte comes.
                view = self.arena.view()
                self._wait_for_arena(1)
                return use(_not_older(open_image(ArenaSource(view, self._wait_for_arena)), order.step))
            with opened_shard(order.path, order.rank) as image:
                return use(_not_older(image, order.step))
        except (ImageError, StateMismatchError, ArenaTooSmallError, OSError) as error:
            self._control.give_up_restore(f"cannot restore: {os_failure(error)}")

    def _wait_for_arena(self, needed_bytes: int) -> None:
        while self._page.get(Word.ARENA_AVAILABLE) < needed_bytes:
            self._control.safe_point()
            time.sleep(ARENA_POLL_S)

    # -- helpers, in call order

    def _capture(self) -> Captured:
        _synchronize()
        # A rank that resumes from this state does not repeat the output up to here.
        self._unflushed.flush()
        try:
            return capture(self._training(), self._position())
        except StateNotSupportedError as error:
            raise CannotKeepError(Error.STATE_UNSAVEABLE, str(error)) from error

    def _plan(self, captured: Captured, step: int) -> ImagePlan:
        return captured.plan(
            step=step, samples=self._page.get(Word.SAMPLES), rank=self._control.rank, world=self._control.world
        )

    def _fill_arena(self, captured: Captured, step: int) -> ImagePlan:
        self._wait_for_writer()
        plan = self._plan(captured, step)
        if self.arena is None:
            raise CannotKeepError(Error.ARENA_TOO_SMALL, "this job has no arena; submit it with --gpu-memory")
        page = self._page
        try:
            view = self.arena.view(plan.total_bytes)
        except ArenaTooSmallError as error:
            raise CannotKeepError(Error.ARENA_TOO_SMALL, str(error)) from error
        page.set(Word.ARENA_FILLED, 0)
        page.set(Word.ARENA_SIZE, plan.total_bytes)
        write_image(plan, ArenaSink(view, lambda filled: page.set(Word.ARENA_FILLED, filled)))
        return plan

    def _write_arena(self, directory: str, total: int) -> None:
        assert self.arena is not None
        view = self.arena.view()

        def write(descriptor: int) -> None:
            sink = FileSink(descriptor)
            for start in range(0, total, TRANSFER_BYTES):
                sink.put(view[start : min(start + TRANSFER_BYTES, total)])
            sink.flush()

        with _reported():
            durable_shard(directory, self._control.rank, total, write)

    def _write_behind(self, directory: str, total: int, request: StopRequest) -> None:
        """Write the arena to storage while training continues. The control belongs to the training thread: see tend."""
        control = self._control

        def write() -> None:
            try:
                self._write_arena(directory, total)
            except CannotKeepError as error:
                word, message = error.ganger_error, str(error)
                self._finished = lambda: control.checkpoint_failed(request.seq, word, message)
            else:
                self._finished = lambda: control.checkpoint_durable(request.seq, request.step)
            # Training has ended: no boundary will report it, and the control is free.
            if not threading.main_thread().is_alive():
                self.tend()

        self._writer = threading.Thread(target=write, name="ganger-checkpoint")
        self._writer.start()
        # Training may end between the two.
        atexit.register(self._wait_for_writer)

    def _wait_for_writer(self) -> None:
        atexit.unregister(self._wait_for_writer)
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.tend()


def _not_older(image: OpenImage, step: int) -> OpenImage:
    if image.step < step:
        raise StateMismatchError(f"the state is of step {image.step}, but training was at step {step} already")
    return image


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = Error.STORAGE_FULL if full else Error.STORAGE_FAILED
        raise CannotKeepError(kind, f"cannot write the checkpoint: {os_failure(error)}") from error


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)


def _storage_key(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _with_whole_storages(captured: Captured) -> tuple[Captured, tuple[int, ...]]:
    """`captured` so extended that every storage to free is covered by one tensor, and the indices of those tensors."""
    tensors = list(captured.tensors)
    places: list[int] = []
    covering: dict[tuple[str, int], int] = {}
    storages: dict[tuple[str, int], torch.Tensor] = {}
    on_accelerator = any(tensor.device.type != "cpu" for tensor in tensors[: captured.live])
    for index, tensor in enumerate(tensors[: captured.live]):
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        # Beside an accelerator only its memory is worth freeing; without one, host memory stands for the device's.
        if size < SMALLEST_OFFLOAD_BYTES or (on_accelerator and tensor.device.type == "cpu"):
            continue
        if not storage.resizable() or (tensor.device.type == "cpu" and tensor.is_shared()):  # type: ignore[no-untyped-call]
            continue
        key = _storage_key(tensor)
        storages.setdefault(key, tensor)
        if tensor.is_contiguous() and tensor.numel() * tensor.element_size() == size:
            covering.setdefault(key, index)
    for key, tensor in storages.items():
        if key not in covering:
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(storage, 0, (storage.nbytes(),), (1,))
            covering[key] = len(tensors)
            tensors.append(whole)
        places.append(covering[key])
    return replace(captured, tensors=tuple(tensors)), tuple(places)


def _freed(
    plan: ImagePlan, tensors: tuple[torch.Tensor, ...], places: tuple[int, ...]
) -> tuple[tuple[Any, int, int], ...]:
    freed: list[tuple[Any, int, int]] = []
    for index in places:
        storage = tensors[index].untyped_storage()
        size = storage.nbytes()
        freed.append((storage, plan.preamble.data_offset + plan.offsets[index], size))
        storage.resize_(0)
    return tuple(freed)


def device_bytes(training: TrainingObjects) -> tuple[int, int]:
    """Device memory of the framework (now, peak); without an accelerator, the bytes of the live tensors' storages."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count())
        now = sum(torch.cuda.memory_allocated(device) for device in devices)
        return now, sum(torch.cuda.max_memory_allocated(device) for device in devices)
    seen: dict[tuple[str, int], int] = {}
    for tensor in map(local_part, _live_tensors(training)):
        seen[_storage_key(tensor)] = tensor.untyped_storage().nbytes()
    total = sum(seen.values())
    return total, total


def _live_tensors(training: TrainingObjects) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for model in training.models.values():
        tensors += [*model.parameters(), *model.buffers()]
        tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for optimizer in training.optimizers.values():
        for values in optimizer.state.values():
            if isinstance(values, dict):
                tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    tensors += [item for item in training.objects.values() if isinstance(item, torch.Tensor)]
    return [t for t in tensors if not torch.nn.parameter.is_lazy(t)]
