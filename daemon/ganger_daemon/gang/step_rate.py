"""Rates of a gang between two samples of its pages: steps per second, data-wait share, and device utilization; and
the detection of stalls."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
from ganger.injob.page import PageProgress
from ganger.injob.page_layout import PagePhase

from ganger_daemon.core import stall_detection as core
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.node.node_context import NodeContext

# Interval of measuring the CPU time of a job without boundaries.
_PROCESSES_S = 60.0


@dataclass(frozen=True, slots=True)
class PageSample:
    """A gang's progress at one time; of several local ranks the slowest step and the longest wait count."""

    time_s: float
    step: int
    samples: int
    data_wait_ns: int
    loss: float = math.nan
    restored_step: int = 0  # step at which this attempt began
    step_age_s: float = 0.0  # time since the last step
    since_age_s: float | None = None  # time since the first step after the start or resume; None: none yet
    training_epoch: int = 0  # finished passes over the data
    training_epochs: int = 0  # planned passes over the data; 0: not reported
    evaluated: int = 0  # mini-batches evaluated so far, by the rank that is farthest
    evaluated_in_row: int = 0  # of these, those since its last step
    evaluated_age_s: float | None = None  # time since the last one; None: it trains


@dataclass(frozen=True, slots=True)
class Rate:
    steps_per_second: float
    data_wait_share: float


def rate_between(earlier: PageSample | None, later: PageSample) -> Rate:
    """Return the mean rate over the interval; zero if it is empty, or if a restart has reset the counters."""
    if earlier is None or later.time_s <= earlier.time_s or later.step < earlier.step:
        return Rate(0.0, 0.0)
    seconds = later.time_s - earlier.time_s
    waited = max(0, later.data_wait_ns - earlier.data_wait_ns) / 1e9
    steps = later.step - max(earlier.step, min(later.step, later.restored_step))
    return Rate(steps / seconds, min(1.0, waited / seconds))


class UtilizationMeter:
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
        before, self._seen = self._seen, (now, self._host.cgroups.cpu_s(self._group))
        if before is None or now <= before[0]:
            return None
        return min(1.0, max(0.0, self._seen[1] - before[1]) / (cores * (now - before[0])))


class StepRate:
    """Progress of one gang's local ranks, from their pages."""

    def __init__(self, pages: ControlPages, ranks: tuple[int, ...]) -> None:
        self._pages = pages
        self._ranks = ranks
        self._look: PageSample | None = None
        self.iteration_s = 0.0  # as last measured

    @property
    def first_step_ns(self) -> int:
        """Time when the last local rank finished its first step since the gang was started or resumed; 0 before."""
        times = [self._pages.progress(rank).first_step_time_ns for rank in self._ranks] if self._pages.readable else []
        return max(times) if times and all(times) else 0

    @property
    def last_step_ns(self) -> int:
        """Time of the newest step of a local rank; 0 before, and without pages."""
        return max(self._pages.progress(rank).step_time_ns for rank in self._ranks) if self._pages.readable else 0

    def forget(self) -> None:
        """Drop the last sample, since time in which the gang is parked does not count."""
        self._look = None

    def measure(self) -> tuple[PageSample, float, float] | None:
        """Return the newest sample, steps per second and data-wait share since the last call; None before the first
        boundary."""
        found = [self._pages.progress(rank) for rank in self._ranks]
        if not any(progress.step for progress in found):
            return None
        if any(progress.phase == PagePhase.REPLAY for progress in found):
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
            *_evaluation_of(found, now_ns),
        )
        rate = rate_between(self._look, look)
        self._look = look
        if rate.steps_per_second > 0:
            self.iteration_s = 1.0 / rate.steps_per_second
        return look, rate.steps_per_second, rate.data_wait_share


def _evaluation_of(found: Iterable[PageProgress], now_ns: int) -> tuple[int, int, float | None]:
    """Return the mini-batches evaluated so far, those since the last step, and the time since the last one, of the rank
    that is farthest; zero and None where no rank evaluates."""
    evaluating = [one for one in found if one.phase == PagePhase.EVALUATION and one.evaluated_time_ns]
    if not evaluating:
        return 0, 0, None
    first = max(evaluating, key=lambda one: (one.evaluated, one.evaluated_time_ns))
    in_row = max(0, first.evaluated - first.evaluated_before)
    return first.evaluated, in_row, max(0.0, (now_ns - first.evaluated_time_ns) / 1e9)


class StallWatch:
    """Stall detection for one gang's local ranks."""

    def __init__(self, pages: ControlPages, ranks: tuple[int, ...]) -> None:
        self._pages = pages
        self._ranks = ranks
        self._watched: core.Watched | None = None
        self._processes_at = 0.0

    def stall_reason(self, is_running: bool) -> str:
        """Return why the gang makes no progress, or an empty text. `is_running`: it should run and its pages are
        readable."""
        now = time.monotonic()
        if not is_running:
            self._watched = None
            return ""
        found = {rank: self._pages.progress(rank) for rank in self._ranks}
        counters = {
            rank: core.RankCounters(progress.step, progress.phase, progress.data_wait_ns / 1e9)
            for rank, progress in found.items()
        }
        self._watched = core.with_counters(self._watched or core.Watched(now), counters, now)
        return core.stall_reason(self._watched, now)

    async def look_at_processes(self, pids: Iterable[int], now: float) -> None:
        """Measure the CPU time of a job without boundaries, once a minute."""
        if self._watched is None or now - self._processes_at < _PROCESSES_S:
            return
        self._processes_at = now
        seconds = await asyncio.to_thread(processor_s, tuple(pids))
        if self._watched is not None:
            self._watched = core.with_processor_time(self._watched, seconds, now)


def processor_s(pids: Iterable[int]) -> float:
    """Return the CPU time in seconds of processes and their descendants, with ended ones that their parents reaped."""
    found = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    found += times.user + times.system + times.children_user + times.children_system
    return found
