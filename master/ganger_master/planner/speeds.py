"""How fast elastic jobs are with each number of GPUs they have had: window by window now, and what was usual before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ganger_master.core.model import Gang, GangIntent, JobRecord, JobState
from ganger_master.planner.core_profiles import TrialPace
from ganger_master.planner.windows import ProgressSample, RateWindows
from ganger_master.policies.trial_test import FIRST_WINDOWS


@dataclass(frozen=True, slots=True)
class _Seen:
    # Epoch, devices and cores of the present stretch; None while it does not run.
    running: tuple[int, int, int] | None = None
    since_s: float = 0.0
    windows: RateWindows = field(default_factory=RateWindows)
    rates: Mapping[int, float] = field(default_factory=dict)


Remembered: TypeAlias = Mapping[int, _Seen]


class SpeedsByGpus:
    """One writer. Rates are in whatever is reported of a job per second, the same for all its sizes."""

    def __init__(self, pace: TrialPace) -> None:
        self._pace = pace
        self._jobs: dict[int, _Seen] = {}

    def put(self, job: JobRecord, gang: Gang | None, now: float) -> None:
        """A job as it is now. Whoever has other GPUs or cores than before is measured anew."""
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
        """Forgets all others: nobody said how they ended."""
        for number in [number for number in self._jobs if not is_live(number)]:
            self.forget(number)

    def record(self, number: int, done: int, time_s: float, now: float, since_s: float = float("nan")) -> bool:
        """A report: so much was done by then. Whether it has filled a window. `since_s`: as `Look` has it."""
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
        """For one that goes on from there."""
        return self._jobs

    def recall(self, remembered: Remembered) -> None:
        """What one before this remembered."""
        self._jobs = dict(remembered)

    def windows(self, number: int) -> tuple[float, ...]:
        """Of the last full windows of its present stretch, oldest first."""
        seen = self._jobs.get(number)
        return seen.windows.rates if seen is not None else ()

    def rates(self, number: int) -> Mapping[int, float]:
        """By number of GPUs, as last measured with each."""
        seen = self._jobs.get(number)
        return seen.rates if seen is not None else {}
