"""Parts of a state: with which other numbers of ranks a job can continue, and shards by parameter.

A rank that attaches with `shard=` keeps some parameters of a model, as a parameter server does, and the ranks of its
role keep all of them together. With another number of ranks each rank reads its parameters, their gradients and their
optimizer state from whichever shards of a checkpoint have them. Names are those in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable

import torch

from ganger.injob.page_layout import Capability
from ganger.training.image_io import OpenImage, PieceReader, new_tensor
from ganger.training.sharded_reading import opened_shards
from ganger.training.state import (
    Restored,
    StateMismatchError,
    TrainingObjects,
    check_names,
    device_for,
    optimized_names,
    parameters_of,
    restore,
    restored_of,
    unwrapped,
)
from ganger.training.state_codec import decode, dtype_named, is_sharded, layout_of

# Each rank has a part, and nothing says of what: FSDP1 cuts one flat tensor of many parameters, ZeRO gives each rank
# some parameters' optimizer state.
_SHARDING = ("FullyShardedDataParallel", "ZeroRedundancyOptimizer")


def size_offer(training: TrainingObjects) -> tuple[int, str]:
    """Return whether another number of ranks can resume from a job's state, and from where; zero and the reason if not.

    Where each rank has all of the state, from that of any rank, in memory too (RESIZE). Where sharded tensors have
    their place in the whole, or ranks have some parameters each, from the shards of all ranks, so from a checkpoint on
    storage (RESHARD). Models that differ by rank for a reason of their own (pipelines) are found out when a state does
    not fit.
    """
    parts: list[tuple[str, Any]] = list(training.optimizers.items())
    # The tensors by which the others, gradients and optimizer state, are laid out.
    tensors = [(name, item) for name, item in training.objects.items() if isinstance(item, torch.Tensor)]
    for name, model in training.models.items():
        parts += [(f"{name}{path and '.'}{path}", module) for path, module in unwrapped(model).named_modules()]
        tensors += [(f"{name}.{path}", parameter) for path, parameter in unwrapped(model).named_parameters()]
    for name, part in parts:
        if type(part).__name__ in _SHARDING:
            return 0, f"{name} is sharded over the ranks ({type(part).__name__})"
    for name, tensor in tensors:
        layout = layout_of(tensor)
        if layout is not None and layout["offset"] is None and layout["at"] is not None:
            return 0, f"{name} is sharded over the ranks in parts that are no blocks of it"
    is_resharded = any(is_sharded(tensor) for _, tensor in tensors)
    if training.is_shard:
        if is_resharded:
            return 0, "a shard of parameters has parts of sharded tensors"
        for name, optimizer in training.optimizers.items():
            if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
                return 0, f"optimizer {name} saves its state in a form of its own"
    return (Capability.RESHARD if is_resharded or training.is_shard else Capability.RESIZE), ""


def keep_shard(training: TrainingObjects, kept: Iterable[torch.Tensor]) -> None:
    """Replace the models by modules that have only the parameters that are kept, under their names in the models.

    Raises ValueError for a parameter that is in no model, and for an optimizer of others."""
    wanted = {id(parameter) for parameter in kept}
    left, parts = set(wanted), dict[str, torch.nn.Module]()
    for name, model in training.models.items():
        parts[name] = torch.nn.Module()
        for path, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
            if id(parameter) in wanted:
                left.discard(id(parameter))
                *above, last = path.split(".")
                inside: Any = parts[name]
                for step in above:
                    # Not add_module, which refuses names that modules have otherwise.
                    inside = inside._modules.setdefault(step, torch.nn.Module())
                inside._parameters[last] = parameter
    if left:
        raise ValueError(f"attach: {len(left)} parameters of the shard are in no model")
    for name, optimizer in training.optimizers.items():
        if any(id(parameter) not in wanted for parameter in parameters_of(optimizer)):
            raise ValueError(f"attach: {name} has parameters that are not in the shard")
    training.models, training.is_shard = parts, True


def restore_part(
    training: TrainingObjects, image: OpenImage, shard: Callable[[int], OpenImage] | None, ranks: Sequence[int] = ()
) -> Restored:
    """Restore as `restore` does; a shard of other parameters than those of the image from all shards.

    `ranks`: of the role, in the world that saved; none: all. Raises StateMismatchError, ImageError, OSError."""
    if not training.is_shard or shard is None:
        return restore(training, image, shard, ranks)
    try:
        wanted = {
            f"{name}.{path}"
            for name, model in training.models.items()
            for path, _ in model.named_parameters(remove_duplicate=False)
        }
        saved = {f"{name}.{path}" for name, kept in image.tree["models"].items() for path in kept["tensors"]}
        saved_names = {name: kept.get("names") for name, kept in image.tree["optimizers"].items()}
        if wanted == saved and optimized_names(training) == saved_names:
            return restore(training, image, shard, ranks)
        gathered = _Gathered(training, wanted)
        for other in opened_shards(image, shard, ranks):
            gathered.add(other)
        return restored_of(training, image, gathered.state(image), [])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise StateMismatchError(f"the saved state does not fit this script: {error}") from error


class _Gathered:
    """The parameters of one rank with their gradients and optimizer state, from the shards of a checkpoint."""

    def __init__(self, training: TrainingObjects, wanted: set[str]) -> None:
        self._training = training
        self._missing = wanted
        self._models: dict[str, Any] = {name: {"tensors": {}, "gradients": {}, "extra": {}} for name in training.models}
        # By the name of the parameter.
        self._states: dict[str, dict[str, Any]] = {name: {} for name in training.optimizers}
        # The first one that has parameters of this rank.
        self._used: OpenImage | None = None

    def add(self, image: OpenImage) -> None:
        """Take what this rank keeps from one shard."""
        tree, read = image.tree, _reader(self._training, image)
        found = set()
        for name, kept in tree["models"].items():
            for path, tensor in kept["tensors"].items():
                if f"{name}.{path}" in self._missing:
                    found.add(f"{name}.{path}")
                    self._models[name]["tensors"][path] = decode(tensor, read)
                    if path in kept["gradients"]:
                        self._models[name]["gradients"][path] = decode(kept["gradients"][path], read)
        if not found:
            # A shard without parameters has no optimizer.
            return
        check_names(self._training, tree)
        self._used = self._used or image
        for name, optimizer in tree["optimizers"].items():
            for number, values in optimizer["state"]:
                parameter = optimizer["names"][number]
                if parameter in found:
                    self._states[name][parameter] = decode(values, read)
        self._missing = self._missing - found

    def state(self, own: OpenImage) -> dict[str, Any]:
        """Return the whole state of the rank; what does not belong to parameters is that of its own image.

        If that has no optimizer, options of optimizers and schedulers are those of a shard with its parameters."""
        if self._missing:
            raise ValueError(f"the checkpoint's shards do not have {', '.join(sorted(self._missing)[:5])}")
        training, names = self._training, optimized_names(self._training)
        has_all = training.optimizers.keys() <= own.tree["optimizers"].keys()
        like = own if has_all or self._used is None else self._used
        read, optimizers = _reader(training, like), {}
        for name, optimizer in training.optimizers.items():
            groups = decode(like.tree["optimizers"][name]["groups"], read)
            if len(groups) != len(optimizer.param_groups):
                raise ValueError(f"optimizer {name} has {len(optimizer.param_groups)} groups, saved with {len(groups)}")
            states = self._states[name]
            state = [[number, states[key]] for number, key in enumerate(names[name]) if key in states]
            optimizers[name] = {"groups": groups, "state": state}
        beside = decode({kind: like.tree[kind] for kind in ("schedulers", "scalers")}, read)
        left_out = dict.fromkeys(("models", "optimizers", "schedulers", "scalers"))
        rest = decode({**own.tree, **left_out}, _reader(training, own))
        self._check_types()
        return {**rest, **beside, "models": self._models, "optimizers": optimizers}

    def _check_types(self) -> None:
        for name, model in self._training.models.items():
            saved = self._models[name]["tensors"]
            for path, parameter in model.named_parameters(remove_duplicate=False):
                if (saved[path].shape, saved[path].dtype) != (parameter.shape, parameter.dtype):
                    is_of = f"{list(saved[path].shape)} {saved[path].dtype}"
                    here = f"{list(parameter.shape)} {parameter.dtype}"
                    raise ValueError(f"the saved {name}.{path} is {is_of}, the script's is {here}")


def _reader(training: TrainingObjects, image: OpenImage) -> Callable[[int], torch.Tensor]:
    """Return a function that reads a tensor of an image by its index, each piece against its digest."""
    pieces, table = PieceReader(image), image.header["tensors"]

    def read(index: int) -> torch.Tensor:
        entry = table[index]
        if "sharded" in entry:
            raise ValueError("a shard of parameters has parts of sharded tensors")
        shape, dtype = tuple(int(size) for size in entry["shape"]), dtype_named(entry["dtype"])
        made = new_tensor(entry, shape, dtype, device_for(training, entry.get("device", "cpu")))
        if made.numel():
            made.copy_(torch.frombuffer(pieces.read(entry["offset"], entry["bytes"]), dtype=dtype).view(shape))
        return made

    return read
