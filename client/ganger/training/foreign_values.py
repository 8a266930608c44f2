"""What an unmodified script keeps and that cannot be kept for it: has it changed since its first loop began?

Objects of libraries, named tuples, dates, paths, members of enumerations, iterators; and what it sets for its whole
process: the working directory, the environment, signal handlers, limits, formats of numbers, defaults of PyTorch,
numbers in modules of libraries. A second run makes and sets them as they were at first, and then skips most steps. One
that has become another since is a reason not to offer a second run.
"""

from __future__ import annotations

import codecs
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
from collections.abc import Mapping
from typing import Any, Callable

import torch

from ganger.training.script_frames import is_own, package_of
from ganger.training.script_values import SCALARS

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

# Of the environment, these are set by libraries that begin to work.
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
