"""What an unmodified script keeps beside its models: counters, sums, best values, histories, its random generators.

Looked at are the variables of the frames that lead to the boundary, those of the script's modules, and the attributes
of objects found there, as far as their classes are the script's or of a package that calls its loop (a trainer, a
progress bar); likewise the datasets, samplers and collate functions of loaders, those being read included. Kept is
what has changed since the first loop began. A restart puts that back, and undoes what the repeated bodies of finished
loops have changed meanwhile. What was made before the first loop stays as this process made it: descriptors, ports and
process ids are not those of the process before.

What cannot be kept (`ForeignValue`) must not have changed. Not seen: what stands half computed in an expression
(the first of `fit(a) + fit(b)`), and what is taken for data: large arrays and long lists while their length stays what
it was.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, Callable

import torch

from ganger.training.script_frames import frames, is_own, live_names, package_of
from ganger.training.script_values import (
    GENERATOR,
    MAPPINGS,
    SCALARS,
    ForeignValue,
    changed_setting,
    copied,
    digest,
    has_arrays,
    image,
    is_at_its_end,
    is_copy,
    is_data,
    is_harmless,
    is_passing,
    is_plain,
    is_same,
    kept,
    own_thread,
    packed,
    set_generator,
    settings_of_process,
    tensors_in,
    unpacked,
)
from ganger.training.state_codec import StateNotSupportedError

# A script with more than that is not understood; the figure bounds the time a suspend may take.
MOST_VALUES = 500_000

_OPAQUE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_LOADER_PARTS = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator")
# Samplers of these count and draw.
_SAMPLER_PACKAGES = ("accelerate", "transformers", "lightning", "pytorch_lightning")
# A metric's counts, beside the values that its name stands for.
_OF_METRICS = ("_update_count", "_update_called", "_computed", "_forward_cache", "_is_synced")
# Of an optimizer, what its state has.
_OF_OPTIMIZERS = ("state", "param_groups", "defaults")
_DEFAULTS = ("__defaults__", "__kwdefaults__")
# Of the standard library, these hold what their user puts there.
_BAGS = ("argparse.Namespace", "types.SimpleNamespace")


class Variables:
    """The plain values of one script, against those at the beginning of its first loop. `loaders` returns those
    that are being read, by the number of the loop: no other object may refer to them."""

    def __init__(self, loaders: Callable[[], list[tuple[Any, Any]]] = list) -> None:
        self._loaders = loaders
        # Whether the first loop has begun.
        self.noted = False
        self._before: dict[str, dict[Any, Any]] = {}
        self._foreign: dict[tuple[str, Any], ForeignValue] = {}
        self._held: dict[str, int] = {}
        self._settings: dict[str, Any] = {}
        # Digests of lists, arrays and generators at the beginning of the first loop, by which another process finds out
        # whether it has made the same.
        self.made: dict[str, int] = {}

    def _look(self) -> list[Scope]:
        """Every scope once, in an order that is the same whenever the script comes to the same place."""
        found = frames()[::-1]
        packages = {package_of(frame.f_globals.get("__name__")) for frame in found} | {"__main__", "tqdm"}
        return with_inner([*scopes_of_script(found), Scope("loaders", self._loaders(), refuse)], packages)

    def note(self) -> None:
        """Record the values at the beginning of the first loop, for `changed`. Raises StateNotSupportedError."""
        self.noted = True
        scopes = self._look()
        self._before = {scope.path: {name: image(value) for name, value in scope.plain()} for scope in scopes}
        self._foreign = {(scope.path, name): ForeignValue(value) for scope in scopes for name, value in scope.foreign}
        self._held = {scope.path: len(scope.items) for scope in scopes}
        self._settings = settings_of_process(_modules())
        self.made = {
            f"{scope.path} {name}": found
            for scope in scopes
            for name, value in scope.plain()
            if not scope.is_dead and scope.is_live(name) and (found := digest(value)) is not None
        }

    def lost(self) -> str:
        """Return what a second run would lose, as it cannot be kept; '' if nothing. Raises StateNotSupportedError."""
        if reason := changed_setting(self._settings, settings_of_process(_modules())) or own_thread():
            return reason
        for scope in self._look():
            if scope.is_dead or scope.is_data:
                continue
            outer, _, name = scope.path.rpartition(".")
            held = self._held.get(scope.path)
            if scope.is_growing and scope.items and held != len(scope.items):
                return f"it adds objects to {_shown(outer, name)}, which cannot be kept"
            if held is None and name in self._before.get(outer, {}):
                return f"it sets {_shown(outer, name)} to an object, which cannot be kept"
            for name, value in scope.foreign:
                before = self._foreign.get((scope.path, name))
                if not (before.is_same(value) if before is not None else is_at_its_end(value)):
                    return f"it changes {_shown(scope.path, name)} ({type(value).__qualname__}), which cannot be kept"
        return ""

    def changed(self) -> dict[str, dict[Any, Any]]:
        """Return changed values by scope and name, for `codec.encode`. Raises StateNotSupportedError."""
        found: dict[str, dict[Any, Any]] = {}
        for scope in self._look():
            before = self._before.get(scope.path, {})
            for name, value in scope.plain():
                if name in before and is_same(before[name], value):
                    continue
                is_passing = name not in before and scope.takes_for_passing(name, value)
                if not is_passing and is_plain(value, whole=True):
                    found.setdefault(scope.path, {})[name] = kept(value)
        return found

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the changed values, which add to the size of the state."""
        try:
            return list(tensors_in(self.changed())) if self.noted else []
        except StateNotSupportedError:
            return []

    def made_otherwise(self, made: dict[str, int]) -> str:
        """Return the name of a value that was another one when the first loop of the saved process began; '' if none
        was. `made`: of that process."""
        name = min((name for name, found in self.made.items() if made.get(name, found) != found), default="")
        return _shown(*name.rsplit(" ", 1)) if name else ""

    def put_back(self, saved: dict[str, dict[Any, Any]]) -> str:
        """Make every value what it was where `changed` was called. To be called from the same place of the script.

        Returns the name of an object that is missing there; '' if none is."""
        done: set[str] = set()
        while True:
            # Again, as a value that is put back may hold others.
            scopes = [scope for scope in self._look() if scope.path not in done]
            if not scopes:
                missing = min(saved.keys() - done, default="")
                return missing.partition(".")[2]
            for scope in scopes:
                done.add(scope.path)
                present = dict(scope.plain())
                before, wanted = self._before.get(scope.path, {}), saved.get(scope.path, {})
                for name, value in wanted.items():
                    scope.put(name, value, present.get(name))
                for name in present.keys() & before.keys() - wanted.keys():
                    if is_copy(before[name]) and not is_same(before[name], present[name]):
                        scope.put(name, before[name], present[name])


def state_of_loader(loader: Any) -> dict[str, dict[Any, Any]]:
    """Return what determines a pass over the loader: the counters, orders and generators of its parts, without the
    samples. There are no tensors in it: it is needed before they are there."""
    return {
        scope.path: {name: packed(kept(value)) for name, value in scope.plain() if not scope.takes_for_samples(value)}
        for scope in _scopes_of_loader(loader)
    }


def set_state_of_loader(loader: Any, saved: dict[str, dict[Any, Any]]) -> None:
    """Make the loader one whose next pass is that before which `state_of_loader` was called."""
    for scope in _scopes_of_loader(loader):
        present = dict(scope.plain())
        for name, value in saved.get(scope.path, {}).items():
            scope.put(name, unpacked(value), present.get(name))


@dataclasses.dataclass(eq=False)
class Scope:
    """Something with named values: a frame, a module, an object, a list or dictionary that holds objects.

    Of a frame, the variables in `live` are still needed; what only the others lead to is dead. Large new values of a
    loader are data. `foreign` are the values that cannot be kept. A growing one holds objects by position.
    """

    path: str
    items: list[tuple[Any, Any]]
    setter: Callable[[Any, Any], None]
    live: frozenset[str] | None = None
    is_data: bool = False
    is_growing: bool = False
    is_dead: bool = False
    foreign: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def plain(self) -> Iterator[tuple[Any, Any]]:
        return ((name, value) for name, value in self.items if is_plain(value))

    def is_live(self, name: Any) -> bool:
        return self.live is None or name in self.live

    def takes_for_passing(self, name: Any, value: Any) -> bool:
        """Return whether training needs no value of this kind that appeared after the first loop began."""
        return (not self.is_live(name) and is_passing(value)) or (self.is_data and is_data(value))

    def takes_for_samples(self, value: Any) -> bool:
        """Return whether a loader's part does not draw its order from it."""
        is_dataset = ".dataset" in self.path or ".data_source" in self.path
        return is_data(value) or (is_dataset and has_arrays(value))

    def put(self, name: Any, value: Any, present: Any) -> None:
        """Set a value, in place where possible: other objects may refer to the same list."""
        if isinstance(value, dict) and GENERATOR in value:
            set_generator(present, value[GENERATOR])
        elif type(present) is type(value) and isinstance(value, (list, collections.deque)):
            present.clear()
            present.extend(copied(value))
        elif isinstance(present, dict if isinstance(value, dict) else set) and isinstance(value, (dict, set)):
            present.clear()
            present.update(copied(value))
        else:
            self.setter(name, copied(value))


# -- where values are


def scopes_of_script(running: list[Any]) -> list[Scope]:
    """Return the variables of these frames, the outermost first, and of the script's modules."""
    found: list[Scope] = []
    for number, frame in enumerate(running):
        if frame.f_locals is not frame.f_globals:
            path = f"{number} {frame.f_code.co_name}"
            live = live_names(frame.f_code, frame.f_lasti)
            found.append(Scope(path, list(frame.f_locals.items()), _local_setter(frame), live=live))
    for name, module in sorted(_modules().items()):
        content = vars(module)
        items = [(key, value) for key, value in content.items() if not key.startswith("__")]
        live_now = [live_names(frame.f_code, frame.f_lasti) for frame in running if frame.f_locals is content]
        live_here = frozenset().union(*live_now) if live_now else None
        found.append(Scope(f"module {name}", items, content.__setitem__, live=live_here))
    return found


def _scopes_of_loader(loader: Any) -> list[Scope]:
    return with_inner([Scope("loader", [(0, loader)], refuse)], {"__main__", *_SAMPLER_PACKAGES})


def with_inner(outer: list[Scope], packages: set[str], skipped: frozenset[int] = frozenset()) -> list[Scope]:
    """These scopes and those in objects of these packages, without `skipped` ids. Raises StateNotSupportedError."""
    found: list[Scope] = []
    seen: set[int] = set(skipped)
    open_ = collections.deque(outer)
    left_over: list[tuple[Scope, Any, Any]] = []
    values = 0

    def look(scope: Scope, name: Any, value: Any) -> None:
        if type(value) is types.MethodType:
            value = value.__self__
        if isinstance(value, SCALARS) or id(value) in seen or is_plain(value):
            return
        inner = _inside(f"{scope.path}.{name}", value, packages)
        is_dead = scope.is_dead or not scope.is_live(name)
        if inner is not None:
            inner.is_data |= scope.is_data
            inner.is_dead = is_dead
            seen.add(id(value))
            open_.append(inner)
        # A generator that leads to the boundary: its variables are looked at as a frame's.
        elif not (is_dead or scope.is_data or is_harmless(value) or _is_running(value)):
            scope.foreign.append((name, value))

    while open_:
        scope = open_.popleft()
        found.append(scope)
        values += len(scope.items)
        if values > MOST_VALUES:
            raise StateNotSupportedError(f"it keeps more than {MOST_VALUES} values in variables and objects of its own")
        for name, value in scope.items:
            if scope.is_live(name):
                look(scope, name, value)
            else:
                left_over.append((scope, name, value))
        if not open_:
            # Last, so that what is needed too is found by the way by which it is.
            for each in left_over:
                look(*each)
            left_over.clear()
    return found


def _modules() -> dict[str, types.ModuleType]:
    return {name: module for name, module in list(sys.modules.items()) if is_own(name)}


def _inside(path: str, value: Any, packages: set[str]) -> Scope | None:
    if type(value) in (list, tuple):
        setter = value.__setitem__ if type(value) is list else refuse
        return Scope(path, list(enumerate(value)), setter, is_growing=type(value) is list)
    if type(value) in MAPPINGS:
        items = [(k, v) for k, v in value.items() if type(k) in (str, int)]
        is_growing = len(items) < len(value) or not all(type(k) is str for k, _ in items)
        return Scope(path, items, value.__setitem__, is_growing=is_growing)
    kind = type(value)
    if kind is types.FunctionType:
        return _inside_function(path, value) if is_own(value.__module__) else None
    if kind is functools.partial:
        held: list[tuple[Any, Any]] = [("func", value.func), *enumerate(value.args), ("keywords", value.keywords)]
        return Scope(path, held, refuse)
    if isinstance(value, type):
        if not is_own(value.__module__) or issubclass(value, enum.Enum):
            return None
        items = [(name, item) for name, item in vars(value).items() if not name.startswith(("__", "_abc_"))]
        return Scope(path, items, lambda name, item: setattr(value, name, item))
    if isinstance(value, torch.optim.Optimizer) and is_own(kind.__module__):
        # Its state and its groups are part of the state of training.
        own = [(name, item) for name, item in vars(value).items() if name[0] != "_" and name not in _OF_OPTIMIZERS]
        return Scope(path, [*own, ("__class__", kind)], vars(value).__setitem__)
    if isinstance(value, (types.ModuleType, enum.Enum, *_OPAQUE)) or not hasattr(value, "__dict__"):
        return None
    if isinstance(value, torch.nn.Module):
        # Its tensors are part of the model's state.
        keys = [] if package_of(kind.__module__) == "torch" else list(vars(value))
        items = [(name, vars(value)[name]) for name in keys if not name.startswith("_") or name in _OF_METRICS]
        items += [("_modules", dict(value._modules)), ("__class__", kind)]
        return Scope(path, items, vars(value).__setitem__)
    if isinstance(value, torch.utils.data.DataLoader):
        parts = _LOADER_PARTS if package_of(kind.__module__) == "torch" else tuple(vars(value))
        items = [(name, vars(value)[name]) for name in parts if not name.startswith("_")]
        return Scope(path, items, vars(value).__setitem__, is_data=True)
    is_known = kind.__module__.startswith("torch.utils.data.") or package_of(kind.__module__) in packages
    if is_known or is_own(kind.__module__) or f"{kind.__module__}.{kind.__qualname__}" in _BAGS:
        return Scope(path, [*vars(value).items(), ("__class__", kind)], vars(value).__setitem__)
    return None


def _inside_function(path: str, function: Any) -> Scope:
    """Variables that it shares with the function around it, its attributes, and what its defaults hold."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    items = [(name, cell.cell_contents) for name, cell in cells.items() if cell != types.CellType()]
    items += [(name, item) for name, item in vars(function).items() if name not in cells]
    items += [(name, item) for name in _DEFAULTS if (item := getattr(function, name))]

    def put(name: Any, item: Any) -> None:
        holder: Any = cells.get(name, function)
        setattr(holder, "cell_contents" if name in cells else name, item)

    return Scope(path, items, put)


def _shown(scope: str, name: Any) -> str:
    """A variable as the script calls it, nearly: the frame or the module does not matter."""
    _, _, inner = scope.partition(".")
    return f"{inner}.{name}" if inner else str(name)


def refuse(name: Any, value: Any) -> None:
    """A tuple cannot be changed, so it was not."""


def _local_setter(frame: Any) -> Callable[[Any, Any], None]:
    def put(name: Any, value: Any) -> None:
        frame.f_locals[name] = value
        if sys.version_info < (3, 13) and sys.implementation.name == "cpython":
            # Until 3.13 f_locals is a copy.
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    return put


def _is_running(value: Any) -> bool:
    # An object that answers everything is no generator.
    return isinstance(value, types.GeneratorType) and value.gi_running
