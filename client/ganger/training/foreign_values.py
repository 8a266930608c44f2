"""Values that an unmodified script keeps and that cannot be kept for it: have they changed since its first loop began?

Objects of libraries, named tuples, dates, paths, members of enumerations, iterators. A second run makes them as they
were at first. One that has become another since is a reason not to offer a second run.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import io
import logging
import pathlib
import pickle
import re
import threading
import types
import uuid
import weakref
import zlib
from typing import Any

import torch

from ganger.training.replay import package_of
from ganger.training.script_values import SCALARS

# What is larger is taken for data.
LARGEST_OBJECT_BYTES = 4 << 20
_HARMLESS = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
    *(torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(torch.utils.data.DataLoader, io.IOBase, logging.Logger, logging.Handler, weakref.ref, re.Pattern),
    threading.Thread,
)
_FIXED = (enum.Enum, pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID, range, slice)
_DATES = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)


def is_harmless(value: Any) -> bool:
    """Return whether a value needs not be kept: code, what is kept in another way, files, and torch's own objects."""
    kind = type(value)
    if isinstance(value, _HARMLESS) or package_of(kind.__module__) == "ganger" or hasattr(kind, "__get__"):
        return True
    return package_of(kind.__module__) == "torch" and not isinstance(value, torch.Tensor)


class ForeignValue:
    """One such value as it was."""

    def __init__(self, value: Any) -> None:
        # the object is kept, so that its identity stays its own
        self._value = value
        self._content = _content(value)

    def is_same(self, value: Any) -> bool:
        if value is self._value:
            return bool(_content(value) == self._content)
        if type(value) is not type(self._value):
            return False
        # no tensors: to compare sharded ones is an operation of all ranks
        is_fixed = isinstance(value, tuple) and all(isinstance(part, SCALARS) for part in (*value, *self._value))
        return (is_fixed or isinstance(value, (*_FIXED, *_DATES))) and bool(value == self._value)


def _content(value: Any) -> Any:
    """What the value holds, as far as it can be seen."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, repr(sorted(map(str, frame.f_locals))))
    sink = _Sink()
    try:
        _Pickler(sink, 4).dump(value)
    except Exception:
        # larger, or nothing that can be written down: a lock, a connection
        return None
    return sink.sum


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
        return f"object {id(item)}" if is_by_identity else None
