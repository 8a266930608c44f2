"""Parts of sharded tensors, put together from the shards of a checkpoint that another number of ranks has written.

torch.distributed.checkpoint decides which region of which shard goes where; the bytes come from our own files. Every
rank reads what it needs by itself: a restore has no collective, so a rank that fails leaves no other waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from ganger.training.image_reading import OpenImage, PieceReader
from ganger.training.sharded_reading import whole_shape
from ganger.training.sharded_tensors import local_part
from ganger.training.state_codec import TAG, dtype_named

_Offset = tuple[int, ...]


def reshard(own: OpenImage, tensors: Mapping[int, torch.Tensor], shard: Callable[[int], OpenImage] | None) -> None:
    """Fill `tensors`, by index in the table of `own`, from all shards of its checkpoint.

    `shard` opens that of a rank; None for a state in memory, which is one rank's. Raises ValueError where the shards
    are not of one state, or lack a part; ImageError, OSError.
    """
    wanted = {index: name for name, index in _names(own.tree).items() if index in tensors}
    state = {name: tensors[index].detach() for index, name in wanted.items() if local_part(tensors[index]).numel()}
    pieces = _Pieces(state)
    if any("sharded" in own.header["tensors"][index] for index in tensors):
        for image in _all_shards(own, shard):
            pieces.add(image)
    else:
        pieces.add(own)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, metadata=pieces.metadata(), is_coordinator=False)
    missing = {name: local_part(tensor).numel() for name, tensor in state.items()}
    for item in sorted(planner.finish_plan(planner.create_local_plan()).items, key=pieces.place):
        target = planner.resolve_tensor(item).detach()
        target.copy_(pieces.read(item))
        planner.commit_tensor(item, target)
        missing[item.dest_index.fqn] -= target.numel()
    lacking = [name for name, count in missing.items() if count]
    if lacking:
        raise ValueError(f"the checkpoint's shards do not have all of {', '.join(lacking[:5])}")


def _all_shards(own: OpenImage, shard: Callable[[int], OpenImage] | None) -> Iterator[OpenImage]:
    if shard is None:
        raise ValueError(
            f"the state is sharded over {own.header['world']} ranks, and only from a checkpoint on storage can another"
            " number of ranks take it over"
        )
    for rank in range(int(own.header["world"])):
        image = shard(rank)
        if (image.step, image.header["world"], image.header["rank"]) != (own.step, own.header["world"], rank):
            raise ValueError(f"the shard of rank {rank} is of another checkpoint")
        yield image


class _Pieces:
    """The parts of some tensors in the shards of a checkpoint, by name; of equal parts the first one."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._readers: list[PieceReader] = []
        self._found: dict[tuple[str, _Offset], tuple[int, dict[str, Any]]] = {}

    def add(self, image: OpenImage) -> None:
        """Take in the parts of one more shard."""
        self._readers.append(PieceReader(image))
        for name, index in _names(image.tree).items():
            entry = image.header["tensors"][index]
            if name not in self._tensors or not math.prod(entry["shape"]):
                continue
            tensor = self._tensors[name]
            if whole_shape(entry) != list(tensor.shape) or dtype_named(entry["dtype"]) != tensor.dtype:
                raise ValueError(
                    f"the saved {name} is {whole_shape(entry)} {entry['dtype']}, the script's is {list(tensor.shape)}"
                    f" {tensor.dtype}: the script or its data changed since the state was saved"
                )
            offset = entry["sharded"]["offset"] if "sharded" in entry else [0] * len(entry["shape"])
            if offset is None:
                raise ValueError(f"{name} was sharded in a way that another number of ranks cannot take over")
            self._found.setdefault((name, tuple(offset)), (len(self._readers) - 1, entry))

    def metadata(self) -> Metadata:
        chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in self._tensors}
        for (name, offset), (_, entry) in self._found.items():
            chunks[name].append(ChunkStorageMetadata(torch.Size(offset), torch.Size(entry["shape"])))
        return Metadata(
            {
                name: TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks[name])
                for name, tensor in self._tensors.items()
            }
        )

    def place(self, item: ReadItem) -> tuple[int, int]:
        """Return the shard and the place in it of what `item` reads."""
        number, entry = self._entry(item)
        return number, int(entry["offset"])

    def read(self, item: ReadItem) -> torch.Tensor:
        """Return the region of a part that `item` names."""
        number, entry = self._entry(item)
        shape, dtype = [int(size) for size in entry["shape"]], dtype_named(entry["dtype"])
        if not shape:
            return torch.frombuffer(self._readers[number].read(entry["offset"], entry["bytes"]), dtype=dtype).view(())
        # whole rows of the first dimension, which lie together
        row_bytes = entry["bytes"] // shape[0]
        first, rows = int(item.storage_offsets[0]), int(item.lengths[0])
        data = self._readers[number].read(entry["offset"] + first * row_bytes, rows * row_bytes)
        region = torch.frombuffer(data, dtype=dtype).view(rows, *shape[1:])
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
            if dimension:
                region = region.narrow(dimension, start, length)
        return region

    def _entry(self, item: ReadItem) -> tuple[int, dict[str, Any]]:
        offset = item.storage_index.offset
        assert offset is not None, "parts are found by their offset"
        return self._found[item.storage_index.fqn, tuple(offset)]


def _names(tree: Any, path: str = "") -> dict[str, int]:
    """Return the index of every tensor of an encoded tree, by its path: scripts have the same paths in every rank."""
    if isinstance(tree, dict) and tree.get(TAG) == "tensor":
        return {path: int(tree["i"])}
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found: dict[str, int] = {}
    for key, item in inside:
        found.update(_names(item, f"{path}/{key}" if path else str(key)))
    return found
