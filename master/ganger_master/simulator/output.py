"""Lines and progress of a run on stderr, beside its result. Where stderr cannot be written (a full disk), the run
goes on without them.

Progress is a bar on a terminal, and a line for each tenth elsewhere.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def say(text: str) -> None:
    """Print a line on stderr, as far as possible."""
    with ignoring_stderr_errors():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def ignoring_stderr_errors() -> Iterator[None]:
    """Redirect stderr to the null device if writing to it fails."""
    try:
        yield
    except OSError:
        # Buffered text would fail again when Python flushes at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


_SECONDS_BETWEEN_LOOKS = 0.1
_TENTHS = 10


class ProgressBar:
    """Progress on stderr: a bar on a terminal, elsewhere a line per tenth. Call it with the amount done and the total.

    `is_shown`: None: only on a terminal. `unit`, `scale`: amounts are shown as amount x scale in units.
    """

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
            with ignoring_stderr_errors():
                self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        # Called for each job, so all but the clock reading must be rare.
        if not self._is_shown or (now := self._clock()) < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LOOKS
        done, total = round(done * self._scale), round(total * self._scale)
        if self._is_terminal:
            with ignoring_stderr_errors():
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
                # The bar disappears: the lasting output is the result only.
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(self._what, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)
