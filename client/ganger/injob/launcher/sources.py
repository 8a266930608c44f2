"""Whether a script sets variables that libraries read when they are imported.

A forked child has those libraries already, with the values of its launcher. A script that sets such a variable before
it imports torch needs a fresh interpreter. Found in the text of the script and of its own modules, before it runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ganger.injob.launcher.launch_request import PythonCommand

_VARIABLE = re.compile(rb"\b(?:OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|NUMEXPR|TORCH|PYTORCH|TORCHINDUCTOR|TORCHDYNAMO)_[A-Z]")
_SETS = re.compile(rb"\b(?:environ|putenv)\b")
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+\(?([\w, \t]*)|import[ \t]+([\w., \t]+))", re.M)
# More than scripts consist of; what lies beyond is not looked at.
_MOST_FILES = 200
_MOST_BYTES = 1 << 20


def sets_library_variables(command: PythonCommand) -> bool:
    """Whether the program, or one of its own modules that it imports, sets such a variable.

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
