"""What is imported ahead of time, which scripts cannot use it, and the proof that forked children are healthy. Only
imports: one tensor operation starts OpenMP's threads, which do not survive a fork; one CUDA call, and no child can use
the device. A script that sets a variable of these libraries needs a fresh interpreter."""

from __future__ import annotations

import gc
import importlib
import os
import re
import select
import signal
import sys
from collections.abc import Iterator

from ganger.injob.launcher.process_record import PythonCommand

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    # Imported by the first optimizer step otherwise, at the cost of a second.
    "torch._dynamo",
    "multiprocessing.connection",
    "multiprocessing.queues",
    "multiprocessing.reduction",
    "ganger.injob.bootstrap",
    "ganger.injob.control",
    "ganger.training.agent",
    "ganger.training.attached_job",
    "ganger.training.unmodified_script",
)
_CANARY_S = 20.0


def preload() -> list[str]:
    """Import what most training needs; return the names that could be. What is missing is no error."""
    found = []
    for name in PRELOADED:
        if name.startswith(("torch.", "ganger.training.")) and "torch" not in found:
            continue
        try:
            importlib.import_module(name)
        except Exception as problem:  # a broken installation fails in the user's program, where it is seen
            if not isinstance(problem, ModuleNotFoundError):
                print(f"ganger launcher: {name} cannot be imported ahead of time: {problem}", file=sys.stderr)
            continue
        found.append(name)
    gc.collect()
    # Children share these pages; a collection that wrote into every object's header would copy them all.
    gc.freeze()
    return found


def is_fork_safe() -> bool:
    """Prove that a forked child can compute: one thread here, and a canary that multiplies matrices in parallel."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        print(f"ganger launcher: {threads} threads after importing, so scripts are started by exec", file=sys.stderr)
        return False
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    if torch.cuda.is_initialized():
        print("ganger launcher: CUDA is initialised after importing, so scripts are started by exec", file=sys.stderr)
        return False
    pid = os.fork()
    if pid == 0:
        try:
            matrix = torch.ones(256, 256, requires_grad=True)
            (matrix @ matrix).sum().backward()
            os._exit(0)
        except BaseException:
            os._exit(1)
    descriptor = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([descriptor], [], [], _CANARY_S)
        if not readable:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(descriptor)
    if status != 0:
        print("ganger launcher: a forked child cannot compute, so scripts are started by exec", file=sys.stderr)
    return status == 0


_VARIABLE = re.compile(rb"\b(?:OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|NUMEXPR|TORCH|PYTORCH|TORCHINDUCTOR|TORCHDYNAMO)_[A-Z]")
_SETS = re.compile(rb"\b(?:environ|putenv)\b")
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+\(?([\w, \t]*)|import[ \t]+([\w., \t]+))", re.M)
# More than scripts consist of; what lies beyond is not looked at.
_MOST_FILES = 200
_MOST_BYTES = 1 << 20


def sets_library_variables(command: PythonCommand) -> bool:
    """Return whether the program, or one of its own modules that it imports, sets such a variable.

    Paths are relative to the current working directory."""
    if command.module:
        top = os.getcwd()
        waiting = [path for name in _prefixes(command.module) for path in _files(top, name)]
        waiting += _files(top, f"{command.module}.__main__")
    else:
        top = os.path.dirname(os.path.realpath(command.script))
        waiting = [os.path.realpath(command.script)]
    seen: set[str] = set()
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        text = _text(path)
        if _SETS.search(text) and _VARIABLE.search(text):
            return True
        for name in _imported(text):
            # relative names begin in the module's own package
            start = os.path.dirname(path) if name.startswith(".") else top
            waiting += [found for prefix in _prefixes(name.strip(".")) for found in _files(start, prefix)]
    return False


def _imported(text: bytes) -> Iterator[str]:
    for source, names, modules in _IMPORT.findall(text):
        if source:
            yield source.decode()
            yield from (f"{source.decode().rstrip('.')}.{name.strip()}" for name in names.decode().split(","))
        else:
            yield from (module.split()[0] for module in modules.decode().split(",") if module.strip())


def _prefixes(name: str) -> list[str]:
    parts = [part for part in name.split(".") if part]
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _files(top: str, module: str) -> list[str]:
    base = os.path.join(top, *module.split("."))
    return [path for path in (f"{base}.py", os.path.join(base, "__init__.py")) if os.path.isfile(path)]


def _text(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""
