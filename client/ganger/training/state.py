"""The complete state of a training run: what is captured at a boundary and put back, in place, before the next step.

Parameters keep their identity; tensors are read straight into the memory the script already has. What the script builds
(code, shapes, wiring) is not saved, only what training changed.

So are the states of all random generators that a training script draws from, as plain bytes and numbers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ganger.training.gradient_buckets import begin_with, bucket_orders
from ganger.training.image_io import ImagePlan, OpenImage, host_view, plan_image, read_tensors
from ganger.training.sharded_reading import LaidOutAs, read_state, reshard, whole_shape
from ganger.training.state_codec import (
    StateNotSupportedError,
    TensorRef,
    TensorTable,
    decode,
    device_model,
    encode,
    local_part,
    notice_of_change,
)


def capture_random(has_devices: bool = True) -> dict[str, Any]:
    """Python's, numpy's (if imported), torch's on the CPU and, if wanted, on every device in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": generator_bytes(torch.get_rng_state())}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, key, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
        state["numpy"] = (str(name), key.astype("<u4").tobytes(), int(position), int(has_gauss), float(gauss))
    if has_devices and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count())
        state["cuda"] = [generator_bytes(torch.cuda.get_rng_state(device)) for device in devices]
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Generators the state knows nothing of are left alone."""
    random.setstate(state["python"])
    torch.set_rng_state(generator_tensor(state["torch"]))
    if "numpy" in state:
        import numpy

        name, key, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(key, dtype="<u4"), position, has_gauss, gauss))
    for device, generator in enumerate(state.get("cuda", ())):
        if torch.cuda.is_available() and device < torch.cuda.device_count():
            torch.cuda.set_rng_state(generator_tensor(generator), device)


def generator_bytes(state: torch.Tensor) -> bytes:
    return bytes(host_view(state.cpu().contiguous()))


def generator_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


class StateMismatchError(Exception):
    """The saved state does not fit what the script has built."""


@dataclass
class TrainingObjects:
    """Everything of a script that a checkpoint must hold, by name."""

    models: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    scalers: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    # The models have some parameters of larger ones; other ranks keep the others.
    is_shard: bool = False


@dataclass(frozen=True)
class Captured:
    """`tree` is tagged JSON over `tensors`; the first `live` of them belong to the script, the others are copies.

    `layouts`: of those that are parts of sharded tensors, by index."""

    tree: Any
    tensors: tuple[torch.Tensor, ...]
    live: int
    layouts: dict[int, dict[str, Any]] = field(default_factory=dict)

    def plan(self, **facts: int) -> ImagePlan:
        return plan_image(self.tree, self.tensors, self.layouts, **facts)


@dataclass(frozen=True)
class Restored:
    """What `restore` leaves to its caller: setting the generators, where to continue, objects not registered yet."""

    step: int
    # Whose image it was, of how many ranks.
    rank: int
    world: int
    position: dict[str, Any]
    random: dict[str, Any]
    unclaimed: dict[str, Any]
    # What the user is to be told of it; empty for nothing.
    notice: str = ""


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The script's own module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def capture(training: TrainingObjects, position: dict[str, Any]) -> Captured:
    """Return the state of training. Raises StateNotSupportedError, which names the value without a portable form.

    Gradients that are not None are part of the state: the script may still add to them.
    """
    for module in (module for model in training.models.values() for module in model.modules()):
        # FSDP2 gives back parameters that an evaluation has left gathered: the next pass gathers them again.
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()  # type: ignore[operator]
    table = TensorTable()
    tree: dict[str, Any] = {
        "models": {name: _encode_model(unwrapped(model), table, name) for name, model in training.models.items()},
        "optimizers": {
            name: _encode_optimizer(optimizer, table, name) for name, optimizer in training.optimizers.items()
        },
        "objects": {name: _encode_object(item, table, name) for name, item in training.objects.items()},
    }
    if training.is_shard:
        for name, names in optimized_names(training).items():
            tree["optimizers"][name]["names"] = names
    live = len(table.tensors)
    for kind, items in (("scheduler", training.schedulers), ("scaler", training.scalers)):
        tree[f"{kind}s"] = {name: encode(item.state_dict(), table, f"{kind} {name}") for name, item in items.items()}
    tree["random"] = encode(capture_random(), table, "random")
    tree["position"] = encode(position, table, "position")
    tree["buckets"] = bucket_orders()
    return Captured(tree, tuple(table.tensors), live, table.layouts)


def position_of(image: OpenImage) -> dict[str, Any]:
    """The position alone, which needs no tensors. Raises StateMismatchError."""
    try:
        position: dict[str, Any] = decode(image.tree["position"], TensorRef)
    except (ValueError, KeyError, TypeError) as error:
        raise StateMismatchError(f"the saved position cannot be read: {error}") from error
    return position


def restore(
    training: TrainingObjects,
    image: OpenImage,
    shard: Callable[[int], OpenImage] | None = None,
    ranks: Sequence[int] = (),
) -> Restored:
    """Put the image's state into the script's objects. The random generators are left alone.

    `shard` opens the image of any rank of the same checkpoint: parts of sharded tensors are put together from all of
    them, or from those of `ranks`, where the number of ranks is another one. Raises StateMismatchError, ImageError,
    OSError. After an error the objects hold a mixture: the process must end.
    """
    try:
        saved = decode(image.tree, TensorRef)
        tensors = read_state(
            image.header["tensors"],
            dict(_destinations(training, saved, image)),
            dict(_beside_parameters(training, saved)),
            lambda plain, skipped: read_tensors(image, plain, lambda kind: device_for(training, kind), skipped),
            lambda parts: reshard(image, parts, shard, ranks),
        )
        return restored_of(training, image, decode(image.tree, tensors.__getitem__), tensors.values())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise StateMismatchError(f"the saved state does not fit this script: {error}") from error


def restored_of(
    training: TrainingObjects, image: OpenImage, state: dict[str, Any], tensors: Iterable[torch.Tensor]
) -> Restored:
    """Put a decoded state, that of an image, into the script's objects. `tensors`: those whose device is compared."""
    apply_state(training, state)
    begin_with(image.tree.get("buckets", ()))
    unclaimed = {name: item for name, item in state["objects"].items() if name not in training.objects}
    notice = notice_of_change(str(image.header.get("device_model", "")), device_model(tensors))
    rank, world = int(image.header["rank"]), int(image.header["world"])
    return Restored(image.step, rank, world, state["position"], state["random"], unclaimed, notice)


def optimized_names(training: TrainingObjects) -> dict[str, list[str]]:
    """Return the names of each optimizer's parameters, in its order: that of the model, and that in the model."""
    names = {
        id(parameter): f"{name}.{path}"
        for name, model in training.models.items()
        for path, parameter in unwrapped(model).named_parameters(remove_duplicate=False)
    }
    return {
        name: [names[id(one)] for one in parameters_of(optimizer)] for name, optimizer in training.optimizers.items()
    }


# -- models


def _own_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Parameters and buffers, persistent or not, under every name they have."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield (f"{prefix}.{name}" if prefix else name), module, name, tensor


def _encode_model(model: torch.nn.Module, table: TensorTable, name: str) -> Any:
    tensors, grads = {}, {}
    for path, _, _, tensor in _own_tensors(model):
        if torch.nn.parameter.is_lazy(tensor):
            raise StateNotSupportedError(f"{name}.{path}: not initialized yet; run one batch through the model first")
        tensors[path] = encode(tensor, table, f"{name}.{path}")
        if tensor.grad is not None:
            grads[path] = encode(tensor.grad, table, f"{name}.{path}.grad")
    extra = {
        path: encode(module.get_extra_state(), table, f"{name}.{path} extra state")
        for path, module in model.named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    }
    return {"tensors": tensors, "gradients": grads, "extra": extra}


def _model_destinations(
    model: torch.nn.Module, saved: dict[str, Any], image: OpenImage, name: str
) -> Iterator[tuple[int, torch.Tensor]]:
    own = {path: tensor for path, _, _, tensor in _own_tensors(model)}
    if own.keys() != saved["tensors"].keys():
        odd = sorted(own.keys() ^ saved["tensors"].keys())
        raise StateMismatchError(f"model {name}: {', '.join(odd[:5])} is only in one of the script and the saved state")
    for path, reference in saved["tensors"].items():
        tensor = own[path]
        if torch.nn.parameter.is_lazy(tensor):
            lazy: Any = tensor
            lazy.materialize(tuple(whole_shape(image.header["tensors"][reference.index])))
        yield reference.index, tensor


def _apply_model(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    for path, module, leaf, tensor in _own_tensors(model):
        value = saved["tensors"][path]
        if local_part(value).data_ptr() != local_part(tensor).data_ptr():
            # Tied when saved, apart now: both get the value.
            with torch.no_grad():
                getattr(module, leaf).copy_(value)
        is_trained = isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
        if is_trained and saved["gradients"] is not None:
            gradient = saved["gradients"].get(path)
            tensor.grad = None if gradient is None else gradient.to(tensor.device)
    modules = dict(model.named_modules())
    for path, extra in saved["extra"].items():
        modules[path].set_extra_state(extra)


# -- optimizers


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _encode_optimizer(optimizer: torch.optim.Optimizer, table: TensorTable, name: str) -> Any:
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        # A format of its own.
        return {"own": encode(optimizer.state_dict(), table, f"optimizer {name}")}
    numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    options = [{key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups]
    groups = [encode(group, table, f"optimizer {name} group") for group in options]
    state = []
    for key, value in optimizer.state.items():
        number = numbers.get(id(key)) if isinstance(key, torch.Tensor) else encode([key], table, "key")
        if number is not None:
            state.append([number, encode(value, table, f"optimizer {name} state of parameter {number}")])
    return {"groups": groups, "sizes": [len(group["params"]) for group in optimizer.param_groups], "state": state}


def _optimizer_destinations(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], image: OpenImage, name: str
) -> Iterator[tuple[int, torch.Tensor]]:
    if "own" in saved:
        return
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != saved["sizes"]:
        raise StateMismatchError(f"optimizer {name}: groups of {sizes} parameters, saved with {saved['sizes']}")
    parameters = parameters_of(optimizer)
    for number, values in saved["state"]:
        present = optimizer.state.get(parameters[number]) if isinstance(number, int) else None
        if not isinstance(present, dict) or not isinstance(values, dict):
            continue
        for key, reference in values.items():
            tensor = present.get(key)
            if isinstance(reference, TensorRef) and isinstance(tensor, torch.Tensor):
                entry = image.header["tensors"][reference.index]
                same = list(tensor.shape) == whole_shape(entry) and str(tensor.dtype) == f"torch.{entry['dtype']}"
                if same and tensor.device.type == entry.get("device", "cpu"):
                    yield reference.index, tensor


def _apply_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    if "own" in saved:
        optimizer.load_state_dict(saved["own"])
        return
    parameters = parameters_of(optimizer)
    # Not load_state_dict: it casts state to the parameter's type and so would lose bits.
    optimizer.state.clear()
    for number, values in saved["state"]:
        if isinstance(number, int):
            optimizer.state[parameters[number]] = _moved_beside(values, parameters[number])
        else:
            optimizer.state[number[0]] = values
    for group, options in zip(optimizer.param_groups, saved["groups"]):
        for key, value in options.items():
            present = group.get(key)
            if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
                present.copy_(value)
            else:
                group[key] = value


def _moved_beside(values: Any, parameter: torch.Tensor) -> Any:
    """State that was on an accelerator goes to its parameter's; state kept on the CPU stays there."""
    if not isinstance(values, dict):
        return values
    beside = {key for key, value in values.items() if isinstance(value, torch.Tensor)}
    beside = {key for key in beside if values[key].device.type == parameter.device.type}
    return {key: value.to(parameter.device) if key in beside else value for key, value in values.items()}


# -- everything else


def _encode_object(item: Any, table: TensorTable, name: str) -> Any:
    if isinstance(item, (torch.Generator, torch.Tensor)):
        return encode(item.get_state() if isinstance(item, torch.Generator) else item, table, name)
    return encode(item.state_dict(), table, f"object {name}")


def apply_object(item: Any, saved: Any) -> None:
    """Put the saved state into a registered object."""
    if isinstance(item, torch.Generator):
        item.set_state(saved.cpu())
    elif isinstance(item, torch.Tensor):
        if local_part(saved).data_ptr() != local_part(item).data_ptr():
            with torch.no_grad():
                item.copy_(saved)
    else:
        item.load_state_dict(saved)


def check_names(training: TrainingObjects, saved: dict[str, Any]) -> None:
    """Raise StateMismatchError unless a saved state is of objects of the same names."""
    for kind in ("models", "optimizers", "schedulers", "scalers"):
        present, names = getattr(training, kind), saved[kind]
        if names.keys() != present.keys():
            raise StateMismatchError(f"{kind}: the script has {sorted(present)}, the saved state {sorted(names)}")


def _destinations(
    training: TrainingObjects, saved: dict[str, Any], image: OpenImage
) -> Iterator[tuple[int, torch.Tensor]]:
    check_names(training, saved)
    for name, model in training.models.items():
        yield from _model_destinations(unwrapped(model), saved["models"][name], image, name)
    for name, optimizer in training.optimizers.items():
        yield from _optimizer_destinations(optimizer, saved["optimizers"][name], image, name)
    for name, item in training.objects.items():
        if isinstance(item, torch.Tensor) and name in saved["objects"]:
            yield saved["objects"][name].index, item


def apply_state(training: TrainingObjects, state: dict[str, Any]) -> None:
    for name, model in training.models.items():
        _apply_model(unwrapped(model), state["models"][name])
    for name, optimizer in training.optimizers.items():
        _apply_optimizer(optimizer, state["optimizers"][name])
    for name, scheduler in training.schedulers.items():
        scheduler.load_state_dict(state["schedulers"][name])
    for name, scaler in training.scalers.items():
        if state["scalers"][name]:
            scaler.load_state_dict(state["scalers"][name])
    for name, item in training.objects.items():
        if name in state["objects"]:
            apply_object(item, state["objects"][name])


def _beside_parameters(training: TrainingObjects, saved: dict[str, Any]) -> Iterator[tuple[int, LaidOutAs]]:
    """Yield what is made anew for parameters, their gradients and the optimizers' state, with the parameter."""
    saved_as: dict[int, int] = {}
    for name, model in training.models.items():
        kept = saved["models"][name]
        for path, _, _, tensor in _own_tensors(unwrapped(model)):
            saved_as[id(tensor)] = kept["tensors"][path].index
            if path in (kept["gradients"] or ()):
                yield kept["gradients"][path].index, LaidOutAs(tensor, saved_as[id(tensor)])
    for name, optimizer in training.optimizers.items():
        parameters = parameters_of(optimizer)
        for number, values in saved["optimizers"][name].get("state", ()):
            parameter = parameters[number] if isinstance(number, int) else None
            if parameter is None or id(parameter) not in saved_as or not isinstance(values, dict):
                continue
            for reference in values.values():
                if isinstance(reference, TensorRef):
                    yield reference.index, LaidOutAs(parameter, saved_as[id(parameter)])


def device_for(training: TrainingObjects, kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    found: torch.Tensor | None = next(
        (p for model in training.models.values() for p in model.parameters() if p.device.type == kind), None
    )
    return torch.device(kind) if found is None else found.device


def named_objects(given: Any, kind: str) -> dict[str, Any]:
    """Return what a script gave for one argument of `attach` by name. TypeError for an object without a state."""
    named: dict[str, Any] = {} if given is None else {kind: given}
    if isinstance(given, dict):
        named = {str(name): item for name, item in given.items()}
    elif isinstance(given, (list, tuple)):
        named = {f"{kind}{number}": item for number, item in enumerate(given)}
    for name, item in named.items():
        if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict"):
            lacks = "which has no state_dict() and load_state_dict()"
            raise TypeError(f"attach: {kind} {name!r} is a {type(item).__name__}, {lacks}")
    return named


class UnclaimedObject:
    """A saved object that the script has not registered yet."""

    def __init__(self, saved: Any) -> None:
        self._saved = saved

    def state_dict(self) -> Any:
        return self._saved
