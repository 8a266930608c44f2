"""What a rank tells while it trains: samples, waiting for data, loss, device memory. Never waits for a device."""

from __future__ import annotations

import math
import time
from typing import Any, Callable

import torch

from ganger.injob.control import Control
from ganger.injob.page_layout import Word
from ganger.training.state import TrainingObjects
from ganger.training.state_keeper import StateKeeper, device_bytes

LOSS_EVERY_S = 1.0
# Steps worth the name are told of one by one; shorter ones a few at a time, so that telling costs next to nothing. Few,
# because the next step may be a long one.
PUBLISH_EVERY_S = 0.005
MOST_STEPS_UNTOLD = 16
# Optimizers make their state in the first step, activations peak soon after; later changes are rare.
MEASURED_STEPS = (1, 2, 3, 10, 100)
MEASURED_EVERY = 1000


class ProgressReporter:
    """Writes the page's words that change with every step, as often as readers need them."""

    def __init__(self, control: Control, training: Callable[[], TrainingObjects], keeper: StateKeeper) -> None:
        self._page = control.page
        self._series = control.series
        self._words = self._page.words
        self.training = training
        self._keeper = keeper
        self._steps = 0
        self._measure_at = MEASURED_STEPS[0]
        self._published = time.monotonic()
        self._loss_due = 0.0
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._peak = 0

    def publish(self, passed: int, samples: int, waited_ns: int, loss: Any) -> int:
        """`passed` steps were made since the last call. Returns after how many more this wants to be called again."""
        self.show(samples, waited_ns)
        now = time.monotonic()
        self._steps += passed
        if self._steps >= self._measure_at:
            later = (step for step in MEASURED_STEPS if step > self._steps)
            self._measure_at = next(later, self._steps + MEASURED_EVERY)
            in_use, peak = device_bytes(self.training())
            self._peak = max(self._peak, peak)
            self._words[Word.DEVICE_BYTES] = in_use
            self._words[Word.PEAK_DEVICE_BYTES] = self._peak
        if now >= self._loss_due:
            self._loss_due = now + LOSS_EVERY_S
            # After the first measurement: the arena gets its memory from the first step on.
            self._keeper.tend()
            if self._series is not None:
                self._series.flush()
            if loss is not None:
                self._look_at(loss)
        untold = int(PUBLISH_EVERY_S * passed / max(now - self._published, 1e-9))
        self._published = now
        return max(1, min(untold, MOST_STEPS_UNTOLD, self._measure_at - self._steps))

    def show(self, samples: int, waited_ns: int) -> None:
        """Samples taken by this rank, and how long it has waited for them."""
        self._words[Word.SAMPLES] = samples
        self._words[Word.DATA_WAIT] = waited_ns

    def _look_at(self, loss: Any) -> None:
        if self._pending is not None:
            copied, event = self._pending
            if event.query():
                self._set(copied)
                self._pending = None
        if isinstance(loss, torch.Tensor) and loss.is_cuda:
            if self._pending is None and loss.numel() == 1:
                copied = loss.detach().to("cpu", torch.float64, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                self._pending = (copied, event)
        elif not isinstance(loss, torch.Tensor) or loss.numel() == 1:
            self._set(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def _set(self, loss: Any) -> None:
        self.report_loss(float(loss))

    def report_loss(self, value: float) -> None:
        """`value` is the loss at the present step; one that is no number is left out."""
        if not math.isfinite(value):
            return
        self._page.set_loss(value)
        if self._series is not None:
            self._series.add_loss(self._words[Word.STEP], value)


def counted_step(
    tell: Callable[[int, Any], int],
    holds_step: Callable[[], bool],
    boundary: Callable[[], None],
    step_aside: Callable[[Exception], None],
) -> tuple[Callable[..., None], Callable[[], int], Callable[[], None]]:
    """TrainingJob.step under control, as a closure: it is called in every step, and most have nothing to tell.

    It only counts down to the step at which to tell. The second function says how many steps are not told of yet; the
    third makes the next step tell, whatever the first one thought.
    """
    tell_after = countdown = 0

    def step(loss: Any = None) -> None:
        nonlocal tell_after, countdown
        try:
            countdown -= 1
            if countdown <= 0:
                tell_after = countdown = tell(tell_after - countdown, loss)
                if holds_step():
                    tell_after = countdown = 0
                    return
            boundary()
        except Exception as problem:
            tell_after = countdown = 0
            step_aside(problem)

    def untold_steps() -> int:
        return tell_after - countdown

    def tell_at_next_step() -> None:
        nonlocal tell_after, countdown
        tell_after, countdown = tell_after - countdown, 0

    return step, untold_steps, tell_at_next_step
