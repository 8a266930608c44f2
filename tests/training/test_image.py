"""State images: what goes in comes out bit for bit, and what was damaged is refused."""

from __future__ import annotations

import os
import struct
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ganger.injob import state_image
from ganger.injob.state_image import ImageError
from ganger.training import image_io, state_codec
from ganger.training.image_io import (
    ArenaSink,
    ArenaSource,
    ArenaTooSmallError,
    FileSink,
    FileSource,
    durable_shard,
    open_image,
    plan_image,
    read_tensors,
    write_image,
)
from kit.images import verify_image


def _write(path: Path, state: Any, step: int = 7) -> str:
    table = state_codec.TensorTable()
    tree = state_codec.encode(state, table)
    plan = plan_image(tree, table.tensors, step=step, samples=70, rank=1, world=2)
    with path.open("wb") as file:
        return write_image(plan, FileSink(file.fileno()))


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        image = open_image(FileSource(file.fileno()))
        tensors = read_tensors(image, {}, torch.device)
        return state_codec.decode(image.tree, tensors.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(10**30),
        0.1,
        float("inf"),
        "ünï",
        b"\x00\xff",
        complex(1, float("inf")),
        (1, (2, [3])),
        {"a": 1, "$": 2},
        {1: "a", (2, 3): "b"},
        OrderedDict([("z", 1), ("a", 2)]),
        Counter({5: 2}),
        {1, 2},
        frozenset([1]),
        deque([1, 2]),
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        np.float32(0.1),
        np.int64(-5),
    ],
    ids=repr,
)
def test_a_value_comes_back_equal_and_of_the_same_type(tmp_path: Path, value: Any) -> None:
    _write(tmp_path / "image", {"value": value})
    back = _read(tmp_path / "image")["value"]
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(()),
        torch.empty(0, 4),
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(1 << 10).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.tensor([float("nan"), -0.0]),
        torch.randn(5 << 20),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype} {tensor.stride()}",
)
def test_a_tensor_comes_back_bit_for_bit(tmp_path: Path, tensor: torch.Tensor) -> None:
    _write(tmp_path / "image", {"before": torch.ones(3), "value": tensor})
    back = _read(tmp_path / "image")["value"]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    if tensor.numel():
        one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (back, tensor))
        assert torch.equal(one, other)


def test_arrays_of_numpy_come_back(tmp_path: Path) -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)
    _write(tmp_path / "image", [array])
    back = _read(tmp_path / "image")[0]
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_what_has_no_portable_form_is_named() -> None:
    with pytest.raises(state_codec.StateNotSupportedError, match=r"state\.a\[1\]: a pathlib\.\w*Path"):
        state_codec.encode({"a": [1, Path("x")]}, state_codec.TensorTable())


def test_a_tensor_that_occurs_twice_is_stored_once() -> None:
    table = state_codec.TensorTable()
    weight = torch.randn(4)
    assert state_codec.encode([weight, weight.detach()], table) == [{"$": "tensor", "i": 0}] * 2
    assert len(table.tensors) == 1


def test_verify_returns_what_the_writer_said(tmp_path: Path) -> None:
    digest = _write(tmp_path / "image", {"w": torch.randn(9 << 20)}, step=41)
    summary = verify_image(tmp_path / "image")
    assert (summary.step, summary.rank, summary.world, summary.samples) == (41, 1, 2, 70)
    assert summary.digest == digest
    assert summary.total_bytes == (tmp_path / "image").stat().st_size


def test_without_xxhash_images_are_hashed_with_crc32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_image, "_xxh3_64", None)
    _write(tmp_path / "image", {"w": torch.randn(100)})
    assert verify_image(tmp_path / "image").step == 7
    data = bytearray((tmp_path / "image").read_bytes())
    data[-40] ^= 1
    (tmp_path / "image").write_bytes(data)
    with pytest.raises(ImageError):
        verify_image(tmp_path / "image")


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, bytearray]:
    _write(tmp_path / "image", {"w": torch.randn(1000), "v": torch.randn(10)})
    return tmp_path / "image", bytearray((tmp_path / "image").read_bytes())


def test_any_changed_byte_is_noticed(damaged: tuple[Path, bytearray]) -> None:
    path, data = damaged
    for position in [*range(0, 64), *range(64, len(data), 97), len(data) - 1]:
        changed = bytearray(data)
        changed[position] ^= 0x40
        path.write_bytes(changed)
        with pytest.raises(ImageError):
            verify_image(path)
        with pytest.raises(ImageError):
            _read(path)


def test_any_truncation_is_noticed(damaged: tuple[Path, bytearray]) -> None:
    path, data = damaged
    for size in [0, 10, 63, 64, 200, len(data) // 2, len(data) - 9, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ImageError) as caught:
            _read(path)
        assert caught.value.reason == "TRUNCATED"


@pytest.mark.parametrize(("at", "value", "reason"), [(0, b"NOTANIMG", "MAGIC"), (8, struct.pack("<I", 99), "VERSION")])
def test_another_format_is_named(damaged: tuple[Path, bytearray], at: int, value: bytes, reason: str) -> None:
    path, data = damaged
    data[at : at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        verify_image(path)
    assert caught.value.reason == reason


def test_an_arena_is_byte_identical_to_a_shard_and_fills_front_to_back(tmp_path: Path) -> None:
    table = state_codec.TensorTable()
    tree = state_codec.encode({"w": torch.randn(5 << 20), "v": torch.randn(7)}, table)
    plan = plan_image(tree, table.tensors, step=1, samples=2, rank=0, world=1)
    durable_shard(str(tmp_path), 0, plan.total_bytes, lambda fd: _discard(write_image(plan, FileSink(fd))))
    arena = bytearray(b"\xee" * (plan.total_bytes + 100))
    filled: list[int] = []
    write_image(plan, ArenaSink(memoryview(arena), filled.append))
    shard = (tmp_path / "rank-0.shard").read_bytes()
    assert bytes(arena[: plan.total_bytes]) == shard
    assert filled == sorted(filled)
    assert filled[-1] == plan.total_bytes
    assert max(b - a for a, b in zip([0, *filled], filled, strict=False)) <= state_image.CHUNK_BYTES


@pytest.mark.parametrize("parts", [1, 3], ids=["one part", "several parts"])
@pytest.mark.parametrize("room_parts", [2, 3], ids=["staging buffers", "room for all"])
def test_bytes_of_a_device_arrive_in_order(parts: int, room_parts: int) -> None:
    flat = torch.randint(0, 256, (parts * image_io.TRANSFER_BYTES - 100,), dtype=torch.uint8)
    target = torch.empty(room_parts * image_io.TRANSFER_BYTES, dtype=torch.uint8)
    views = [bytes(view) for view in image_io.copied_views(flat, target, ahead=2)]
    assert b"".join(views) == bytes(image_io.host_view(flat))
    assert len(views) == parts


def test_what_a_device_copied_into_the_room_of_an_arena_is_only_counted() -> None:
    arena = bytearray(300)
    filled: list[int] = []
    sink = ArenaSink(memoryview(arena), filled.append)
    sink.put(b"a" * 100)
    room = sink.room(150)
    room[:] = b"b" * 150
    sink.put(room[:50])
    sink.put(room[50:])
    sink.put(b"c" * 50)
    assert bytes(arena) == b"a" * 100 + b"b" * 150 + b"c" * 50
    assert filled == [100, 150, 250, 300]
    with pytest.raises(ArenaTooSmallError):
        sink.room(1)


def test_an_arena_that_is_too_small_is_refused() -> None:
    plan = plan_image([], [torch.randn(1000)], step=0, samples=0, rank=0, world=1)
    with pytest.raises(ArenaTooSmallError):
        write_image(plan, ArenaSink(memoryview(bytearray(plan.total_bytes - 1)), lambda filled: None))


def test_a_reader_takes_each_tensor_as_its_bytes_arrive() -> None:
    table = state_codec.TensorTable()
    tree = state_codec.encode([torch.randn(100), torch.randn(200)], table)
    plan = plan_image(tree, table.tensors, step=0, samples=0, rank=0, world=1)
    arena = bytearray(plan.total_bytes)
    write_image(plan, ArenaSink(memoryview(arena), lambda filled: None))
    asked: list[int] = []
    image = open_image(ArenaSource(memoryview(arena), asked.append))
    read_tensors(image, {}, torch.device)
    assert asked == sorted(asked)
    assert asked[0] == state_image.PREAMBLE_BYTES


def test_a_byte_that_was_changed_on_its_way_into_an_arena_is_found() -> None:
    table = state_codec.TensorTable()
    tree = state_codec.encode([torch.randn(100), torch.randn(200)], table)
    plan = plan_image(tree, table.tensors, step=0, samples=0, rank=0, world=1)
    arena = bytearray(plan.total_bytes)
    write_image(plan, ArenaSink(memoryview(arena), lambda filled: None))
    arena[plan.preamble.data_offset + 500] ^= 1
    image = open_image(ArenaSource(memoryview(arena), lambda needed: None))
    with pytest.raises(ImageError, match="chunk 0"):
        read_tensors(image, {}, torch.device)


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path) -> None:
    def fail(descriptor: int) -> None:
        os.write(descriptor, b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        durable_shard(str(tmp_path), 0, 4, fail)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_another_shape_is_a_clear_error(tmp_path: Path) -> None:
    _write(tmp_path / "image", torch.randn(4))
    with (tmp_path / "image").open("rb") as file:
        image = open_image(FileSource(file.fileno()))
        with pytest.raises(ValueError, match=r"saved tensor is \(4,\)"):
            read_tensors(image, {0: torch.zeros(5)}, torch.device)


def _discard(_: object) -> None:
    return None
