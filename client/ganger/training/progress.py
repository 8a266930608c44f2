"""What a rank tells while it trains: samples, waiting for data, loss, device memory. Never waits for a device."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from ganger.injob.page import Page, Word
from ganger.training.offload import StateKeeper, device_bytes
from ganger.training.state import Training

LOSS_EVERY_SECONDS = 1.0
# Optimizers make their state in the first step, activations peak soon after; later changes are rare.
MEASURED_STEPS = (1, 2, 3, 10, 100)


class Progress:
    def __init__(self, page: Page, training: Training, keeper: StateKeeper | None) -> None:
        self._page = page
        self._words = page.words
        self.training = training
        self._keeper = keeper
        self._calls = 0
        self._loss_due = 0.0
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._peak = 0
        self.data_wait_nanoseconds = 0

    def publish(self, samples: int, loss: Any) -> None:
        """Called before each boundary."""
        words = self._words
        words[Word.SAMPLES] = samples
        words[Word.DATA_WAIT] = self.data_wait_nanoseconds
        self._calls += 1
        now = time.monotonic()
        if now >= self._loss_due:
            self._loss_due = now + LOSS_EVERY_SECONDS
            if self._keeper is not None:
                self._keeper.tend()
            if loss is not None:
                self._look_at(loss)
        if self._calls in MEASURED_STEPS or self._calls % 1000 == 0:
            self.measure()

    def measure(self) -> None:
        """Publish device memory now and at its peak."""
        in_use, peak = device_bytes(self.training)
        self._peak = max(self._peak, peak)
        self._words[Word.DEVICE_BYTES] = in_use
        self._words[Word.PEAK_DEVICE_BYTES] = self._peak

    def _look_at(self, loss: Any) -> None:
        if self._pending is not None:
            copied, event = self._pending
            if event.query():
                self._set(float(copied))
                self._pending = None
        if isinstance(loss, torch.Tensor) and loss.is_cuda:
            if self._pending is None and loss.numel() == 1:
                copied = loss.detach().to("cpu", torch.float64, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                self._pending = (copied, event)
        elif not isinstance(loss, torch.Tensor) or loss.numel() == 1:
            self._set(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))

    def _set(self, loss: float) -> None:
        if math.isfinite(loss):
            self._page.set_float(Word.LOSS, loss)
