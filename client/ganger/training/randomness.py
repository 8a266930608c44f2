"""The state of every random generator a training script draws from, and back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture_random() -> dict[str, Any]:
    """Python's, numpy's (if imported), torch's on the CPU and on every device in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [torch.cuda.get_rng_state(device) for device in range(torch.cuda.device_count())]
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Generators the state knows nothing of are left alone."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    for device, generator in enumerate(state.get("cuda", ())):
        if torch.cuda.is_available() and device < torch.cuda.device_count():
            torch.cuda.set_rng_state(generator.cpu(), device)
