"""Rates of a gang between two samples of its pages: steps per second, data-wait share, and device utilization."""

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
    restored_step: int = 0  # step at which this attempt began
    step_age_seconds: float = 0.0  # time since the last step
    since_age_seconds: float | None = None  # time since the first step after the start or resume; None: none yet
    training_epoch: int = 0  # finished passes over the data
    training_epochs: int = 0  # planned passes over the data; 0: not reported


@dataclass(frozen=True, slots=True)
class Rate:
    steps_per_second: float
    data_wait_share: float


def rate_between(earlier: PageSample | None, later: PageSample) -> Rate:
    """Return the mean rate over the interval; zero if it is empty, or if a restart has reset the counters."""
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
    """Device utilization of a gang's part on this node.

    A virtual device with a CPU limit is as busy as its cores. For other devices the driver reports the use of each
    process; where it does not, the time that the job does not wait for data counts as busy."""

    def __init__(self, host: NodeContext, group: str, device_mask: int) -> None:
        self._host = host
        self._group = group
        self._mask = device_mask
        self._seen: tuple[float, float] | None = None

    def forget(self) -> None:
        """Drop the last sample, since time in which the gang is parked does not count."""
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
        """Drop the last sample, since time in which the gang is parked does not count."""
        self._look = None

    def measure(self) -> tuple[PageSample, float, float] | None:
        """Return the newest sample, steps per second and data-wait share since the last call; None before the first
        boundary."""
        found = [self._pages.progress(rank) for rank in self._ranks]
        if not any(progress.step for progress in found):
            return None
        if any(progress.phase == RankPhase.REPLAY for progress in found):
            self._look = None  # replayed steps are no progress
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
