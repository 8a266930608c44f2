"""What jobs with a trainer share: their data, their layers, the pause in each step, and the weights that they leave."""

from __future__ import annotations

import os
import time
from typing import Any

import torch


class Samples(torch.utils.data.Dataset[Any]):
    """Pairs of a noisy input and a target; the noise is of torch's global generator."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + torch.rand(8) / 10, self.x[index].sum().reshape(1)


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))


def pause_until(go: str, seconds: float) -> None:
    """Make a step last, until the file `go` is there."""
    if not os.path.exists(go):
        time.sleep(seconds)


def write_weights(directory: str, model: torch.nn.Module) -> None:
    with open(os.path.join(directory, "weights"), "w") as file:
        file.write(repr({name: value.tolist() for name, value in model.state_dict().items()}))
