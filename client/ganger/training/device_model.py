"""Which model of device a state lives on. It can go from one model to another, but then what follows need not be the
same to the last bit, and that is said."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch


def device_model(tensors: Iterable[torch.Tensor]) -> str:
    """The names of the accelerators they are on ("NVIDIA H200"), in order; empty without any."""
    names = (_name(device) for device in {tensor.device for tensor in tensors})
    return ", ".join(sorted({name for name in names if name}))


def notice_of_change(saved_on: str, here: str) -> str:
    """A sentence for the job's log; empty where the model is the same, or one of them is not known."""
    if not saved_on or not here or saved_on == here:
        return ""
    return (
        f"its state was saved on {saved_on} and goes on on {here}: from here on results may differ in their last bits. "
        "--gpu-type keeps a job on one type of GPU"
    )


def tell(notice: str) -> None:
    if notice:
        print(f"ganger: {notice}", file=sys.stderr, flush=True)


def _name(device: torch.device) -> str:
    ask = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return "" if ask is None else str(ask(device))
