"""Whether every rank of a job has all of its state, so that any number of ranks can go on from the state of one."""

from __future__ import annotations

from typing import Any

import torch

from ganger.training.state import TrainingObjects, unwrapped

# Their state is a part of the whole, whatever else is the same on every rank.
_SHARDING_MODULES = ("FullyShardedDataParallel",)
_SHARDING_OPTIMIZERS = ("ZeroRedundancyOptimizer",)


def why_not_replicated(training: TrainingObjects) -> str:
    """What is only a part on each rank; empty if nothing is known to be. Models that differ by rank for a reason of
    their own (pipelines) are found out when a state does not fit."""
    for name, model in training.models.items():
        for path, module in unwrapped(model).named_modules():
            if type(module).__name__ in _SHARDING_MODULES:
                return f"{name}{path and '.'}{path} is sharded over the ranks ({type(module).__name__})"
        for path, parameter in unwrapped(model).named_parameters():
            if _is_sharded(parameter):
                return f"parameter {name}.{path} is sharded over the ranks ({type(parameter.data).__name__})"
    for name, optimizer in training.optimizers.items():
        if type(optimizer).__name__ in _SHARDING_OPTIMIZERS:
            return f"{name} is sharded over the ranks ({type(optimizer).__name__})"
    for name, item in training.objects.items():
        if isinstance(item, torch.Tensor) and _is_sharded(item):
            return f"{name} is sharded over the ranks"
    return ""


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")
