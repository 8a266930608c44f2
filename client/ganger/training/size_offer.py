"""Whether another number of ranks can go on from a job's state, and from where.

Where each rank has all of the state, from that of any rank, in memory too (RESIZE). Where sharded tensors have their
place in the whole, from the shards of all ranks, so from a checkpoint on storage (RESHARD). Else not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ganger.injob.page_layout import Capability
from ganger.training.state import TrainingObjects, unwrapped
from ganger.training.state_codec import is_sharded, layout_of

# Each rank has a part, and nothing says of what: FSDP1 cuts one flat tensor of many parameters, ZeRO gives each rank
# some parameters' optimizer state.
_SHARDING_MODULES = ("FullyShardedDataParallel",)
_SHARDING_OPTIMIZERS = ("ZeroRedundancyOptimizer",)


@dataclass(frozen=True)
class SizeOffer:
    """`capability`: RESIZE, RESHARD, or zero; then `why_not` has the reason."""

    capability: int
    why_not: str = ""


def size_offer(training: TrainingObjects) -> SizeOffer:
    """Return the offer. Models that differ by rank for a reason of their own (pipelines) are found out when a state
    does not fit."""
    for name, model in training.models.items():
        for path, module in unwrapped(model).named_modules():
            if type(module).__name__ in _SHARDING_MODULES:
                return SizeOffer(0, f"{name}{path and '.'}{path} is sharded over the ranks ({type(module).__name__})")
    for name, optimizer in training.optimizers.items():
        if type(optimizer).__name__ in _SHARDING_OPTIMIZERS:
            return SizeOffer(0, f"{name} is sharded over the ranks ({type(optimizer).__name__})")

    capability = Capability.RESIZE
    for name, tensor in _tensors(training):
        if not is_sharded(tensor):
            continue
        capability = Capability.RESHARD
        layout = layout_of(tensor)
        if layout is not None and layout["offset"] is None and layout["at"] is not None:
            return SizeOffer(0, f"{name} is sharded over the ranks in parts that are no blocks of it")
    return SizeOffer(capability)


def _tensors(training: TrainingObjects) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors by which the others, gradients and optimizer state, are laid out, with their names."""
    for name, model in training.models.items():
        yield from ((f"{name}.{path}", parameter) for path, parameter in unwrapped(model).named_parameters())
    for name, item in training.objects.items():
        if isinstance(item, torch.Tensor):
            yield name, item
