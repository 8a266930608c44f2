"""The values of an unmodified script. Some can be kept for it: numbers, texts, containers of them, tensors, arrays and
random generators. Of the others it is asked whether they have changed since the first loop of the script began.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import datetime
import decimal
import enum
import fcntl
import fractions
import functools
import io
import itertools
import logging
import os
import pathlib
import pickle
import queue
import random
import re
import resource
import signal
import stat
import sys
import threading
import types
import uuid
import weakref
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Callable

import torch

from ganger.training.script_frames import is_own, package_of
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


_XOF_BYTES = 32
_SYNCHRONISATION = (type(threading.Lock()), type(threading.RLock()), queue.SimpleQueue)
# What is larger is taken for data.
LARGEST_OBJECT_BYTES = 4 << 20
_HARMLESS = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
    *(torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(torch.utils.data.DataLoader, logging.Logger, logging.Handler, weakref.ref, re.Pattern),
    threading.Thread,
)
_FIXED = (enum.Enum, pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID, range, slice)
# Files whose writes a second run keeps out of them, and then continues with at their end.
_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedReader, io.BufferedRandom, io.FileIO)
# Nothing shows where these are.
_HIDDEN = ("zlib.", "_bz2.", "_lzma.", "_csv.reader", "mmap.")
_HASHES = ("_hashlib", "_md5", "_sha", "_blake2")
_DATES = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)

# Prefixes of environment variables that libraries set once they begin to work.
_BY_LIBRARIES = (
    *("CUDA_", "GANGER_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTEST_", "PYTORCH_", "TF_", "TOKENIZERS_", "TORCH"),
    *("TRITON_", "XLA_"),
)
_LIMITS = ("NOFILE", "AS", "CORE", "STACK", "FSIZE", "CPU", "DATA", "NPROC")


def is_harmless(value: Any) -> bool:
    """Return whether a value needs not be kept: code, what is kept in another way, files, and torch's own objects."""
    kind = type(value)
    if isinstance(value, functools._lru_cache_wrapper):
        return not is_own(value.__module__)
    if isinstance(value, _HARMLESS) or package_of(kind.__module__) == "ganger" or hasattr(kind, "__get__"):
        return True
    return package_of(kind.__module__) == "torch" and not isinstance(value, torch.Tensor)


class ForeignValue:
    """One such value as it was."""

    def __init__(self, value: Any) -> None:
        # The object is kept, so that its identity stays its own; but a file is written out when no more is left of it.
        self._value: Callable[[], Any] = (lambda: value) if _file_of(value) is None else weakref.ref(value)
        self._content = _content(value)

    def is_same(self, value: Any) -> bool:
        former = self._value()
        if value is former:
            return bool(_content(value) == self._content)
        if is_at_its_end(value):
            return True
        if type(value) is not type(former):
            return False
        # No tensors: to compare sharded ones is an operation of all ranks.
        is_fixed = isinstance(value, tuple) and all(isinstance(part, SCALARS) for part in (*value, *former))
        return (is_fixed or isinstance(value, (*_FIXED, *_DATES))) and bool(value == former)


def is_at_its_end(value: Any) -> bool:
    """Return whether a value is a file that a second run continues with: closed, not begun, or written at its end."""
    file = _file_of(value)
    return file is not None and not _place(file)


def _content(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value._version
    if (file := _file_of(value)) is not None:
        return _place(file)
    sink = _Sink()
    try:
        _Pickler(sink, 4).dump(value)
    except Exception:
        # Larger, or nothing that can be written down: a lock, a connection.
        return next(_never_same) if hasattr(value, "__next__") else None
    return sink.sum


_never_same = itertools.count(1)


def _file_of(value: Any) -> Any:
    """Return the file that a value is, or encodes texts for; None of all else."""
    inner = value.stream if isinstance(value, codecs.StreamReaderWriter) else value
    return inner if type(inner) in _FILES else None


def _place(file: Any) -> int | None:
    """Return where a file is read or written next; None if it is closed, not regular, or written at its end."""
    try:
        if file.closed or file.fileno() <= 2 or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        mode = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        if mode & os.O_ACCMODE == os.O_RDONLY:
            return _tell(file)
        file.flush()
        is_at_end = mode & os.O_APPEND or _tell(file) == os.fstat(file.fileno()).st_size
        return None if is_at_end else next(_never_same)
    except (OSError, ValueError):
        return None  # Without a descriptor


def _tell(file: Any) -> int:
    try:
        return int(file.tell())
    except OSError:
        return os.lseek(file.fileno(), 0, os.SEEK_CUR)  # A text that is read line by line


def _shown_part(item: Any) -> tuple[Any, ...] | None:
    """Return the content of what cannot be written down; None of all else."""
    name = f"{type(item).__module__}.{type(item).__qualname__}"
    if (file := _file_of(item)) is not None:
        return (_place(file),)
    if isinstance(item, functools._lru_cache_wrapper):
        return (item.cache_info().misses,)
    if isinstance(item, (io.StringIO, io.BytesIO)):
        return item.getvalue(), item.tell()
    if isinstance(item, io.IOBase):
        return (getattr(item, "__dict__", None),)
    if isinstance(item, types.GeneratorType):
        frame = item.gi_frame
        return () if frame is None else (frame.f_lasti, dict(frame.f_locals))
    if name.startswith(_HASHES):
        return (item.digest() if item.digest_size else item.digest(_XOF_BYTES),)
    return (next(_never_same),) if name.startswith(_HIDDEN) else None


class _Sink:
    def __init__(self) -> None:
        self.sum = 0
        self._size = 0

    def write(self, part: Any) -> int:
        self.sum = zlib.crc32(part, self.sum)
        self._size += len(part)
        if self._size > LARGEST_OBJECT_BYTES:
            raise ValueError("too large")
        return len(part)


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> str | None:
        if isinstance(item, torch.Tensor):
            return f"tensor {id(item)} {item._version}"
        is_by_identity = is_harmless(item) and not isinstance(item, functools.partial)
        return f"object {id(item)}" if is_by_identity or isinstance(item, _SYNCHRONISATION) else None

    def reducer_override(self, item: Any) -> Any:
        content = _shown_part(item)
        # The function stands for what cannot be written down.
        return NotImplemented if content is None else (_shown_part, content)


# -- what it sets for its process


def settings_of_process(modules: Mapping[str, types.ModuleType]) -> dict[str, Any]:
    """Return the settings of this process by name. `modules`: those of the script."""
    found: dict[str, Any] = {
        "its recursion limit": sys.getrecursionlimit(),
        "the decimal context": repr(decimal.getcontext()).partition("flags=")[0],
        "the default type of PyTorch": str(torch.get_default_dtype()),
        "whether PyTorch is deterministic": torch.are_deterministic_algorithms_enabled(),
        "PyTorch's precision of products": torch.get_float32_matmul_precision(),
    }
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        found["its umask"] = next((line for line in file if line.startswith("Umask:")), "")
    with contextlib.suppress(OSError):  # It was removed
        found["its working directory"] = os.getcwd()
    for name, value in os.environ.items():
        if not name.startswith(_BY_LIBRARIES):
            found[f"the variable {name} of its environment"] = value
    # A loader's workers have a handler of PyTorch's for the end of children.
    for number in signal.valid_signals() - {signal.SIGCHLD}:
        found[f"the handler of signal {int(number)}"] = signal.getsignal(number)
    for name in _LIMITS:
        found[f"its limit {name}"] = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    for name, logger in [("root", logging.root), *list(logging.root.manager.loggerDict.items())]:
        if isinstance(logger, logging.Logger):
            found[f"the level of logger {name}"] = (logger.level, logger.disabled)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["how numpy prints"] = repr(numpy.get_printoptions())
        found["how numpy treats errors"] = repr(numpy.geterr())
    imported = [item for module in modules.values() for item in vars(module).values() if type(item) is types.ModuleType]
    for module in imported:
        for name, value in [] if is_own(module.__name__) else list(vars(module).items()):
            if type(value) in (bool, int, float) and not name.startswith("_"):
                # As a text: there is one number that is not equal to itself.
                found[f"{module.__name__}.{name}"] = repr(value)
    return found


def changed_setting(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return that a setting is another one than before, as a reason; '' if none is."""
    for name in sorted(before.keys() | now.keys()):
        # A logger or a module that was made meanwhile is made by a second run, too.
        is_known = name in before or name.startswith("the variable")
        if is_known and before.get(name) != now.get(name):
            return f"it changes {name} while it trains, which cannot be kept"
    return ""


def own_thread() -> str:
    """Return that a thread runs code of the script, as a reason; '' if none does."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    running = sys._current_frames()
    for number, frame in running.items():
        if number == threading.main_thread().ident or number not in threads:
            continue
        outer: Any = frame
        while outer is not None:
            if is_own(outer.f_globals.get("__name__")):
                return f"its thread {threads[number]} runs {outer.f_code.co_name}, and its place there cannot be kept"
            outer = outer.f_back
    return ""
