"""Rates of a gang between two samples of its pages: steps per second, data-wait share, and device utilization; and
the detection of stalls."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil
from ganger.injob.page import PageProgress
from ganger.injob.page_layout import PagePhase
from ganger.text import counted, format_duration

from ganger_daemon.devices.inventory import VIRTUAL_DRIVER
from ganger_daemon.gang.control_pages import ControlPages
from ganger_daemon.node.node_context import NodeContext

# Interval of measuring the CPU time of a job without boundaries.
_PROCESSES_S = 60.0
# A gang hangs without a step for so long, and for so many times its longest pause between two steps so far.
HANG_S = 60.0
_HANG_PAUSES = 10.0
# Evaluation and compilation have no boundaries.
_LONG_PHASES = {PagePhase.EVALUATION, PagePhase.COMPILATION}
_LONG_PHASE = 10.0
# Without a first step, or without use of a processor.
IDLE_S = 600.0
_IDLE_SHARE = 0.01
# Interval of looking whether devices are in use: the driver's samples are of the last seconds.
_LOOK_S = 1.0
# Growth of the time without use after which the next daemon is left a note.
_NOTED_S = 60.0
# Least steps and seconds of a window in which ranks are compared.
_WINDOW_S = 30.0
_WINDOW_STEPS = 20
# A rank holds back the others if it waits for data by so much more of the time, or makes so few of their steps.
_MORE_WAITING = 0.25
_FEWER_STEPS = 0.7


@dataclass(frozen=True, slots=True)
class PageSample:
    """A gang's progress at one time; of several local ranks the slowest step and the longest wait count."""

    time_s: float
    step: int
    samples: int
    data_wait_ns: int
    loss: float = math.nan
    restored_step: int = 0  # Step at which this attempt began
    step_age_s: float = 0.0  # Time since the last step
    since_age_s: float | None = None  # Time since the first step after the start or resume; None: none yet
    training_epoch: int = 0  # Finished passes over the data
    training_epochs: int = 0  # Planned passes over the data; 0: not reported
    evaluated: int = 0  # Mini-batches evaluated so far, by the rank that is farthest
    evaluated_in_row: int = 0  # Of these, those since its last step
    evaluated_age_s: float | None = None  # Time since the last one; None: it trains


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


class IdleClock:
    """Seconds for which a gang's part has neither advanced nor used its devices. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._at: float | None = None
        self._progress: tuple[int, ...] = ()

    def add(self, progress: tuple[int, ...], is_used: Callable[[], bool], now: float) -> None:
        """Count the time since the last call. progress: counters of its ranks. is_used: returns whether its devices are
        in use. now: seconds."""
        before, self._at = self._at, now
        if progress != self._progress or is_used():
            self._progress, self.idle_s = progress, 0.0
        elif before is not None:
            self.idle_s += now - before

    def stand(self) -> None:
        """Leave out the time until the next call of `add`: the part may not run."""
        self._at = None

    def begin_anew(self) -> None:
        """Forget the time so far."""
        self._at, self.idle_s = None, 0.0

    def journal(self) -> dict[str, Any]:
        return {"idle_s": self.idle_s, "progress": list(self._progress)}

    def recall(self, left: Mapping[str, Any]) -> None:
        """Continue as the clock of a former daemon was. The time between the two is left out."""
        self.idle_s, self._progress = float(left["idle_s"]), tuple([int(count) for count in left["progress"]])


class IdleWatch:
    """Whether a gang's part on this node uses its devices.

    A virtual device is in use while the job's processes use a processor. Of other devices the driver reports it, and
    where it reports nothing they count as used. `after_s`: time without use after which the part is idle; zero: never.
    """

    def __init__(self, host: NodeContext, group: str, device_mask: int, after_s: float) -> None:
        self._host = host
        self._group = group
        self._mask = device_mask
        self.after_s = after_s
        self._clock = IdleClock()
        self._looked_at = -math.inf
        self._busy: tuple[float, float] | None = None  # Time and CPU time when a processor was last in use
        self._noted_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Return whether it has been idle for `after_s`."""
        return 0 < self.after_s <= self._clock.idle_s

    @property
    def is_news(self) -> bool:
        """Return whether the next daemon would have another answer by the last notes, or be a minute behind."""
        is_noted = 0 < self.after_s <= self._noted_s
        return is_noted != self.is_idle or self._clock.idle_s - self._noted_s >= _NOTED_S

    def journal(self) -> dict[str, Any]:
        """Return what the next daemon cannot find out."""
        self._noted_s = self._clock.idle_s
        return {"idle": {**self._clock.journal(), "busy": self._busy and list(self._busy)}}

    def recall(self, left: Mapping[str, Any]) -> None:
        """Continue as the watch of a former daemon, since the same boot. Raises for notes that cannot be read."""
        if noted := left.get("idle"):
            self._clock.recall(noted)
            self._noted_s = self._clock.idle_s
            self._busy = (float(noted["busy"][0]), float(noted["busy"][1])) if noted["busy"] else None

    def follow(self, found: Iterable[PageProgress], now: float) -> None:
        """Note the counters of the local ranks of a part that runs."""
        if not self._mask or not self.after_s or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        progress = tuple([count for one in found for count in (one.step, one.evaluated)])
        self._clock.add(progress, lambda: self._is_used(now), now)

    def stand(self) -> None:
        """Leave out the time until the next call of `follow`: another gang has its time slice."""
        self._clock.stand()

    def begin_anew(self) -> None:
        """Forget for how long it used nothing: it starts, stops, or saves its state."""
        self._clock.begin_anew()
        self._busy = None

    def _is_used(self, now: float) -> bool:
        if self._host.inventory.driver != VIRTUAL_DRIVER:
            return self._host.devices.are_used(self._host.cgroups.pids(self._group), self._mask) is not False
        cpu_s = self._host.cgroups.cpu_s(self._group)
        if self._busy is None or abs(cpu_s - self._busy[1]) > _IDLE_SHARE * (now - self._busy[0]):
            self._busy = now, cpu_s
            return True
        return False


class StepRate:
    """Progress of those local ranks of a gang that report steps, from their pages."""

    def __init__(self, pages: ControlPages, ranks: tuple[int, ...]) -> None:
        self._pages = pages
        self.ranks = ranks
        self._look: PageSample | None = None
        self.iteration_s = 0.0  # As last measured

    @property
    def first_step_ns(self) -> int:
        """Time when the last local rank finished its first step since the gang was started or resumed; 0 before."""
        times = [self._pages.progress(rank).first_step_time_ns for rank in self.ranks] if self._pages.readable else []
        return max(times) if times and all(times) else 0

    @property
    def last_step_ns(self) -> int:
        """Time of the newest step of a local rank; 0 before, and without pages."""
        return max(self._pages.progress(rank).step_time_ns for rank in self.ranks) if self._pages.readable else 0

    def forget(self) -> None:
        """Drop the last sample, since time in which the gang is parked does not count."""
        self._look = None

    def measure(self) -> tuple[PageSample, float, float] | None:
        """Return the newest sample, steps/s and data-wait share since the last call; None before the first boundary."""
        found = [self._pages.progress(rank) for rank in self.ranks]
        if not any(progress.step for progress in found):
            return None
        if any(progress.phase == PagePhase.REPLAY for progress in found):
            self._look = None  # Replayed steps are no progress
            return None
        slowest = slowest_of(found)
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


def slowest_of(found: Sequence[PageProgress]) -> PageProgress:
    """Return the slowest rank, of those that take samples: parameter servers take none, and have no loss."""
    taking = [progress for progress in found if progress.samples]
    return min(taking or found, key=lambda progress: progress.step)


def _evaluation_of(found: Iterable[PageProgress], now_ns: int) -> tuple[int, int, float | None]:
    """Return the mini-batches evaluated so far, those since the last step, and the time since the last one, of the rank
    that is farthest; zero and None where no rank evaluates."""
    evaluating = [one for one in found if one.phase == PagePhase.EVALUATION and one.evaluated_time_ns]
    if not evaluating:
        return 0, 0, None
    first = max(evaluating, key=lambda one: (one.evaluated, one.evaluated_time_ns))
    in_row = max(0, first.evaluated - first.evaluated_before)
    return first.evaluated, in_row, max(0.0, (now_ns - first.evaluated_time_ns) / 1e9)


class Watched:
    """What is known of the ranks since the gang was last started or resumed: whether they hang, are idle, or one holds
    back the others. Times are seconds of one monotonic clock."""

    def __init__(self, since: float) -> None:
        self._since = since
        self.ranks: Mapping[int, PageProgress] = {}
        self._stepped_at: float | None = None
        self._longest_pause = 0.0
        self._window: Mapping[int, PageProgress] = {}  # Counters at the begin of the window
        self._window_since = since
        self._held_back = ""  # Result of the last complete window
        self._busy_at: float | None = None
        self._busy_s = 0.0

    def add(self, ranks: Mapping[int, PageProgress], now: float) -> None:
        """Note the counters of all local ranks."""
        if _slowest(ranks) > _slowest(self.ranks):
            if self._stepped_at is not None:
                self._longest_pause = max(self._longest_pause, now - self._stepped_at)
            self._stepped_at = now
        self.ranks = ranks
        window, seconds = self._window, now - self._window_since
        if window:
            steps = {rank: ranks[rank].step - begin.step for rank, begin in window.items() if rank in ranks}
            if seconds < _WINDOW_S or not steps or median(steps.values()) < _WINDOW_STEPS:
                return
            waits = {rank: (ranks[rank].data_wait_ns - window[rank].data_wait_ns) / 1e9 / seconds for rank in steps}
            self._held_back = _held_back(steps, waits)
        self._window, self._window_since = ranks, now

    def add_processor_time(self, processor_s: float, now: float) -> None:
        """Note the CPU time of all processes of a job without boundaries."""
        if self._busy_at is None or abs(processor_s - self._busy_s) > _IDLE_SHARE * (now - self._busy_at):
            self._busy_at, self._busy_s = now, processor_s

    def stall_reason(self, now: float) -> str:
        """Return why the gang makes no progress, as a text for users; empty while all is well."""
        if self._stepped_at is not None:
            return self._hang(now - self._stepped_at) or self._held_back
        if self._busy_at is not None:
            idle = format_duration(now - self._busy_at)
            too_long = now - self._busy_at >= IDLE_S
            return f"its processes have used less than 1 % of a processor for {idle}" if too_long else ""
        waited = now - self._since
        if self.ranks and waited >= IDLE_S:
            return f"no step in the {format_duration(waited)} that it has been running"
        return ""

    def _hang(self, seconds: float) -> str:
        phases = {progress.phase for progress in self.ranks.values()}
        limit = max(HANG_S, _HANG_PAUSES * self._longest_pause) * (_LONG_PHASE if phases & _LONG_PHASES else 1.0)
        if seconds < limit or phases <= {PagePhase.DONE}:
            return ""
        slowest = _slowest(self.ranks)
        behind = [rank for rank, progress in sorted(self.ranks.items()) if progress.step == slowest]
        text = f"no step for {format_duration(seconds)}, step {slowest} is the last"
        return text if len(behind) == len(self.ranks) else f"{text}; {_ranks(behind)} behind the others"


def _held_back(steps: Mapping[int, int], waits: Mapping[int, float]) -> str:
    if len(steps) < 2:
        return ""
    rank = min(steps, key=lambda one: (steps[one], one))
    usual = median([count for other, count in steps.items() if other != rank])
    if steps[rank] < _FEWER_STEPS * usual:
        return f"rank {rank} makes {counted(steps[rank], 'step')} while the others make {usual:g}"
    rank = max(waits, key=lambda one: (waits[one], -one))
    others = median([share for other, share in waits.items() if other != rank])
    if waits[rank] - others > _MORE_WAITING:
        return f"rank {rank} waits for data {waits[rank]:.0%} of the time, the others {others:.0%}: it holds them back"
    return ""


def _slowest(ranks: Mapping[int, PageProgress]) -> int:
    return min([progress.step for progress in ranks.values()], default=0)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''} are"


class StallWatch:
    """Stall detection for one gang's local ranks."""

    def __init__(self, pages: ControlPages, ranks: tuple[int, ...]) -> None:
        self._pages = pages
        self._ranks = ranks
        self._watched: Watched | None = None
        self._processes_at = 0.0

    def stall_reason(self, is_running: bool) -> str:
        """Return why the gang makes no progress; "" if it does. `is_running`: it should run, its pages are readable."""
        now = time.monotonic()
        if not is_running:
            self._watched = None
            return ""
        self._watched = self._watched or Watched(now)
        self._watched.add({rank: self._pages.progress(rank) for rank in self._ranks}, now)
        return self._watched.stall_reason(now)

    async def look_at_processes(self, pids: Iterable[int], now: float) -> None:
        """Measure the CPU time of a job without boundaries, once a minute."""
        if self._watched is None or now - self._processes_at < _PROCESSES_S:
            return
        self._processes_at = now
        seconds = await asyncio.to_thread(processor_s, tuple(pids))
        if self._watched is not None:
            self._watched.add_processor_time(seconds, now)


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
