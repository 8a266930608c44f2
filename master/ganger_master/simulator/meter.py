"""How far a long run is, on stderr: a bar on a terminal, a line for each tenth elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ganger_master.simulator.output import or_to_nobody, say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SECONDS_BETWEEN_LOOKS = 0.1
_TENTHS = 10


class ProgressBar:
    """Call it with what is done and what there is in all, as often as you like. `is_shown` False: it says nothing;
    None: only to a terminal. What it gets is shown in `unit`s, of which one is 1 / `scale`."""

    def __init__(
        self,
        what: str,
        is_shown: bool | None,
        unit: str = "jobs",
        scale: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._unit = unit
        self._scale = scale
        self._clock = clock
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = self._is_terminal if is_shown is None else is_shown
        self._next = clock() + _SECONDS_BETWEEN_LOOKS
        self._tenths = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with or_to_nobody():
                self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        # This is called for each job: looking at the clock is all that may cost.
        if not self._is_shown or (now := self._clock()) < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LOOKS
        done, total = round(done * self._scale), round(total * self._scale)
        if self._is_terminal:
            with or_to_nobody():
                self._draw(done, total)
        elif (tenths := _TENTHS * done // max(total, 1)) > self._tenths:
            self._tenths = tenths
            say(f"{self._what}: {done:,} of {total:,} {self._unit}")

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self._unit),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                # What a run printed is its results, not how it got there.
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(self._what, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)
