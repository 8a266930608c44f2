"""What an unmodified script makes: the modules, optimizers, schedulers and scalers that it trains, and saved files.

The order of objects must be the same in every run of the script, as names are numbers in that order. A search of the
heap would find modules too, but takes up to a second in a large program, in every pause.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import time
import weakref
from typing import Any, Callable

import torch

from ganger.training.outside_changes import OutsideChanges
from ganger.training.state import TrainingObjects, unwrapped

VARIABLES_EVERY_S = 1.0


def note_saved_files(is_repeating: Callable[[], bool], outside: OutsideChanges) -> None:
    """Let torch.save and torch.load report their files, which they open in C++; while `is_repeating`, nothing is
    saved: the script would write again what it has written."""
    save, load = torch.save, torch.load

    @functools.wraps(save)
    def noted_save(item: Any, file: Any, *arguments: Any, **options: Any) -> None:
        if is_repeating():
            return
        if isinstance(file, (str, os.PathLike)):
            outside.saved(file)
        save(item, file, *arguments, **options)

    @functools.wraps(load)
    def noted_load(file: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            outside.loaded(file)
        return load(file, *arguments, **options)

    setattr(torch, "save", noted_save)  # noqa: B010 (mypy: an assignment would need its exact type)
    setattr(torch, "load", noted_load)  # noqa: B010


class Discovery:
    """Notes every module, optimizer, scheduler and gradient scaler that is made from now on, in order."""

    def __init__(self) -> None:
        self._modules: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._optimizers: list[weakref.ref[Any]] = []
        self._schedulers: list[weakref.ref[Any]] = []
        self._scalers: list[weakref.ref[Any]] = []

    def watch(self) -> None:
        _note_modules(self._modules)
        schedulers = torch.optim.lr_scheduler
        _note_instances(torch.optim.Optimizer, self._optimizers)
        # Some of torch's never call LRScheduler's own.
        kinds: list[Any] = type.__subclasses__(schedulers.LRScheduler)
        kinds = [kind for kind in kinds if "__init__" in vars(kind)]
        for kind in (schedulers.LRScheduler, *kinds, schedulers.ReduceLROnPlateau):
            _note_instances(kind, self._schedulers)
        scaler = getattr(getattr(torch, "amp", None), "GradScaler", None) or torch.cuda.amp.GradScaler
        _note_instances(scaler, self._scalers)

    @property
    def is_evaluating(self) -> bool:
        """Whether no step can follow now: without gradients, or with no layer that trains."""
        if not torch.is_grad_enabled():
            return True
        # A loss function has no parameters, and is never told to evaluate.
        return not any(module.training for module in list(self._modules.values()) if module._parameters)

    @property
    def has_optimizer(self) -> bool:
        return any(reference() is not None for reference in self._optimizers)

    def training(self) -> TrainingObjects:
        """Return the objects that are alive now."""
        models, trained = self._models()
        is_untrained = any(trained.isdisjoint(map(id, model.parameters())) for model in models)
        if is_untrained or len(_alive(self._optimizers)) > 1:
            # Some of it may be dead and only not collected yet, which would be so in this run and not in the next.
            del models
            gc.collect()
            models, _ = self._models()
        optimizers, schedulers = _alive(self._optimizers), _alive(self._schedulers)
        named = _numbered("model", models)
        loose = _loose_parameters(models, optimizers)
        if loose is not None:
            named["loose"] = loose
        # The state of a SequentialLR or ChainedScheduler has the state of those that it holds.
        inner = {id(item) for holder in schedulers for item in getattr(holder, "_schedulers", ())}
        return TrainingObjects(
            models=named,
            optimizers=_numbered("optimizer", optimizers),
            schedulers=_numbered("scheduler", [item for item in schedulers if id(item) not in inner]),
            scalers=_numbered("scaler", _alive(self._scalers)),
        )

    def _models(self) -> tuple[list[torch.nn.Module], set[int]]:
        """Return the modules with tensors that are part of no other module, and the ids of the trained parameters.

        Trained modules come in the order of their parameters, then the rest. Copies such as moving averages of weights
        change in training without an optimizer, so they belong to the state.
        """
        place: dict[int, int] = {}
        for parameter in _parameters(_alive(self._optimizers)):
            place.setdefault(id(parameter), len(place))

        def key(module: torch.nn.Module) -> tuple[int, str, int]:
            first = min((place.get(id(parameter), len(place)) for parameter in module.parameters()), default=len(place))
            return first, type(module).__qualname__, sum(parameter.numel() for parameter in module.parameters())

        # Scripted ones keep theirs in C++
        modules = [module for module in list(self._modules.values()) if "_modules" in module.__dict__]
        modules = [module for module in modules if not isinstance(module, _Loose)]
        children = {id(child) for module in modules for child in module._modules.values() if child is not None}
        roots = {id(root): root for root in (unwrapped(module) for module in modules if id(module) not in children)}
        owned = [root for root in roots.values() if any(True for _ in (*root.parameters(), *root.buffers()))]
        return sorted(owned, key=key), set(place)


def _numbered(kind: str, items: list[Any]) -> dict[str, Any]:
    return {f"{kind}{number}": item for number, item in enumerate(items)}


def _parameters(optimizers: list[Any]) -> list[Any]:
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def _note_instances(kind: type, found: list[weakref.ref[Any]]) -> None:
    original = kind.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        if not any(reference() is self for reference in found):
            found.append(weakref.ref(self))
        original(self, *arguments, **options)

    kind.__init__ = noted  # type: ignore[misc]


def _alive(references: list[weakref.ref[Any]]) -> list[Any]:
    return [item for item in (reference() for reference in references) if item is not None]


def _note_modules(found: weakref.WeakValueDictionary[int, torch.nn.Module]) -> None:
    """`found` gets each module under its number. Copies and unpickled modules come by __setstate__ alone."""
    numbers = itertools.count()
    for name in ("__init__", "__setstate__"):
        original = getattr(torch.nn.Module, name)

        def noted(self: Any, *arguments: Any, _original: Any = original, **options: Any) -> None:
            if "_modules" not in self.__dict__:
                found[next(numbers)] = self
            _original(self, *arguments, **options)

        setattr(torch.nn.Module, name, functools.wraps(original)(noted))


class _Loose(torch.nn.Module):
    """Made for the state alone."""


def _loose_parameters(models: list[torch.nn.Module], optimizers: list[Any]) -> torch.nn.Module | None:
    """A module of the parameters that belong to none: `torch.optim.SGD([temperature])`."""
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    holder = _Loose()
    for parameter in _parameters(optimizers):
        if id(parameter) not in owned:
            owned.add(id(parameter))
            # As they are: an ordinary tensor that wants a gradient is one too.
            holder._parameters[f"parameter{len(holder._parameters)}"] = parameter
    return holder if holder._parameters else None


def weakly(training: TrainingObjects, tensors: Callable[[], list[torch.Tensor]]) -> Callable[[], TrainingObjects]:
    """Return a function for the objects of `training` that still live: a script may replace its models between runs."""
    models = weakref.WeakValueDictionary(training.models)
    optimizers = weakref.WeakValueDictionary(training.optimizers)
    due = 0.0

    def living() -> TrainingObjects:
        nonlocal due
        now = time.monotonic()
        # Milliseconds: too much for every thousand steps of microseconds.
        objects: dict[str, Any] = {}
        if now >= due:
            due = now + VARIABLES_EVERY_S
            objects = {str(number): tensor for number, tensor in enumerate(tensors())}
        return TrainingObjects(models=dict(models), optimizers=dict(optimizers), objects=objects)

    return living
