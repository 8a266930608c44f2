"""Lets a script name a rendezvous of its own, `init_process_group("tcp://...")`, beside the gang's.

The gang's store is a process of Ganger, and TORCHELASTIC_USE_AGENT_STORE makes every rank a client of it. Torch obeys
that variable at every address, so nothing would serve one that the script chose: every rank would wait for another.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any, Callable
from urllib.parse import urlparse

_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_is_hooked = False


def hook() -> None:
    """Let rank 0 serve every tcp:// address that is not the gang's. Idempotent; once torch has been imported."""
    global _is_hooked
    from torch import distributed

    if _is_hooked or not distributed.is_available():
        return
    rendezvous = importlib.import_module("torch.distributed.rendezvous")

    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    if "tcp" in handlers:
        handlers["tcp"] = _with_own_store(handlers["tcp"])
    _is_hooked = True


def _with_own_store(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def handler(url: str, *arguments: Any, **options: Any) -> Iterator[Any]:
        met = original(url, *arguments, **options)
        variable = None if _is_of_gang(url) else os.environ.pop(_VARIABLE, None)
        try:
            first = next(met)
        finally:
            if variable is not None:
                os.environ[_VARIABLE] = variable
        yield first
        yield from met

    return handler


def _is_of_gang(url: str) -> bool:
    return str(urlparse(url).port) == os.environ.get("MASTER_PORT")
