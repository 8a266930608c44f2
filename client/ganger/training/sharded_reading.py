"""Sharded tensors on their way back from a state image.

A part is read as it is where its layout is what it was. Else, with another number of ranks, it is put together from the
parts of all ranks (resharded_state).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

import torch

from ganger.training.sharded_tensors import is_sharded, layout_of, local_part, mesh_of, placement_as_json, placements_of
from ganger.training.state_codec import dtype_named


@dataclass(frozen=True)
class LaidOutAs:
    """A tensor of the script: a new tensor is laid out as it is, if it was so when the state was saved."""

    own: torch.Tensor
    # of the script's tensor in the image's table
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
    meshes = [mesh for mesh in map(mesh_of, present) if mesh is not None]
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
    shape: list[int] = entry.get("sharded", entry)["shape"]
    return shape


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
    names = [mesh for mesh in meshes if _names(mesh) == saved["names"] and mesh.ndim == len(saved["mesh"])]
    same = [mesh for mesh in names if list(mesh.shape) == saved["mesh"]]
    if not names:
        raise ValueError(
            f"a tensor was sharded over a mesh of {saved['names'] or saved['mesh']}; there is none like it"
        )
    return (same or names)[0], placements_of(saved["placements"])


def _are_laid_out_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if whole_shape(one) != whole_shape(other) or ("sharded" in one) != ("sharded" in other):
        return False
    return all(
        one["sharded"][key] == other["sharded"][key] for key in ("mesh", "names", "placements") if "sharded" in one
    )


def _names(mesh: Any) -> list[str] | None:
    return None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names)


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
    whole: torch.Tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
    return whole
