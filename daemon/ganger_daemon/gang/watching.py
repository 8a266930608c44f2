"""Looks whether a gang gets on: at its counters at every report, and at the processes of one without boundaries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

import psutil

from ganger_daemon.core import stall_detection as core
from ganger_daemon.gang.pages import ControlPages

_PROCESSES_SECONDS = 60.0


class Watching:
    """Of one gang's local ranks."""

    def __init__(self, pages: ControlPages, ranks: tuple[int, ...]) -> None:
        self._pages = pages
        self._ranks = ranks
        self._watched: core.Watched | None = None
        self._processes_at = 0.0

    def concern(self, is_running: bool) -> str:
        """What keeps it from getting on. `is_running`: it is meant to, and its pages can be read."""
        now = time.monotonic()
        if not is_running:
            self._watched = None
            return ""
        found = {rank: self._pages.progress(rank) for rank in self._ranks}
        counters = {
            rank: core.RankCounters(progress.step, progress.phase, progress.data_wait_ns / 1e9)
            for rank, progress in found.items()
        }
        self._watched = core.seen(self._watched or core.Watched(now), counters, now)
        return core.concern(self._watched, now)

    async def look_at_processes(self, pids: Iterable[int], now: float) -> None:
        """Of a job without boundaries; once a minute."""
        if self._watched is None or now - self._processes_at < _PROCESSES_SECONDS:
            return
        self._processes_at = now
        seconds = await asyncio.to_thread(processor_seconds, tuple(pids))
        if self._watched is not None:
            self._watched = core.used(self._watched, seconds, now)


def processor_seconds(pids: Iterable[int]) -> float:
    """What processes and all below them have used, those that have ended included where their parents saw it."""
    found = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    found += times.user + times.system + times.children_user + times.children_system
    return found
