"""Ganger: gangs of GPUs, set to work whole, paused between two mini-batches, moved without losing a step.

This module runs in users' training scripts too, so it imports nothing until it is asked for a name.
"""

from __future__ import annotations

from importlib import import_module

_HOMES = {
    # In a training script
    "attach": "ganger.training",
    "log": "ganger.injob.metrics",
    "report": "ganger.injob.metrics",
    # Towards a cluster
    "ApiError": "ganger.wire.errors",
    "Client": "ganger.client",
    "Job": "ganger.job",
}

__all__ = ["ApiError", "Client", "Job", "__version__", "attach", "log", "report"]

# Version of the installed package; "unknown" in a bare checkout.
__version__: str


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _installed_version()
    if name == "array_spec":
        return import_module("ganger.array_spec")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ganger' has no attribute {name!r}")
    return getattr(import_module(home), name)


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ganger")
    except PackageNotFoundError:
        return "unknown"
