"""Adjustments of torch.distributed in a rank: rendezvous addresses of the script, and the end of the default group."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from typing import Any, Callable
from urllib.parse import urlparse

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_is_tcp_hooked = False
_is_group_kept = False


def hook_tcp_rendezvous() -> None:
    """Let rank 0 serve every tcp:// address except the gang's, as in `init_process_group("tcp://...")`. Idempotent.

    The gang's store is a process of Ganger, and TORCHELASTIC_USE_AGENT_STORE makes every rank a client of it. PyTorch
    applies that variable to all addresses, so no rank would serve an address that the script chose, and all would hang.
    """
    global _is_tcp_hooked
    from torch import distributed

    if _is_tcp_hooked or not distributed.is_available():
        return
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    if "tcp" in handlers:
        handlers["tcp"] = _with_own_store(handlers["tcp"])
    _is_tcp_hooked = True


def keep_default_group() -> None:
    """Keep the default gloo group alive until the process ends. Idempotent; does nothing without such a group.

    A gloo process group joins its threads when it is freed, and holds the interpreter lock meanwhile. A thread that
    has just finished a collective operation of a backward pass needs that lock to release a Python object. A script
    that ends within milliseconds of its last collective operation may therefore deadlock, and its gang with it (seen
    with torch 2.13, outside Ganger too).
    """
    global _is_group_kept
    from torch import distributed

    if _is_group_kept or not distributed.is_available() or not distributed.is_initialized():
        return
    if "gloo" not in str(distributed.get_backend_config()):
        return
    # A Python reference would be cleared at interpreter shutdown, and the group freed with it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(distributed.group.WORLD))
    _is_group_kept = True


def _with_own_store(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def handler(url: str, *arguments: Any, **options: Any) -> Iterator[Any]:
        rendezvous = original(url, *arguments, **options)
        value = None if _is_address_of_gang(url) else os.environ.pop(_AGENT_STORE, None)
        try:
            first = next(rendezvous)
        finally:
            if value is not None:
                os.environ[_AGENT_STORE] = value
        yield first
        yield from rendezvous

    return handler


def _is_address_of_gang(url: str) -> bool:
    return str(urlparse(url).port) == os.environ.get("MASTER_PORT")
