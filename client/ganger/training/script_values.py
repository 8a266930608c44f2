"""The values that an unmodified script keeps and that can be kept for it: numbers, texts, containers of them, tensors,
arrays and random generators.
"""

from __future__ import annotations

import collections
import random
import sys
import weakref
import zlib
from collections.abc import Iterator
from typing import Any, Callable

import torch

from ganger.training.state import generator_bytes, generator_tensor

LARGEST_ARRAY_BYTES = 64 << 20
LARGEST_LIST = 20_000
LARGEST_DIGESTED = 1_000_000
# A large tensor that every step replaces is a batch or an activation, and is not used after the boundary.
LARGEST_PASSING_BYTES = 1 << 20

SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
SEQUENCES = (list, tuple, set, frozenset, collections.deque)
MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
CONTAINERS = (*SEQUENCES, *MAPPINGS)
KEYS = (str, int, float, bool, tuple, type(None))
GENERATOR = "$generator"
ARRAY = "$array"


class SeenValue:
    """A tensor, an array, or a list that is taken for data, as it was, without a copy of it."""

    def __init__(self, value: Any) -> None:
        self._value: Callable[[], Any] = (lambda: value) if type(value) in CONTAINERS else weakref.ref(value)
        self._state = _version(value)

    def is_same(self, value: Any) -> bool:
        return self._value() is value and _version(value) == self._state


def _version(value: Any) -> int:
    if type(value) in CONTAINERS:
        return len(value)
    return int(value._version) if isinstance(value, torch.Tensor) else zlib.crc32(value.tobytes())


def parts_of(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def is_plain(value: Any, whole: bool = False) -> bool:
    """Return whether the value can be kept: no objects anywhere in it, nor at the start of a long list."""
    kind = type(value)
    if kind in SCALARS:
        return True
    if kind in SEQUENCES:
        return (is_long(value) and not whole) or all(is_plain(item, whole) for item in value)
    if kind in MAPPINGS:
        if is_long(value) and not whole:
            return True
        return all(type(key) in KEYS and is_plain(item, whole) for key, item in value.items())
    if kind is torch.Tensor:
        is_ordinary = value.layout == torch.strided and not value.is_quantized and value.device.type != "meta"
        return is_ordinary and (value.grad_fn is None or value.numel() == 1)
    return is_array(value) or is_generator(value)


def is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.generic, numpy.ndarray)) or value.dtype.hasobject:
        return False
    return isinstance(value, numpy.generic) or (type(value) is numpy.ndarray and value.nbytes <= LARGEST_ARRAY_BYTES)


def is_mutable_array(value: Any) -> bool:
    return is_array(value) and not isinstance(value, sys.modules["numpy"].generic)


def is_generator(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return True
    return type(value) in (random.Random, torch.Generator)


def is_passing(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() * value.element_size() > LARGEST_PASSING_BYTES


def has_arrays(value: Any) -> bool:
    if type(value) in CONTAINERS:
        return any(map(has_arrays, parts_of(value)))
    return isinstance(value, torch.Tensor) or is_array(value)


def digest(value: Any) -> int | None:
    """Return a number by which another process recognises lists, arrays and generators. None of single values, as
    process ids and times are others there, and of what is large."""
    kind = type(value)
    if kind in MAPPINGS:
        found = [digest(item) for item in value.values()] if len(value) <= LARGEST_LIST else []
        return zlib.crc32(repr(found).encode()) if any(one is not None for one in found) else None
    if isinstance(value, torch.Tensor):
        is_small = value.device.type == "cpu" and value.numel() * value.element_size() <= LARGEST_PASSING_BYTES
        return zlib.crc32(generator_bytes(value.detach())) if is_small and value.numel() else None
    if is_array(value):
        return zlib.crc32(value.tobytes()) if is_mutable_array(value) else None
    if is_generator(value):
        return zlib.crc32(repr(packed_state(generator_state(value))).encode())
    if kind not in SEQUENCES or len(value) > LARGEST_DIGESTED:
        return None
    parts = (item if type(item) in SCALARS else digest(item) for item in value)
    return zlib.crc32(repr([kind.__name__, *parts]).encode())


def packed_state(state: Any) -> Any:
    """Return the state of a generator with the bytes of arrays in their place."""
    if isinstance(state, dict):
        return {key: packed_state(item) for key, item in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


def packed(value: Any) -> Any:
    """Return a copy of a value with the bytes of tensors and arrays in their place."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype)[len("torch.") :]
        return {ARRAY: (str(value.device), kind, tuple(value.shape), generator_bytes(value))}
    if is_mutable_array(value):
        return {ARRAY: ("", value.dtype.str, value.shape, value.tobytes())}
    return rebuilt(value, packed)


def unpacked(value: Any) -> Any:
    if not isinstance(value, dict) or ARRAY not in value:
        return rebuilt(value, unpacked)
    device, kind, shape, content = value[ARRAY]
    if not device:
        numpy: Any = sys.modules["numpy"]
        return numpy.frombuffer(content, dtype=kind).reshape(shape).copy()
    flat = torch.frombuffer(bytearray(content), dtype=getattr(torch, kind)) if content else torch.empty(0)
    return flat.to(getattr(torch, kind)).reshape(shape).to(device)


def is_data(value: Any) -> bool:
    """Return whether the value is taken for samples, or for a long list of them."""
    if type(value) in CONTAINERS:
        return is_long(value) or any(map(is_data, parts_of(value)))
    return is_passing(value) or (is_array(value) and value.nbytes > LARGEST_PASSING_BYTES)


def is_long(value: Any) -> bool:
    return len(value) > LARGEST_LIST


def image(value: Any) -> Any:
    """What to compare with later, and to go back to where that can be: a copy, but of tensors and long lists."""
    is_long_list = type(value) in CONTAINERS and is_long(value)
    if isinstance(value, torch.Tensor) or is_mutable_array(value) or is_long_list:
        return SeenValue(value)
    if is_generator(value):
        return {GENERATOR: generator_state(value)}
    return rebuilt(value, image)


def is_copy(image: Any) -> bool:
    """Return whether a value can be restored from its image."""
    if isinstance(image, dict) or type(image) in SEQUENCES:
        return all(map(is_copy, parts_of(image)))
    return not isinstance(image, SeenValue)


def is_same(before: Any, value: Any) -> bool:
    if isinstance(before, SeenValue):
        return before.is_same(value)
    if is_generator(value):
        return isinstance(before, dict) and packed_state(before.get(GENERATOR)) == packed_state(generator_state(value))
    if type(before) is not type(value):
        return False
    if type(value) in (list, tuple, collections.deque):
        return len(before) == len(value) and all(map(is_same, before, value))
    if isinstance(value, dict):
        return list(before) == list(value) and all(is_same(before[key], value[key]) for key in value)
    # The same number in another type, or -0.0, is another value.
    return bool(before == value) and (not isinstance(value, float) or str(before) == str(value))


def kept(value: Any) -> Any:
    """Return a value as it is saved: tensors without gradient history, generators as their state."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if is_generator(value):
        return {GENERATOR: generator_state(value)}
    return rebuilt(value, kept)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in CONTAINERS and not is_long(value):
        for item in parts_of(value):
            yield from tensors_in(item)


def copied(value: Any) -> Any:
    return rebuilt(value, copied)


def rebuilt(value: Any, each: Callable[[Any], Any]) -> Any:
    kind: Any = type(value)
    if kind not in CONTAINERS:
        return value
    if kind is collections.deque:
        return collections.deque((each(item) for item in value), value.maxlen)
    if kind in SEQUENCES:
        return kind(each(item) for item in value)
    pairs = [(key, each(item)) for key, item in value.items()]
    if kind is collections.defaultdict:
        return collections.defaultdict(value.default_factory, pairs)
    # By way of a dict: a Counter would count the pairs.
    return kind(dict(pairs))


def generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return generator_bytes(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    bits = getattr(value, "bit_generator", None)
    return value.get_state(legacy=False) if bits is None else bits.state


def set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(generator_tensor(state))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif generator is not None and hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif generator is not None:
        generator.set_state(state)
