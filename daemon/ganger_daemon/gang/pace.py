"""How fast a gang goes, from what its pages say between two looks."""

from __future__ import annotations

import time

from ganger_daemon.core.gang_judgement import RankPhase
from ganger_daemon.gang.pages import ControlPages
from ganger_daemon.gang.step_rate import PageSample, iteration_seconds, rate_between


class StepRate:
    def __init__(self, pages: ControlPages, ranks: tuple[int, ...]) -> None:
        self._pages = pages
        self._ranks = ranks
        self._look: PageSample | None = None
        self.iteration_seconds = 0.0  # as last measured

    def forget(self) -> None:
        """It rests between its turns: that is no part of how fast it goes."""
        self._look = None

    def measure(self) -> tuple[PageSample, float, float] | None:
        """(newest look, steps per second, share of waiting) since the last call; None before the first boundary."""
        found = [self._pages.progress(rank) for rank in self._ranks]
        if not any(progress.step for progress in found):
            return None
        if any(progress.phase == RankPhase.REPLAY for progress in found):
            self._look = None  # steps done before are walked through, not made
            return None
        slowest = min(found, key=lambda progress: progress.step)
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        began_ns = [progress.first_step_time_ns for progress in found]
        look = PageSample(
            time.monotonic(),
            slowest.step,
            slowest.samples,
            max(progress.data_wait_ns for progress in found),
            slowest.loss,
            max(progress.restored_step for progress in found),
            max(0.0, (now_ns - slowest.step_time_ns) / 1e9),
            max(0.0, (now_ns - max(began_ns)) / 1e9) if all(began_ns) else None,
            slowest.training_epoch,
            slowest.training_epochs,
        )
        rate = rate_between(self._look, look)
        self._look = look
        self.iteration_seconds = iteration_seconds(rate) or self.iteration_seconds
        return look, rate.steps_per_second, rate.data_wait_share
