"""Measured rates of elastic jobs by number of GPUs: windows at the present size, and the last rate at each other
size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from ganger.job_state import JobState

from ganger_master.core.gang_model import Gang, GangIntent
from ganger_master.core.job_model import JobRecord
from ganger_master.planner.core_profiles import TrialPace
from ganger_master.planner.windows import ProgressSample, RateWindows
from ganger_master.policies.trials import FIRST_WINDOWS


class SpeedSource(Protocol):
    """Measured rates of elastic jobs, by job number, in one unit per second that is the same for all sizes of a job."""

    def windows(self, number: int) -> tuple[float, ...]:
        """Return the newest windows since the job's size changed, oldest first."""
        ...

    def rates(self, number: int) -> Mapping[int, float]:
        """Return the last measured rate with each number of GPUs."""
        ...


@dataclass(frozen=True, slots=True)
class _Seen:
    # Epoch, devices and millicores of the present run; None while it does not run.
    running: tuple[int, int, int] | None = None
    since_s: float = 0.0
    windows: RateWindows = field(default_factory=RateWindows)
    rates: Mapping[int, float] = field(default_factory=dict)


Remembered: TypeAlias = Mapping[int, _Seen]


class SpeedsByGpus:
    """Rates by job number, in reported steps per second, comparable between the sizes of one job. One writer."""

    def __init__(self, pace: TrialPace) -> None:
        self._pace = pace
        self._jobs: dict[int, _Seen] = {}

    def put(self, job: JobRecord, gang: Gang | None, now: float) -> None:
        """Record a job as it is now. With other GPUs or cores it is measured anew."""
        if job.state.is_finished or not job.spec.is_elastic:
            self.forget(job.number)
            return
        seen = self._jobs.get(job.number, _Seen())
        runs = (
            gang is not None and job.state is JobState.HOLDING and gang.intent is GangIntent.RUN and job.running_since
        )
        running = None
        if gang is not None and runs:
            running = gang.epoch, gang.devices, sum([sum(claim.millicores) for claim in gang.claims])
        if running != seen.running:
            seen = replace(seen, running=running, since_s=now + self._pace.settle_s, windows=RateWindows())
        self._jobs[job.number] = seen

    def forget(self, number: int) -> None:
        self._jobs.pop(number, None)

    def keep(self, is_live: Callable[[int], bool]) -> None:
        """Drop the jobs that are not live; their ends were not reported."""
        for number in [number for number in self._jobs if not is_live(number)]:
            self.forget(number)

    def record(self, number: int, done: int, time_s: float, now: float, since_s: float = float("nan")) -> bool:
        """Record that `done` steps were done at `time_s`. Return whether that has filled a window. `since_s`: as in
        `ProgressSample`."""
        seen = self._jobs.get(number)
        if seen is None or seen.running is None or now < seen.since_s:
            return False
        windows = seen.windows.after(
            ProgressSample(time_s, done, since_s), self._pace.window_s, self._pace.window_steps
        )
        is_full = windows.rates is not seen.windows.rates
        rates = seen.rates
        if is_full and len(windows.rates) >= FIRST_WINDOWS:
            rates = {**rates, seen.running[1]: windows.rate}
        self._jobs[number] = replace(seen, windows=windows, rates=rates)
        return is_full

    @property
    def remembered(self) -> Remembered:
        """The measurements, for a planner that continues from them."""
        return self._jobs

    def recall(self, remembered: Remembered) -> None:
        """Take over the measurements of an earlier planner."""
        self._jobs = dict(remembered)

    def windows(self, number: int) -> tuple[float, ...]:
        """Return the last full windows of its present run, oldest first."""
        seen = self._jobs.get(number)
        return seen.windows.rates if seen is not None else ()

    def rates(self, number: int) -> Mapping[int, float]:
        """Return the rate last measured with each number of GPUs, in steps per second."""
        seen = self._jobs.get(number)
        return seen.rates if seen is not None else {}
