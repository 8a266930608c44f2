"""Parts of sharded tensors in state images: what they say of the whole, and how the whole comes from them again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ganger.injob.state_image import ImageError
from ganger.training.image_io import ArenaSink, ArenaSource, OpenImage, PieceReader, open_image, plan_image, write_image
from ganger.training.sharded_reading import reshard
from ganger.training.state import StateMismatchError, TrainingObjects, capture, restore
from ganger.training.state_codec import (
    StateNotSupportedError,
    TensorTable,
    block_of,
    encode,
    is_sharded,
    layout_of,
    local_part,
    placement_as_json,
    placements_of,
)
from hypothesis import given
from hypothesis import strategies as some

pytestmark = pytest.mark.torch

TREE = {"weight": {"$": "tensor", "i": 0}, "bias": {"$": "tensor", "i": 1}}


def _opened(plan: Any) -> OpenImage:
    arena = bytearray(plan.total_bytes)
    write_image(plan, ArenaSink(memoryview(arena), lambda filled: None))
    return open_image(ArenaSource(memoryview(arena), lambda size: None))


def _layout(shape: tuple[int, ...], offset: tuple[int, ...]) -> dict[str, Any]:
    return {"shape": list(shape), "stride": [], "mesh": [], "names": None, "at": [], "placements": [], "offset": offset}


def _shards(whole: torch.Tensor, cuts: list[list[int]], step: Callable[[int], int] = lambda rank: 5) -> list[OpenImage]:
    """One image for each block of `whole` between the cuts of each dimension; all have the same bias."""
    spans = [list(itertools.pairwise([0, *sorted(of), size])) for of, size in zip(cuts, whole.shape, strict=True)]
    blocks = list(itertools.product(*spans))
    found = []
    for rank, block in enumerate(blocks):
        part = whole[tuple(slice(start, end) for start, end in block)]
        layout = _layout(tuple(whole.shape), tuple(start for start, _ in block))
        tensors = [part.clone(), torch.arange(3.0)]
        plan = plan_image(TREE, tensors, {0: layout}, step=step(rank), samples=0, rank=rank, world=len(blocks))
        found.append(_opened(plan))
    return found


@some.composite
def _cut_up(draw: some.DrawFn) -> tuple[torch.Tensor, list[list[int]]]:
    shape = draw(some.lists(some.integers(1, 7), max_size=3))
    dtype = draw(some.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    if draw(some.booleans()):
        whole = whole.permute(tuple(reversed(range(whole.ndim))))
    return whole, [draw(some.lists(some.integers(0, size), max_size=2)) for size in whole.shape]


@given(_cut_up())
def test_a_tensor_that_was_cut_anyhow_comes_back_whole(case: tuple[torch.Tensor, list[list[int]]]) -> None:
    whole, cuts = case
    shards = _shards(whole, cuts)
    into = torch.full_like(whole, 77)
    reshard(shards[-1], {0: into}, shards.__getitem__)
    assert torch.equal(into, whole)


def test_a_tensor_of_one_role_is_not_put_together_from_shards_of_another() -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    # Two roles of two ranks with a tensor of the same name.
    others, shards = _shards(whole + 100, [[3], []]), _shards(whole, [[3], []])
    world = [*others, *shards]
    for rank, image in enumerate(world):
        image.header.update(rank=rank, world=4)
    into = torch.full_like(whole, 77)
    reshard(world[3], {0: into}, world.__getitem__, range(2, 4))
    assert torch.equal(into, whole)


def test_shards_that_lack_a_part_are_not_taken_for_the_whole() -> None:
    shards = _shards(torch.arange(12.0).reshape(6, 2), [[2, 4], []])
    # a part that the last rank does not have
    shards[2].header["tensors"][0].update(shape=[0, 2], bytes=0)
    with pytest.raises(ValueError, match="do not have all of weight"):
        reshard(shards[0], {0: torch.empty(6, 2)}, shards.__getitem__)


def test_shards_of_two_checkpoints_are_not_mixed() -> None:
    shards = _shards(torch.arange(12.0).reshape(6, 2), [[2, 4], []], step=lambda rank: 5 + rank // 2)
    with pytest.raises(ValueError, match="the shard of rank 2 is of another checkpoint"):
        reshard(shards[0], {0: torch.empty(6, 2)}, shards.__getitem__)


def test_a_sharded_state_in_memory_is_one_rank_s_and_no_other_number_takes_it_over() -> None:
    shards = _shards(torch.arange(12.0).reshape(6, 2), [[2], []])
    with pytest.raises(ValueError, match="only from a checkpoint on storage"):
        reshard(shards[0], {0: torch.empty(6, 2)}, None)


def test_a_tensor_of_another_shape_or_type_is_refused_by_name() -> None:
    shards = _shards(torch.arange(12.0).reshape(6, 2), [[2], []])
    for odd in (torch.empty(6, 3), torch.empty(6, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="the saved weight is"):
            reshard(shards[0], {0: odd}, shards.__getitem__)


@pytest.mark.parametrize("place", [0, 100, -9, -1])
def test_a_piece_of_a_damaged_image_is_not_read(place: int) -> None:
    plan = plan_image({"$": "tensor", "i": 0}, [torch.arange(64.0)], step=1, samples=0, rank=0, world=1)
    arena = bytearray(plan.total_bytes)
    write_image(plan, ArenaSink(memoryview(arena), lambda filled: None))
    image = open_image(ArenaSource(memoryview(arena), lambda size: None))
    assert PieceReader(image).read(8, 8) == arena[plan.preamble.data_offset + 8 :][:8]
    arena[place if place < 0 else plan.preamble.data_offset + place] ^= 1
    with pytest.raises(ImageError) as refused:
        PieceReader(image).read(8, 8)
    assert refused.value.reason == "DIGEST"


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _sharded(value: torch.Tensor, *placements: Any, names: tuple[str, ...] = ("dp", "tp")) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=names)
    return distribute_tensor(value, mesh, placements or (Replicate(), Replicate()))


@pytest.mark.usefixtures("alone")
def test_a_sharded_tensor_is_encoded_as_its_part_and_a_layout() -> None:
    from torch.distributed.tensor import Replicate, Shard

    tensor = _sharded(torch.arange(6.0).reshape(3, 2), Shard(1), Replicate())
    table = TensorTable()
    assert encode([tensor, tensor], table) == [{"$": "tensor", "i": 0}] * 2
    assert table.tensors[0].data_ptr() == local_part(tensor).data_ptr()
    assert table.layouts[0] == {
        "shape": [3, 2],
        "stride": [2, 1],
        "mesh": [1, 1],
        "names": ["dp", "tp"],
        "at": [0, 0],
        "placements": [["Shard", 1], ["Replicate"]],
        "offset": [0, 0],
    }
    assert layout_of(torch.empty(1)) is None


@pytest.mark.usefixtures("alone")
def test_sums_that_are_still_to_be_made_have_no_place_in_the_whole() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (1,))
    layout = layout_of(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    assert layout is not None
    assert (layout["placements"], layout["offset"]) == ([["Partial", "sum"]], None)


@pytest.mark.usefixtures("alone")
def test_a_part_of_a_type_that_has_no_portable_form_is_refused_by_name() -> None:
    tensor = _sharded(torch.ones(2))
    tensor._local_tensor = torch.ones(2).to_sparse()
    with pytest.raises(StateNotSupportedError, match="here: only dense tensors"):
        encode(tensor, TensorTable(), "here")


@pytest.mark.usefixtures("alone")
def test_a_registered_tensor_comes_back_sharded_before_the_script_has_registered_it() -> None:
    saved = _sharded(torch.arange(4.0))
    other = _sharded(torch.zeros(2))
    image = _opened(
        capture(TrainingObjects(objects={"ema": saved, "known": other}), {}).plan(step=3, samples=0, rank=0, world=1)
    )
    restored = restore(TrainingObjects(objects={"known": _sharded(torch.ones(2))}), image)
    ema = restored.unclaimed["ema"]
    assert layout_of(ema) == layout_of(saved)
    assert torch.equal(local_part(ema), torch.arange(4.0))


@pytest.mark.usefixtures("alone")
def test_a_sharded_tensor_without_a_mesh_in_the_script_does_not_come_back() -> None:
    training = TrainingObjects(objects={"ema": _sharded(torch.arange(4.0))})
    image = _opened(capture(training, {}).plan(step=3, samples=0, rank=0, world=1))
    with pytest.raises(StateMismatchError, match=r"sharded over a mesh of \['dp', 'tp'\]; there is none like it"):
        restore(TrainingObjects(objects={"known": _sharded(torch.ones(2), names=("dp", "pp"))}), image)


@pytest.mark.usefixtures("alone")
def test_parameters_that_an_evaluation_has_gathered_are_captured_as_parts() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert not is_sharded(model.weight)
    captured = capture(TrainingObjects(models={"model": model}), {})
    assert is_sharded(model.weight)
    assert set(captured.layouts) == {0, 1}


MESHES: dict[str, tuple[tuple[int, ...], list[list[Any]]]] = {
    "FSDP": ((3,), [["Shard", 0]]),
    "replicas of shards": ((2, 3), [["Replicate"], ["Shard", 1]]),
    "tensor parallel in two dimensions": ((2, 3), [["Shard", 0], ["Shard", 1]]),
    "two cuts of one dimension": ((2, 3), [["Shard", 0], ["Shard", 0]]),
    "FSDP over tensor parallel": ((2, 3), [["_StridedShard", 0, 3], ["Shard", 0]]),
    "FSDP over two others": ((2, 2, 3), [["_StridedShard", 1, 6], ["_StridedShard", 1, 3], ["Shard", 1]]),
}


@pytest.mark.parametrize("way", MESHES)
@given(shape=some.tuples(some.integers(1, 30), some.integers(1, 30)))
def test_a_block_is_where_torch_has_it(way: str, shape: tuple[int, int]) -> None:
    from torch.distributed.tensor import _utils

    mesh, placements = MESHES[way]
    for at in itertools.product(*map(range, mesh)):
        found = block_of(shape, mesh, at, placements)
        sizes, offset = _utils._compute_local_shape_and_global_offset(shape, mesh, list(at), placements_of(placements))
        if way == "FSDP over two others" and shape[1] % 12:
            assert found is None, "parts of several strides and of unequal sizes are no blocks"
            continue
        assert found is not None
        assert found[0] == list(sizes)
        if all(sizes):
            assert found[1] == list(offset)


def test_placements_come_back_from_json() -> None:
    known = [["Shard", 1], ["_StridedShard", 0, 2], ["Partial", "sum"], ["Replicate"]]
    assert [placement_as_json(placement) for placement in placements_of(known)] == known
    with pytest.raises(ValueError, match="unknown placement 'Placement'"):
        placements_of([["Placement"]])


def test_a_part_whose_rows_lie_apart_is_no_block() -> None:
    assert block_of((8, 2), (2, 2), (0, 0), [["_StridedShard", 0, 4], ["Shard", 0]]) is None
    assert block_of((8, 2), (2, 2), (0, 0), [["Shard", 0], ["_StridedShard", 0, 2]]) is None
