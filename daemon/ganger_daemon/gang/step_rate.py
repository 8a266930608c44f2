"""Steps per second and share of time spent waiting, from two looks at the page: at no cost to the job.

How much of what its devices can do a gang uses: between two reports, at no cost to the job.

How fast a gang goes, from what its pages say between two looks.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from ganger_daemon.core.gang_judgement import RankPhase
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.node.node_context import NodeContext


@dataclass(frozen=True, slots=True)
class PageSample:
    """A gang's progress at one time; of several local ranks the slowest step and the longest wait count."""

    time_seconds: float
    step: int
    samples: int
    data_wait_ns: int
    loss: float = math.nan
    restored_step: int = 0  # where this attempt began: what lies before was not done here
    step_age_seconds: float = 0.0  # how long ago the step was done
    since_age_seconds: float | None = None  # and the first one since it began to run or went on; None: not yet
    training_epoch: int = 0  # passes over its data that are behind it
    training_epochs: int = 0  # and in all; 0: it does not say


@dataclass(frozen=True, slots=True)
class Rate:
    steps_per_second: float
    data_wait_share: float


def rate_between(earlier: PageSample | None, later: PageSample) -> Rate:
    """Mean over the interval; zero for an empty one, or after a restart set the counters back."""
    if earlier is None or later.time_seconds <= earlier.time_seconds or later.step < earlier.step:
        return Rate(0.0, 0.0)
    seconds = later.time_seconds - earlier.time_seconds
    waited = max(0, later.data_wait_ns - earlier.data_wait_ns) / 1e9
    steps = later.step - max(earlier.step, min(later.step, later.restored_step))
    return Rate(steps / seconds, min(1.0, waited / seconds))


def iteration_seconds(rate: Rate) -> float:
    """Mean time of one iteration; 0 when it is not known."""
    return 1.0 / rate.steps_per_second if rate.steps_per_second > 0 else 0.0


class Using:
    """Of a gang's part on this node. A virtual device that is bound to cores is as busy as these cores; of another one
    the driver says what each process used of it, and where it does not, a job that waits for no data counts as busy."""

    def __init__(self, host: NodeContext, group: str, device_mask: int) -> None:
        self._host = host
        self._group = group
        self._mask = device_mask
        self._seen: tuple[float, float] | None = None

    def forget(self) -> None:
        """It rests between its turns: that is no part of how busy it keeps its devices."""
        self._seen = None

    def measure(self, data_wait_share: float) -> float | None:
        """Return the utilization since the last call, 0 to 1; None at the first call and where nothing reports it."""
        if not self._mask:
            return None
        cores = self._host.device_cores * self._mask.bit_count()
        if cores:
            return self._of_cores(cores, time.monotonic())
        found = self._host.devices.use_by(self._host.cgroups.pids(self._group), self._mask)
        return 1.0 - data_wait_share if found is None else found

    def _of_cores(self, cores: float, now: float) -> float | None:
        before, self._seen = self._seen, (now, self._host.cgroups.cpu_seconds(self._group))
        if before is None or now <= before[0]:
            return None
        return min(1.0, max(0.0, self._seen[1] - before[1]) / (cores * (now - before[0])))


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
