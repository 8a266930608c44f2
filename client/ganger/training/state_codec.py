"""State trees as tagged JSON, with tensors taken out into a table, and the model of device that they live on.

Plain JSON values stand for themselves; everything else is an object with the key "$": tensors, tuples, dictionaries
whose keys are not strings, bytes, numpy values, ... Nothing in a tree can make the reader run code.

Of a sharded tensor (DTensor: FSDP2, tensor parallel) the table has the part in this process, a plain tensor: all that
parks, saves and moves a state works on it alone. Its layout, as JSON, is where the part is in the whole.
torch.distributed.tensor is imported only where there is such a tensor: a script that has one has imported it.
"""

from __future__ import annotations

import base64
import math
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import torch

TAG = "$"
MAX_DEPTH = 200


class StateNotSupportedError(Exception):
    """A value in the state has no portable form. The message says where it sits."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor of the image, by its place in the tensor table."""

    index: int


class TensorTable:
    """Collects the distinct tensors of a state. A view that occurs twice (tied weights) is kept once.

    Of a sharded tensor it has the part in this process, and in `layouts` where that is in the whole, by index."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.layouts: dict[int, dict[str, Any]] = {}
        self._known: dict[tuple[Any, ...], int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Return the tensor's index. Raises ValueError for a sharded one whose layout has no portable form."""
        layout = layout_of(tensor)
        tensor = local_part(tensor).detach()
        # Empty storages share the null address.
        place = (str(tensor.device), tensor.data_ptr(), tuple(tensor.stride())) if tensor.numel() else id(tensor)
        key = (place, tensor.dtype, tuple(tensor.shape), repr(layout))
        index = self._known.get(key)
        if index is None:
            index = self._known[key] = len(self.tensors)
            self.tensors.append(tensor)
            if layout is not None:
                self.layouts[index] = layout
        return index


# Code is rebuilt by the script: schedulers keep bound methods and lambdas among their numbers.
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


def encode(value: Any, table: TensorTable, where: str = "state", depth: int = 0) -> Any:
    """`value` as tagged JSON; tensors go into `table`. Raises StateNotSupportedError."""
    if depth > MAX_DEPTH:
        raise StateNotSupportedError(f"{where}: nested more than {MAX_DEPTH} deep")
    if value is None or type(value) in (bool, str, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, table, where)
    simple = _encode_simple(value, table)
    if simple is not None:
        return simple
    if isinstance(value, dict):
        return _encode_dict(value, table, where, depth)
    name = _SEQUENCES.get(type(value), "tuple" if isinstance(value, tuple) else "")
    if name:
        items = [encode(item, table, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
        return items if name == "list" else {TAG: name, "v": items}
    raise StateNotSupportedError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; give the object "
        "state_dict() and load_state_dict() of numbers, strings, lists, dictionaries and tensors"
    )


_KINDS = (list, torch.Size, tuple, set, frozenset, deque)
_SEQUENCES: dict[Any, str] = dict(zip(_KINDS, ("list", "size", "tuple", "set", "frozenset", "deque")))


def _encode_tensor(value: torch.Tensor, table: TensorTable, where: str) -> Any:
    part = local_part(value)
    if part.layout != torch.strided or part.is_quantized or part.device.type == "meta":
        raise StateNotSupportedError(f"{where}: only dense tensors can be saved, this one is {part.layout}")
    if type(part) not in (torch.Tensor, torch.nn.Parameter) and (is_sharded(value) or hasattr(part, "to_local")):
        raise StateNotSupportedError(f"{where}: sharded tensors of {type(part).__name__} cannot be saved")
    try:
        return {TAG: "tensor", "i": table.add(value)}
    except ValueError as error:
        raise StateNotSupportedError(f"{where}: {error}") from error


def _encode_simple(value: Any, table: TensorTable) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {TAG: "bytes", "v": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, complex):
        return {TAG: "complex", "v": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "v": str(value)[len("torch.") :]}
    if isinstance(value, torch.device):
        return {TAG: "device", "v": str(value)}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
        data = bytearray(numpy.ascontiguousarray(value).tobytes())
        if isinstance(value, numpy.generic):
            return {TAG: "numpy scalar", "dtype": value.dtype.str, "v": base64.b64encode(data).decode()}
        raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return {TAG: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "i": table.add(raw)}
    return None


def _encode_dict(value: dict[Any, Any], table: TensorTable, where: str, depth: int) -> Any:
    kept = {key: item for key, item in value.items() if not isinstance(item, _CODE)}
    if type(value) is dict and all(type(key) is str and key != TAG for key in kept):
        return {key: encode(item, table, f"{where}.{key}", depth + 1) for key, item in kept.items()}
    kind = next((name for known, name in _MAPPINGS if isinstance(value, known)), "dict")
    pairs = [
        [encode(key, table, f"{where} key", depth + 1), encode(item, table, f"{where}[{key!r}]", depth + 1)]
        for key, item in kept.items()
    ]
    return {TAG: kind, "v": pairs}


_MAPPINGS = ((OrderedDict, "ordered"), (Counter, "counter"), (defaultdict, "dict"))


def decode(encoded: Any, tensor: Callable[[int], Any]) -> Any:
    """The inverse of `encode`; `tensor(i)` gives entry i of the table. Raises ValueError on what encode never makes."""
    if isinstance(encoded, list):
        return [decode(item, tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if TAG not in encoded:
        return {key: decode(item, tensor) for key, item in encoded.items()}
    tag = encoded[TAG]
    decoder = _DECODERS.get(tag) if isinstance(tag, str) else None
    if decoder is None:
        raise ValueError(f"unknown tag {tag!r} in the state tree; it was written by a newer ganger")
    try:
        return decoder(encoded, tensor)
    except (KeyError, TypeError, IndexError, OverflowError, RuntimeError, SyntaxError) as error:
        raise ValueError(f"malformed {tag} in the state tree: {error!r}") from error


def _items(encoded: dict[str, Any], tensor: Callable[[int], Any]) -> list[Any]:
    return [decode(item, tensor) for item in encoded["v"]]


def _pairs(encoded: dict[str, Any], tensor: Callable[[int], Any]) -> list[tuple[Any, Any]]:
    return [(decode(key, tensor), decode(item, tensor)) for key, item in encoded["v"]]


def dtype_named(name: Any) -> torch.dtype:
    """Return a tensor type by name. Raises ValueError for a name that this torch lacks."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return found


def _numpy_array(encoded: dict[str, Any], tensor: Callable[[int], Any]) -> Any:
    raw = tensor(encoded["i"])
    if isinstance(raw, TensorRef):
        return raw
    import numpy

    data = bytes(raw.contiguous().tolist()) if raw.numel() < 64 else raw.numpy().tobytes()
    return numpy.frombuffer(data, dtype=numpy.dtype(encoded["dtype"])).reshape(encoded["shape"]).copy()


def _numpy_scalar(encoded: dict[str, Any], _: Callable[[int], Any]) -> Any:
    import numpy

    return numpy.frombuffer(base64.b64decode(encoded["v"]), dtype=numpy.dtype(encoded["dtype"]))[0]


_DECODERS: dict[str, Callable[[dict[str, Any], Callable[[int], Any]], Any]] = {
    "tensor": lambda e, t: t(e["i"]),
    "float": lambda e, t: float(e["v"]),
    "bytes": lambda e, t: base64.b64decode(e["v"]),
    "complex": lambda e, t: complex(float(e["v"][0]), float(e["v"][1])),
    "dtype": lambda e, t: dtype_named(e["v"]),
    "device": lambda e, t: torch.device(e["v"]),
    "ndarray": _numpy_array,
    "numpy scalar": _numpy_scalar,
    "size": lambda e, t: torch.Size(_items(e, t)),
    "tuple": lambda e, t: tuple(_items(e, t)),
    "set": lambda e, t: set(_items(e, t)),
    "frozenset": lambda e, t: frozenset(_items(e, t)),
    "deque": lambda e, t: deque(_items(e, t)),
    "dict": lambda e, t: dict(_pairs(e, t)),
    "ordered": lambda e, t: OrderedDict(_pairs(e, t)),
    "counter": lambda e, t: Counter(dict(_pairs(e, t))),
}


def device_model(tensors: Iterable[torch.Tensor]) -> str:
    """The names of the accelerators they are on ("NVIDIA H200"), in order; empty without any."""
    devices = {tensor.device for tensor in tensors}
    asked = ((getattr(getattr(torch, one.type, None), "get_device_name", None), one) for one in devices)
    return ", ".join(sorted({str(ask(device)) for ask, device in asked if ask is not None} - {""}))


def notice_of_change(saved_on: str, here: str) -> str:
    """A sentence for the job's log; empty where the model is the same, or one of them is not known."""
    if not saved_on or not here or saved_on == here:
        return ""
    return (
        f"its state was saved on {saved_on} and goes on on {here}: from here on results may differ in their last bits. "
        "--gpu-type keeps a job on one type of GPU"
    )


def tell(notice: str) -> None:
    if notice:
        print(f"ganger: {notice}", file=sys.stderr, flush=True)


# -- sharded tensors


def is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a sharded tensor that lies in this process's memory; of any other tensor, itself."""
    part: Any = getattr(tensor, "_local_tensor", None)
    if part is None:
        return tensor
    # The result of a collective that may be under way.
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
        # As torch.chunk: the last ones may be shorter, or empty.
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
