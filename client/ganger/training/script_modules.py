"""Modules that belong to the script: neither installed, nor of Python, nor of Ganger.

Imports no torch: the agent asks before the first line of a script, which may set variables that torch reads when it is
imported.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from typing import Any

_STANDARD = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_own(name: Any) -> bool:
    """Whether the module of that name belongs to the script."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and package_of(name) not in ("ganger", "torch", "sitecustomize") and _is_own_file(file)


def package_of(name: Any) -> str:
    return str(name).partition(".")[0]


@functools.lru_cache(maxsize=1 << 14)
def _is_own_file(file: str) -> bool:
    return not file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)
