"""The order of parameters in the buckets of DistributedDataParallel, which is part of the state of training.

It sums gradients bucket by bucket. In its first iteration parameters lie in the buckets in the order of the model,
later in that in which their gradients came. With three ranks or more, the place of a number in its bucket decides in
which order the ranks' numbers are added, so training that goes on in new processes would round its first sums
differently than without the stop. New processes begin with the saved order instead.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

# Parameters of a model, by name, in the order of its buckets.
Order = list[str]
# Not public: in a version of PyTorch that lacks one of these, orders are neither saved nor restored.
_OF_WRAPPER = (
    "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer",
    "_comm_hooks",
    "_ddp_init_helper",
    "_get_ddp_logging_data",
    "_has_rebuilt_buckets",
    "find_unused_parameters",
    "logger",
    "mixed_precision",
    "static_graph",
)
_OF_REDUCER = ("_push_all_rebuilt_params", "_rebuild_buckets", "_remove_autograd_hooks")
# To look through all objects is slow: so often at most a process looks for wrapped models.
_LOOKS = 3

_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
# The orders that wrapped models of this process have begun with.
_begun: weakref.WeakKeyDictionary[Any, Order] = weakref.WeakKeyDictionary()
_looks = 0


def bucket_orders() -> list[Order]:
    """Return the order of each wrapped model of this process, without those that have done no iteration."""
    orders = [_order_of(wrapper) for wrapper in _found()]
    return [order for order in orders if order]


def begin_with(orders: Sequence[Order]) -> None:
    """Let each wrapped model begin its next iteration with the order of these that has its parameters. It may be
    wrapped later. All ranks have to call this with the same orders: they agree on them in the forward pass."""
    if not orders:
        return
    kind: Any = torch.nn.parallel.DistributedDataParallel
    left, pre_forward = [list(order) for order in orders], kind._pre_forward

    def begin(wrapper: Any, *inputs: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and wrapper not in _begun and _may_change(wrapper):
            named = set(_names(wrapper, _parameters(wrapper)[0]))
            order = next((one for one in left if set(one) == named), None)
            if order is not None:
                left.remove(order)
                _reorder(wrapper, order)
            if not left:
                kind._pre_forward = pre_forward
        return pre_forward(wrapper, *inputs, **options)

    kind._pre_forward = begin


def _found() -> list[Any]:
    global _looks
    is_distributed = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if is_distributed and not _wrappers and _looks < _LOOKS:
        _looks += 1
        kind = torch.nn.parallel.DistributedDataParallel
        _wrappers.update(one for one in gc.get_objects() if isinstance(one, kind))
    return list(_wrappers)


def _order_of(wrapper: Any) -> Order:
    if wrapper in _begun:
        return _begun[wrapper]
    if not _may_change(wrapper):
        return []
    # "3 2, 1 0": the numbers of its parameters, bucket by bucket.
    places = _fact(wrapper, "rebuilt_per_bucket_param_indices")
    if not places:
        # After its first iteration: the order in which gradients came, which its next one would begin with.
        wrapper.logger.set_runtime_stats_and_log()
        places = _fact(wrapper, "prev_iteration_grad_ready_order_indices")
    names = _names(wrapper, _parameters(wrapper)[0])
    return [names[int(place)] for place in places.replace(",", " ").split()]


def _reorder(wrapper: Any, order: Order) -> None:
    """Give a wrapped model that has done no iteration a reducer whose buckets have this order."""
    reducer, hooks = wrapper.reducer, list(wrapper._comm_hooks)
    # A hook of PyTorch's own, in C++, cannot be read, and so not be registered again.
    has_other_hook = bool(_fact(wrapper, "comm_hook")) and not hooks
    if has_other_hook or wrapper._has_rebuilt_buckets:
        return
    parameters, are_sparse = _parameters(wrapper)
    names = _names(wrapper, parameters)
    places = [names.index(name) for name in order]
    ordered = [parameters[place] for place in places]
    reducer._remove_autograd_hooks()
    mapping = wrapper._build_debug_param_to_name_mapping(ordered)
    wrapper._ddp_init_helper(ordered, [are_sparse[place] for place in places], mapping, wrapper.static_graph)
    for hook, state in hooks:
        distributed._register_comm_hook(wrapper.reducer, state, hook)  # type: ignore[attr-defined]
    # As if the gradients of an iteration had come in this order.
    wrapper.reducer._push_all_rebuilt_params()
    wrapper.reducer._rebuild_buckets()
    wrapper._has_rebuilt_buckets = True
    _begun[wrapper] = order


def _may_change(wrapper: Any) -> bool:
    """Whether the order changes after the first iteration, in a way that is known here."""
    is_known = all(hasattr(wrapper, each) for each in _OF_WRAPPER)
    if not is_known or not all(hasattr(wrapper.reducer, each) for each in _OF_REDUCER):
        return False
    return not (wrapper.find_unused_parameters or wrapper.static_graph or wrapper.mixed_precision is not None)


def _fact(wrapper: Any, name: str) -> str:
    return str(wrapper._get_ddp_logging_data().get(name, ""))


def _parameters(wrapper: Any) -> tuple[list[Any], list[bool]]:
    """The parameters with gradients, in the order of the model, and whether each has sparse ones."""
    parameters, are_sparse = wrapper._build_params_for_reducer()
    return parameters, are_sparse


def _names(wrapper: Any, parameters: Sequence[Any]) -> list[str]:
    names = {parameter: name for name, parameter in wrapper.module.named_parameters()}
    return [names[parameter] for parameter in parameters]
