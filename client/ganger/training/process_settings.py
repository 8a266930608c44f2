"""What a script sets for its whole process while it trains: a second run that skips most steps would not set it alike.

The working directory, the environment, signal handlers, limits, formats of numbers, defaults of PyTorch, and numbers
that a script puts into modules of libraries. What was set before the first loop is set again by a second run.
"""

from __future__ import annotations

import decimal
import logging
import os
import resource
import signal
import sys
import threading
import types
from collections.abc import Mapping
from typing import Any

import torch

from ganger.training.replay import is_own

# Of the environment, these are set by libraries that begin to work.
_BY_LIBRARIES = (
    *("CUDA_", "GANGER_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTEST_", "PYTORCH_", "TF_", "TOKENIZERS_", "TORCH"),
    *("TRITON_", "XLA_"),
)
_LIMITS = ("NOFILE", "AS", "CORE", "STACK", "FSIZE", "CPU", "DATA", "NPROC")
_NUMBERS = (bool, int, float)


def settings_of_process(modules: Mapping[str, types.ModuleType]) -> dict[str, Any]:
    """Return the settings of this process by name. `modules`: those of the script."""
    found: dict[str, Any] = {
        "its umask": _umask(),
        "its recursion limit": sys.getrecursionlimit(),
        "the decimal context": repr(decimal.getcontext()).partition("flags=")[0],
        "the default type of PyTorch": str(torch.get_default_dtype()),
        "whether PyTorch is deterministic": torch.are_deterministic_algorithms_enabled(),
        "PyTorch's precision of products": torch.get_float32_matmul_precision(),
    }
    try:
        found["its working directory"] = os.getcwd()
    except OSError:
        pass  # it was removed
    for name, value in os.environ.items():
        if not name.startswith(_BY_LIBRARIES):
            found[f"the variable {name} of its environment"] = value
    # a loader's workers have a handler of PyTorch's for the end of children
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
    return {**found, **_numbers(modules)}


def changed_setting(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return that a setting is another one than before, as a reason; '' if none is."""
    for name in sorted(before.keys() | now.keys()):
        # a logger or a module that was made meanwhile is made by a second run, too
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


def _umask() -> str:
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        return next((line for line in file if line.startswith("Umask:")), "")


def _numbers(modules: Mapping[str, types.ModuleType]) -> dict[str, Any]:
    """Numbers in modules of libraries that the script imports by name."""
    imported = [item for module in modules.values() for item in vars(module).values() if type(item) is types.ModuleType]
    return {
        # as a text: there is one number that is not equal to itself
        f"{item.__name__}.{name}": repr(value)
        for item in imported
        if not is_own(item.__name__)
        for name, value in list(vars(item).items())
        if type(value) in _NUMBERS and not name.startswith("_")
    }
