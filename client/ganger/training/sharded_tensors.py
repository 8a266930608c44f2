"""Sharded tensors (DTensor: FSDP2, tensor parallel) as a part and a layout.

The part is the plain tensor in this process; all that parks, saves and moves a state works on it alone. The layout, as
JSON, is where the part is in the whole.

torch.distributed.tensor is imported only where there is such a tensor: a script that has one has imported it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def mesh_of(tensor: Any) -> Any:
    """Return the device mesh that a tensor is sharded over; None for any other tensor."""
    return tensor.device_mesh if is_sharded(tensor) else None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a sharded tensor that lies in this process's memory; of any other tensor, itself."""
    part: Any = getattr(tensor, "_local_tensor", None)
    if part is None:
        return tensor
    # the result of a collective that may be under way
    found: torch.Tensor = part.wait() if hasattr(part, "elem") and hasattr(part, "wait") else part
    return found


def layout_of(tensor: Any) -> dict[str, Any] | None:
    """Return the layout of a sharded tensor; None for any other. Raises ValueError for a placement without JSON form.

    `offset`: where the part begins in the whole, by dimension; None where the part is no block of the whole.
    """
    if not is_sharded(tensor):
        return None
    mesh = tensor.device_mesh
    at, names = mesh.get_coordinate(), mesh.mesh_dim_names
    placements = [placement_as_json(placement) for placement in tensor.placements]
    block = None if at is None else block_of(tensor.shape, mesh.shape, at, placements)
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "mesh": list(mesh.shape),
        "names": None if names is None else list(names),
        "at": None if at is None else list(at),
        "placements": placements,
        "offset": block[1] if block is not None and block[0] == list(local_part(tensor).shape) else None,
    }


def placement_as_json(placement: Any) -> list[Any]:
    name = type(placement).__name__
    if name == "Shard":
        return [name, placement.dim]
    if name == "_StridedShard":
        return [name, placement.dim, placement.split_factor]
    if name in ("Partial", "_Partial"):
        return ["Partial", str(placement.reduce_op)]
    if name == "Replicate":
        return [name]
    raise ValueError(f"sharded tensors with the placement {placement!r} cannot be saved")


def placements_of(saved: Iterable[Any]) -> list[Any]:
    """Return the placements that `placement_as_json` made JSON of. Raises ValueError for what it never makes."""
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

    made: list[Any] = []
    for name, *arguments in saved:
        if name == "Shard":
            made.append(Shard(int(arguments[0])))
        elif name == "_StridedShard":
            made.append(_StridedShard(int(arguments[0]), split_factor=int(arguments[1])))
        elif name == "Partial":
            made.append(Partial(str(arguments[0])))
        elif name == "Replicate":
            made.append(Replicate())
        else:
            raise ValueError(f"unknown placement {name!r} of a sharded tensor; it was written by a newer ganger")
    return made


def block_of(
    shape: Sequence[int], mesh: Sequence[int], at: Sequence[int], placements: Sequence[Sequence[Any]]
) -> tuple[list[int], list[int]] | None:
    """Return the sizes and the offset of the block of a tensor that lies at `at` in a mesh; None where it is no block.

    `placements`: as JSON. torch's own function makes tensors of all indices, which takes milliseconds for each tensor.
    """
    sizes, offset = list(shape), [0] * len(shape)
    for dimension in _order_of_cuts(mesh, placements):
        cut = placements[dimension][1]
        # as torch.chunk: the last ones may be shorter, or empty
        length = -(-sizes[cut] // mesh[dimension])
        start = min(sizes[cut], length * at[dimension])
        sizes[cut], offset[cut] = min(length, sizes[cut] - start), offset[cut] + start
    named = all(name in ("Shard", "_StridedShard", "Replicate") for name, *_ in placements)
    return (sizes, offset) if named and _cuts_blocks(shape, mesh, placements) else None


def _order_of_cuts(mesh: Sequence[int], placements: Sequence[Sequence[Any]]) -> list[int]:
    """Return the dimensions of the mesh that cut, in the order in which they do. FSDP's cut what tensor parallelism
    has cut before, although they come first in the mesh: that is what a stride stands for."""
    plain = [dimension for dimension in range(len(mesh)) if placements[dimension][0] == "Shard"]
    strided = [dimension for dimension in range(len(mesh)) if placements[dimension][0] == "_StridedShard"]
    return [*plain, *reversed(strided)]


def _cuts_blocks(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Sequence[Any]]) -> bool:
    """Return whether each stride is that of the cuts behind it, so that all parts are blocks. Of several strides in one
    dimension of the tensor that is so only where all parts are equal."""
    for dimension, (name, *arguments) in enumerate(placements):
        if name != "_StridedShard":
            continue
        cutting = [other for other, (_, *cut) in enumerate(placements) if cut[:1] == arguments[:1]]
        names = [placements[other][0] for other in cutting]
        behind = math.prod(mesh[other] for other in cutting if other > dimension)
        if "Shard" in names[: cutting.index(dimension)] or behind != arguments[1]:
            return False
        if names.count("_StridedShard") > 1 and shape[arguments[0]] % math.prod(mesh[other] for other in cutting):
            return False
    return True
