"""Sharded tensors on their way back from a state image.

A part is read as it is where its layout is what it was. Else, with another number of ranks, it is put together from the
shards of a checkpoint. torch.distributed.checkpoint decides which region of which shard goes where; the bytes come from
our own files. Every rank reads what it needs by itself: a restore has no collective, so a rank that fails leaves no
other waiting.

torch.distributed is imported only where there is such a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ganger.text import counted
from ganger.training.image_io import OpenImage, PieceReader
from ganger.training.state_codec import (
    TAG,
    dtype_named,
    is_sharded,
    layout_of,
    local_part,
    placement_as_json,
    placements_of,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import ReadItem

_Offset = tuple[int, ...]


@dataclass(frozen=True)
class LaidOutAs:
    """A tensor of the script: a new tensor is laid out as it is, if it was so when the state was saved."""

    own: torch.Tensor
    # Of the script's tensor in the image's table.
    index: int


def read_state(
    table: list[dict[str, Any]],
    destinations: Mapping[int, torch.Tensor],
    likes: Mapping[int, LaidOutAs],
    read: Callable[[dict[int, torch.Tensor], set[int]], dict[int, torch.Tensor]],
    reshard: Callable[[dict[int, torch.Tensor]], None],
) -> dict[int, torch.Tensor]:
    """Return all tensors of an image, by index in its table: `destinations` filled, the others new.

    `read(destinations, skipped)` returns plain tensors, new ones where there is no destination. `reshard(tensors)`
    fills tensors that have another part in this process than in the image. Raises ValueError for a sharded tensor that
    the script has no mesh for.
    """
    plain, elsewhere = dict(destinations), dict[int, torch.Tensor]()
    homes: dict[int, tuple[Any, Any]] = {}
    present = [*destinations.values(), *(like.own for like in likes.values())]
    meshes: list[Any] = [own.device_mesh for own in present if is_sharded(own)]  # type: ignore[attr-defined]
    for index, entry in enumerate(table):
        saved, own = entry.get("sharded"), destinations.get(index)
        if own is not None:
            if layout_of(own) == saved:
                plain[index] = local_part(own)
            else:
                elsewhere[index] = own
            continue
        home = _home(entry, likes.get(index), table, meshes)
        if home is not None and saved is not None and _is_unchanged(saved, *home):
            homes[index] = home
        elif home is not None or saved is not None:
            elsewhere[index] = _new(entry, home)
    tensors = read({index: own for index, own in plain.items() if index not in elsewhere}, set(elsewhere))
    if elsewhere:
        reshard(elsewhere)
    joined = {index: _joined(tensors[index], table[index]["sharded"], *home) for index, home in homes.items()}
    return {**tensors, **destinations, **joined, **elsewhere}


def whole_shape(entry: dict[str, Any]) -> list[int]:
    """Return the shape of the tensor that an entry of an image's table is, or is a part of."""
    return list(entry.get("sharded", entry)["shape"])


def _home(
    entry: dict[str, Any], like: LaidOutAs | None, table: list[dict[str, Any]], meshes: list[Any]
) -> tuple[Any, Any] | None:
    """Return the mesh and placements of a new tensor; None for a plain one."""
    saved = entry.get("sharded")
    if like is not None and _are_laid_out_alike(entry, table[like.index]):
        own: Any = like.own
        return (own.device_mesh, own.placements) if is_sharded(own) else None
    if saved is None:
        return None
    names = None if saved["names"] is None else tuple(saved["names"])
    like_it = [mesh for mesh in meshes if mesh.mesh_dim_names == names and mesh.ndim == len(saved["mesh"])]
    if not like_it:
        whole = saved["names"] or saved["mesh"]
        raise ValueError(f"a tensor was sharded over a mesh of {whole}; there is none like it")
    same = [mesh for mesh in like_it if list(mesh.shape) == saved["mesh"]]
    return (same or like_it)[0], placements_of(saved["placements"])


def _are_laid_out_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if whole_shape(one) != whole_shape(other) or ("sharded" in one) != ("sharded" in other):
        return False
    keys = ("mesh", "names", "placements") if "sharded" in one else ()
    return all(one["sharded"][key] == other["sharded"][key] for key in keys)


def _is_unchanged(saved: dict[str, Any], mesh: Any, placements: Any) -> bool:
    at = mesh.get_coordinate()
    same = list(mesh.shape) == saved["mesh"] and (None if at is None else list(at)) == saved["at"]
    return bool(same) and [placement_as_json(placement) for placement in placements] == saved["placements"]


def _new(entry: dict[str, Any], home: tuple[Any, Any] | None) -> torch.Tensor:
    shape, dtype = whole_shape(entry), dtype_named(entry["dtype"])
    if home is None:
        return torch.empty(shape, dtype=dtype)
    from torch.distributed.tensor import empty

    mesh, placements = home
    made: torch.Tensor = empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return made.cpu() if entry.get("device") == "cpu" else made


def _joined(part: torch.Tensor, saved: dict[str, Any], mesh: Any, placements: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    shape, stride = torch.Size(saved["shape"]), tuple(saved["stride"])
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


# -- another number of ranks


def reshard(
    own: OpenImage,
    tensors: Mapping[int, torch.Tensor],
    shard: Callable[[int], OpenImage] | None,
    ranks: Sequence[int] = (),
) -> None:
    """Fill `tensors`, by index in the table of `own`, from all shards of its checkpoint.

    `shard` opens that of a rank; None for a state in memory, which is one rank's. `ranks`: those with parts of this
    state, as of one role; none: all. Raises ValueError where the shards are not of one state, or lack a part;
    ImageError, OSError.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    wanted = {index: name for name, index in _indices(own.tree).items() if index in tensors}
    state = {name: tensors[index].detach() for index, name in wanted.items() if local_part(tensors[index]).numel()}
    pieces = _Pieces(state)
    is_of_all = any("sharded" in own.header["tensors"][index] for index in tensors)
    for image in opened_shards(own, shard, ranks) if is_of_all else [own]:
        pieces.add(image)
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


def opened_shards(
    own: OpenImage, shard: Callable[[int], OpenImage] | None, ranks: Sequence[int] = ()
) -> Iterator[OpenImage]:
    """Yield the shards of these ranks, none: of all, of the checkpoint that `own` is of. Raises as `reshard` does."""
    if shard is None:
        way = "only from a checkpoint on storage can another number of ranks take it over"
        raise ValueError(f"the state is sharded over {counted(own.header['world'], 'rank')}, and {way}")
    for rank in ranks or range(int(own.header["world"])):
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
        for name, index in _indices(image.tree).items():
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
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in self._tensors}
        for (name, offset), (_, entry) in self._found.items():
            chunks[name].append(ChunkStorageMetadata(torch.Size(offset), torch.Size(entry["shape"])))
        kinds = {name: (TensorProperties(tensor.dtype), tensor.shape) for name, tensor in self._tensors.items()}
        return Metadata({name: TensorStorageMetadata(*kind, chunks[name]) for name, kind in kinds.items()})

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
        # Whole rows of the first dimension, which lie together.
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


def _indices(tree: Any, path: str = "") -> dict[str, int]:
    """Return the index of every tensor of an encoded tree, by its path: scripts have the same paths in every rank."""
    if isinstance(tree, dict) and tree.get(TAG) == "tensor":
        return {path: int(tree["i"])}
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found: dict[str, int] = {}
    for key, item in inside:
        found.update(_indices(item, f"{path}/{key}" if path else str(key)))
    return found
