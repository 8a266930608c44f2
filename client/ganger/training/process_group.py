"""Sees to it that a rank which is done can end.

PyTorch's gloo process group joins its threads when it is freed, and holds the interpreter's lock while it waits. Since
a backward pass leaves a Python object in the thread's state, which every collective operation takes with it, a thread
that has just finished one needs that lock to let go of it: a script that ends within milliseconds of its last
collective operation may then wait for ever (seen with torch 2.13, outside Ganger too), and its gang with it.
"""

from __future__ import annotations

import ctypes

from torch import distributed

_is_kept = False


def keep_default_group() -> None:
    """Let the default gloo group live until the process ends: its threads end with it.

    Idempotent; without effect where there is no such group.
    """
    global _is_kept
    if _is_kept or not distributed.is_available() or not distributed.is_initialized():
        return
    if "gloo" not in str(distributed.get_backend_config()):
        return
    # a name that refers to it would be cleared, and the group freed, when the interpreter ends
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(distributed.group.WORLD))
    _is_kept = True
