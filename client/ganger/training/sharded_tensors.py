"""Sharded tensors (DTensor: FSDP2, tensor parallel) as a part and a layout.

The part is the plain tensor in this process; all that parks, saves and moves a state works on it alone. The layout, as
JSON, is where the part is in the whole.

torch.distributed.tensor is imported only where there is such a tensor: a script that has one has imported it.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "mesh": list(mesh.shape),
        "names": None if names is None else list(names),
        "at": None if at is None else list(at),
        "placements": [placement_as_json(placement) for placement in tensor.placements],
        "offset": _offset(tensor),
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
    from torch.distributed.tensor import placement_types

    return [getattr(placement_types, str(name))(*arguments) for name, *arguments in saved]


def _offset(tensor: Any) -> list[int] | None:
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:  # of another version of torch
        return None
    if not all(_is_block(tensor, dimension) for dimension in range(len(tensor.placements))):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(map(int, offset)) if tuple(shape) == tuple(local_part(tensor).shape) else None


def _is_block(tensor: Any, dimension: int) -> bool:
    """Return whether that dimension of the mesh cuts blocks. FSDP's over tensor parallelism does: its stride is undone
    by the placements behind it."""
    placement = tensor.placements[dimension]
    if type(placement).__name__ != "_StridedShard":
        return type(placement).__name__ in ("Shard", "Replicate")
    behind = 1
    for other, later in enumerate(tensor.placements[dimension + 1 :], dimension + 1):
        if type(later).__name__ == "Shard" and later.dim == placement.dim:
            behind *= tensor.device_mesh.size(other)
    return bool(behind == placement.split_factor)
