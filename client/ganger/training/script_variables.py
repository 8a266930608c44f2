"""What an unmodified script keeps beside its models: counters, sums, best values, histories, its random generators.

Looked at are the variables of the frames that lead to the boundary, those of the script's modules, and the attributes
of objects found there, as far as their classes are the script's or of a package that calls its loop (a trainer, a
progress bar); likewise the datasets, samplers and collate functions of loaders, those being read included. Kept is
what has changed since the first loop began. A restart puts that back, and undoes what the repeated bodies of finished
loops have changed meanwhile. What was made before the first loop stays as this process made it: descriptors, ports and
process ids are not those of the process before.

Not seen: values inside of generators and functions that are not running, objects without a __dict__, what stands half
computed in an expression (the first of `fit(a) + fit(b)`), and what is taken for data: large arrays (see below)
and long lists while their length stays what it was.
"""

from __future__ import annotations

import collections
import ctypes
import random
import sys
import types
import weakref
import zlib
from collections.abc import Iterator
from typing import Any, Callable

import torch

from ganger.training.replay import is_own, package_of
from ganger.training.state import generator_bytes, generator_tensor
from ganger.training.state_codec import StateNotSupportedError

# A script with more than that is not understood; the figure bounds the time a suspend may take.
MOST_VALUES = 500_000
LARGEST_ARRAY_BYTES = 64 << 20
LARGEST_LIST = 20_000
# A large tensor that every step replaces is a batch or an activation, and is not used after the boundary.
LARGEST_PASSING_BYTES = 1 << 20

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_KEYS = (str, int, float, bool, tuple, type(None))
_OPAQUE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_LOADER_PARTS = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator")
# Of the standard library, these hold what their user puts there.
_BAGS = ("argparse.Namespace", "types.SimpleNamespace")
_GENERATOR = "$generator"
_ARRAY = "$array"


class Variables:
    """The plain values of one script, against those at the beginning of its first loop. `loaders` returns those
    that are being read, by the number of the loop: no other object may refer to them."""

    def __init__(self, loaders: Callable[[], list[tuple[int, Any]]] = list) -> None:
        self._loaders = loaders
        self._before: dict[str, dict[Any, Any]] | None = None

    @property
    def noted(self) -> bool:
        return self._before is not None

    def note(self) -> None:
        """Record the values at the beginning of the first loop, for `changed` to compare with. Raises
        StateNotSupportedError."""
        self._before = {}
        scopes = _scopes(self._loaders())
        self._before = {scope.path: {name: _image(value) for name, value in scope.plain()} for scope in scopes}

    def changed(self) -> dict[str, dict[Any, Any]]:
        """Return changed values by scope and name, of the kinds that `codec.encode` takes. Raises
        StateNotSupportedError."""
        assert self._before is not None, "noted when the first loop began"
        found: dict[str, dict[Any, Any]] = {}
        for scope in _scopes(self._loaders()):
            before = self._before.get(scope.path, {})
            for name, value in scope.plain():
                if name in before and _is_same(before[name], value):
                    continue
                is_passing = name not in before and scope.takes_for_passing(value)
                if not is_passing and _is_plain(value, whole=True):
                    found.setdefault(scope.path, {})[name] = _kept(value)
        return found

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the changed values, which add to the size of the state."""
        try:
            return list(_tensors_in(self.changed())) if self.noted else []
        except StateNotSupportedError:
            return []

    def put_back(self, saved: dict[str, dict[Any, Any]]) -> None:
        """Make every value what it was where `changed` was called. To be called from the same place of the script."""
        assert self._before is not None, "noted when the first loop began"
        done: set[str] = set()
        while True:
            # again, as a value that is put back may hold others
            scopes = [scope for scope in _scopes(self._loaders()) if scope.path not in done]
            if not scopes:
                return
            for scope in scopes:
                done.add(scope.path)
                present = dict(scope.plain())
                before, wanted = self._before.get(scope.path, {}), saved.get(scope.path, {})
                for name, value in wanted.items():
                    scope.put(name, value, present.get(name))
                for name in present.keys() & before.keys() - wanted.keys():
                    if _is_copy(before[name]) and not _is_same(before[name], present[name]):
                        scope.put(name, before[name], present[name])


def state_of_loader(loader: Any) -> dict[str, dict[Any, Any]]:
    """Return what determines a pass over the loader: the counters, orders and generators of its parts, without the
    samples. There are no tensors in it: it is needed before they are there."""
    return {
        scope.path: {name: _packed(_kept(value)) for name, value in scope.plain() if not scope.takes_for_samples(value)}
        for scope in _scopes_of_loader(loader)
    }


def set_state_of_loader(loader: Any, saved: dict[str, dict[Any, Any]]) -> None:
    """Make the loader one whose next pass is that before which `state_of_loader` was called."""
    for scope in _scopes_of_loader(loader):
        present = dict(scope.plain())
        for name, value in saved.get(scope.path, {}).items():
            scope.put(name, _unpacked(value), present.get(name))


class _Scope:
    """Something with named values: a frame, a module, an object, a list or dictionary that holds objects.

    Of a frame or a module large new tensors are passing (`is_passing`); a loader's are data (`is_data`).
    """

    def __init__(
        self,
        path: str,
        items: list[tuple[Any, Any]],
        set_: Callable[[Any, Any], None],
        *,
        is_passing: bool = False,
        is_data: bool = False,
    ) -> None:
        self.path = path
        self.items = items
        self.is_passing = is_passing
        self.is_data = is_data
        self._set = set_

    def plain(self) -> Iterator[tuple[Any, Any]]:
        return ((name, value) for name, value in self.items if _is_plain(value))

    def takes_for_passing(self, value: Any) -> bool:
        """Return whether training needs no value of this kind that appeared after the first loop began."""
        return (self.is_passing and _is_passing(value)) or (self.is_data and _is_data(value))

    def takes_for_samples(self, value: Any) -> bool:
        """Return whether a loader's part does not draw its order from it."""
        is_dataset = ".dataset" in self.path or ".data_source" in self.path
        return _is_data(value) or (is_dataset and any(True for _ in _arrays_in(value)))

    def put(self, name: Any, value: Any, present: Any) -> None:
        """Set a value, in place where possible: other objects may refer to the same list."""
        if isinstance(value, dict) and _GENERATOR in value:
            _set_generator(present, value[_GENERATOR])
        elif type(present) is type(value) and isinstance(value, (list, collections.deque)):
            present.clear()
            present.extend(_copied(value))
        elif isinstance(present, dict if isinstance(value, dict) else set) and isinstance(value, (dict, set)):
            present.clear()
            present.update(_copied(value))
        else:
            self._set(name, _copied(value))


# -- where values are


def _scopes(loaders: list[tuple[int, Any]]) -> list[_Scope]:
    """Every scope once, in an order that is the same whenever the script comes to the same place."""
    frames = _frames()
    packages = {package_of(frame.f_globals.get("__name__")) for frame in frames} | {"__main__"}
    open_: list[_Scope] = []
    for number, frame in enumerate(frames):
        if frame.f_locals is not frame.f_globals:
            path = f"{number} {frame.f_code.co_name}"
            open_.append(_Scope(path, list(frame.f_locals.items()), _local_setter(frame), is_passing=True))
    for name, module in sorted(_modules().items()):
        content = vars(module)
        items = [(key, value) for key, value in content.items() if not key.startswith("__")]
        open_.append(_Scope(f"module {name}", items, content.__setitem__, is_passing=True))
    open_.append(_Scope("loaders", list(loaders), _refuse))
    return _with_inner(open_, packages)


def _scopes_of_loader(loader: Any) -> list[_Scope]:
    return _with_inner([_Scope("loader", [(0, loader)], _refuse)], {"__main__"})


def _with_inner(outer: list[_Scope], packages: set[str]) -> list[_Scope]:
    """These scopes and all that are to be found in them. Raises StateNotSupportedError."""
    found: list[_Scope] = []
    seen: set[int] = set()
    open_ = collections.deque(outer)
    values = 0
    while open_:
        scope = open_.popleft()
        found.append(scope)
        values += len(scope.items)
        if values > MOST_VALUES:
            raise StateNotSupportedError(f"it keeps more than {MOST_VALUES} values in variables and objects of its own")
        for name, value in scope.items:
            if isinstance(value, _SCALARS) or id(value) in seen or _is_plain(value):
                continue
            inner = _inside(f"{scope.path}.{name}", value, packages)
            if inner is not None:
                inner.is_data |= scope.is_data
                seen.add(id(value))
                open_.append(inner)
    return found


def _frames() -> list[Any]:
    """The script's frames on the way to here, the outermost first."""
    frame: Any = sys._getframe(1)
    found = []
    while frame is not None:
        if package_of(frame.f_globals.get("__name__")) not in ("ganger", "torch"):
            found.append(frame)
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
                break
        frame = frame.f_back
    return found[::-1]


def _modules() -> dict[str, types.ModuleType]:
    """Return the modules of the script by name: neither installed nor of the standard library."""
    return {name: module for name, module in list(sys.modules.items()) if is_own(name)}


def _inside(path: str, value: Any, packages: set[str]) -> _Scope | None:
    """The scope that `value` opens, if it is one to look into."""
    if type(value) in (list, tuple):
        setter = value.__setitem__ if type(value) is list else _refuse
        return _Scope(path, list(enumerate(value)), setter)
    if type(value) in _MAPPINGS:
        return _Scope(path, [(k, v) for k, v in value.items() if type(k) in (str, int)], value.__setitem__)
    kind = type(value)
    if kind is types.MethodType:
        return _inside(path, value.__self__, packages)
    if isinstance(value, (type, types.ModuleType, *_OPAQUE)) or not hasattr(value, "__dict__"):
        return None
    if isinstance(value, torch.nn.Module):
        # its tensors are part of the model's state
        names = [] if package_of(kind.__module__) == "torch" else list(vars(value))
        items = [(name, vars(value)[name]) for name in names if not name.startswith("_")]
        return _Scope(path, [*items, ("_modules", dict(value._modules))], vars(value).__setitem__)
    if isinstance(value, torch.utils.data.DataLoader):
        parts = _LOADER_PARTS if package_of(kind.__module__) == "torch" else tuple(vars(value))
        items = [(name, vars(value)[name]) for name in parts if not name.startswith("_")]
        return _Scope(path, items, vars(value).__setitem__, is_data=True)
    is_known = kind.__module__.startswith("torch.utils.data.") or is_own(kind.__module__)
    is_known = is_known or package_of(kind.__module__) in packages
    if is_known or f"{kind.__module__}.{kind.__qualname__}" in _BAGS:
        return _Scope(path, list(vars(value).items()), vars(value).__setitem__)
    return None


def _refuse(name: Any, value: Any) -> None:
    """A tuple cannot be changed, so it was not."""


def _local_setter(frame: Any) -> Callable[[Any, Any], None]:
    def put(name: Any, value: Any) -> None:
        frame.f_locals[name] = value
        if sys.version_info < (3, 13) and sys.implementation.name == "cpython":
            # until 3.13 f_locals is a copy
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    return put


# -- what values are


class _Seen:
    """A tensor or an array as it was, without a copy of it."""

    def __init__(self, value: Any) -> None:
        self._value = weakref.ref(value)
        self._state = _version(value)

    def is_same(self, value: Any) -> bool:
        return self._value() is value and _version(value) == self._state


class _Long:
    """A list that is taken for data."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._length = len(value)

    def is_same(self, value: Any) -> bool:
        return self._value is value and len(value) == self._length


def _version(value: Any) -> Any:
    return value._version if isinstance(value, torch.Tensor) else zlib.crc32(value.tobytes())


def _is_plain(value: Any, whole: bool = False) -> bool:
    """Return whether the value can be kept: no objects anywhere in it. Long lists are believed to be, unless looked at
    as a whole."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind in _SEQUENCES:
        return (_is_long(value) and not whole) or all(_is_plain(item, whole) for item in value)
    if kind in _MAPPINGS:
        if _is_long(value) and not whole:
            return True
        return all(type(key) in _KEYS and _is_plain(item, whole) for key, item in value.items())
    if kind is torch.Tensor:
        is_ordinary = value.layout == torch.strided and not value.is_quantized and value.device.type != "meta"
        return is_ordinary and (value.grad_fn is None or value.numel() == 1)
    return _is_array(value) or _is_generator(value)


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.generic, numpy.ndarray)) or value.dtype.hasobject:
        return False
    return isinstance(value, numpy.generic) or (type(value) is numpy.ndarray and value.nbytes <= LARGEST_ARRAY_BYTES)


def _is_generator(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return True
    return type(value) in (random.Random, torch.Generator)


def _is_passing(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() * value.element_size() > LARGEST_PASSING_BYTES


def _arrays_in(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor) or _is_array(value):
        yield value
    elif type(value) in (*_SEQUENCES, *_MAPPINGS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _arrays_in(item)


def _packed(value: Any) -> Any:
    """Return a copy of a value with the bytes of tensors and arrays in their place."""
    if isinstance(value, torch.Tensor):
        return {
            _ARRAY: (str(value.device), str(value.dtype)[len("torch.") :], tuple(value.shape), generator_bytes(value))
        }
    if _is_array(value) and isinstance(value, _mutable_array()):
        return {_ARRAY: ("", value.dtype.str, value.shape, value.tobytes())}
    return _rebuilt(value, _packed)


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict) or _ARRAY not in value:
        return _rebuilt(value, _unpacked)
    device, kind, shape, content = value[_ARRAY]
    if not device:
        numpy: Any = sys.modules["numpy"]
        return numpy.frombuffer(content, dtype=kind).reshape(shape).copy()
    flat = torch.frombuffer(bytearray(content), dtype=getattr(torch, kind)) if content else torch.empty(0)
    return flat.to(getattr(torch, kind)).reshape(shape).to(device)


def _is_data(value: Any) -> bool:
    """Return whether the value is taken for samples, or for a long list of them."""
    if type(value) in (*_SEQUENCES, *_MAPPINGS):
        return _is_long(value) or any(map(_is_data, value.values() if isinstance(value, dict) else value))
    return _is_passing(value) or (_is_array(value) and value.nbytes > LARGEST_PASSING_BYTES)


def _is_long(value: Any) -> bool:
    return len(value) > LARGEST_LIST


def _image(value: Any) -> Any:
    """What to compare with later, and to go back to where that can be: a copy, but of tensors and long lists."""
    if isinstance(value, torch.Tensor) or (_is_array(value) and isinstance(value, _mutable_array())):
        return _Seen(value)
    if type(value) in (*_SEQUENCES, *_MAPPINGS) and _is_long(value):
        return _Long(value)
    if _is_generator(value):
        return {_GENERATOR: _generator_state(value)}
    return _rebuilt(value, _image)


def _mutable_array() -> Any:
    return sys.modules["numpy"].ndarray


def _is_copy(image: Any) -> bool:
    """Return whether a value can be restored from its image."""
    if isinstance(image, dict):
        return all(_is_copy(item) for item in image.values())
    if type(image) in _SEQUENCES:
        return all(_is_copy(item) for item in image)
    return not isinstance(image, (_Seen, _Long))


def _is_same(before: Any, value: Any) -> bool:
    if isinstance(before, (_Seen, _Long)):
        return before.is_same(value)
    if _is_generator(value):
        return isinstance(before, dict) and _is_same_state(before.get(_GENERATOR), _generator_state(value))
    if type(before) is not type(value):
        return False
    if isinstance(value, (list, tuple, collections.deque)) and not isinstance(value, torch.Size):
        return len(before) == len(value) and all(map(_is_same, before, value))
    if isinstance(value, dict):
        return list(before) == list(value) and all(_is_same(before[key], value[key]) for key in value)
    # the same number in another type, or -0.0, is another value
    return bool(before == value) and (not isinstance(value, float) or str(before) == str(value))


def _kept(value: Any) -> Any:
    """Return a value as it is saved: tensors without gradient history, generators as their state."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if _is_generator(value):
        return {_GENERATOR: _generator_state(value)}
    return _rebuilt(value, _kept)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (*_SEQUENCES, *_MAPPINGS) and not _is_long(value):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _copied(value: Any) -> Any:
    return _rebuilt(value, _copied)


def _rebuilt(value: Any, each: Callable[[Any], Any]) -> Any:
    kind: Any = type(value)
    if kind is torch.Size or kind not in (*_SEQUENCES, *_MAPPINGS):
        return value
    if kind is collections.deque:
        return collections.deque((each(item) for item in value), value.maxlen)
    if kind in _SEQUENCES:
        return kind(each(item) for item in value)
    pairs = [(key, each(item)) for key, item in value.items()]
    # by way of a dict: a Counter would count the pairs
    return (
        collections.defaultdict(value.default_factory, pairs) if kind is collections.defaultdict else kind(dict(pairs))
    )


def _is_same_state(before: Any, state: Any) -> bool:
    if isinstance(before, dict) and isinstance(state, dict):
        return all(_is_same_state(before.get(key), state[key]) for key in state)
    # arrays inside, whose == compares elements
    return bool(before.tobytes() == state.tobytes() if hasattr(state, "tobytes") else before == state)


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return generator_bytes(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    bits = getattr(value, "bit_generator", None)
    return value.get_state(legacy=False) if bits is None else bits.state


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(generator_tensor(state))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif generator is not None and hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif generator is not None:
        generator.set_state(state)
