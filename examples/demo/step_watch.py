"""Looks at a training from outside while it runs: when each step's line appeared in its file of losses. What the demo
says about pauses and rates rests on this alone, not on what Ganger reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_SECONDS = 0.002


class StepWatch:
    """Counts the lines of a file as they come. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name=f"watch {path.name}", daemon=True)

    def __enter__(self) -> StepWatch:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def steps(self) -> int:
        with self._changed:
            return self._seen[-1][1] if self._seen else 0

    def seen(self) -> list[tuple[float, int]]:
        with self._changed:
            return list(self._seen)

    def wait_for(self, steps: int, timeout_s: float, give_up: Callable[[], str] = str) -> None:
        """Returns when so many steps have been seen. Raises TimeoutError, or RuntimeError with what `give_up` says."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: bool(self._seen) and self._seen[-1][1] >= steps, 0.25):
                    return
            if why := give_up():
                raise RuntimeError(why)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step {steps} in {self._path.name} within {timeout_s:g} s")

    def rate(self, first: float, last: float) -> float:
        """Steps per second within a span of time."""
        inside = [entry for entry in self.seen() if first <= entry[0] <= last]
        if len(inside) < 2 or inside[-1][0] == inside[0][0]:
            return 0.0
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def _look(self) -> None:
        position = lines = 0
        while not self._stop.wait(LOOK_EVERY_SECONDS):
            try:
                size = self._path.stat().st_size
                if size == position:
                    continue
                with self._path.open("rb") as file:
                    file.seek(position)
                    news = file.read()
            except FileNotFoundError:
                continue
            now = time.monotonic()
            position += len(news)
            lines += news.count(b"\n")
            with self._changed:
                self._seen.append((now, lines))
                self._changed.notify_all()
