"""The state of every random generator a training script draws from, as plain bytes and numbers, and back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from ganger.training.image_io import host_view


def capture_random() -> dict[str, Any]:
    """Python's, numpy's (if imported), torch's on the CPU and on every device in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": generator_bytes(torch.get_rng_state())}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, key, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
        state["numpy"] = (str(name), key.astype("<u4").tobytes(), int(position), int(has_gauss), float(gauss))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count())
        state["cuda"] = [generator_bytes(torch.cuda.get_rng_state(device)) for device in devices]
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Generators the state knows nothing of are left alone."""
    random.setstate(state["python"])
    torch.set_rng_state(generator_tensor(state["torch"]))
    if "numpy" in state:
        import numpy

        name, key, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(key, dtype="<u4"), position, has_gauss, gauss))
    for device, generator in enumerate(state.get("cuda", ())):
        if torch.cuda.is_available() and device < torch.cuda.device_count():
            torch.cuda.set_rng_state(generator_tensor(generator), device)


def generator_bytes(state: torch.Tensor) -> bytes:
    return bytes(host_view(state.cpu().contiguous()))


def generator_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
