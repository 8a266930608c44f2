"""Measurements of running jobs from their progress reports: received device time, and rates by number of GPUs.

A job reports about once a second while it steps, and not while it is parked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Protocol, TypeVar

from ganger.job_state import JobState

from ganger_master.core.gang_model import Gang, GangIntent
from ganger_master.core.job_model import JobRecord
from ganger_master.policies.trials import FIRST_WINDOWS, ProgressSample, RateWindows, TrialPace

# Seconds between two reports of a job that steps all the time, at most.
_STEADY_S: Final = 2.5
# The time per step grows at most by this factor; it shrinks at once.
_SLOWER: Final = 1.1

_Measured = TypeVar("_Measured")


class JobRates(Protocol):
    """Measurements of jobs, by number. Rates are windows of several steps each, in steps per second."""

    def alone(self, number: int) -> tuple[float, ...]:
        """Return the windows when it last had its devices to itself; empty if that was too short."""
        ...

    def present(self, number: int) -> tuple[float, ...]:
        """Return the windows since it runs as it does now, without the first one."""
        ...

    def beside(self, number: int) -> frozenset[int]:
        """Return the numbers of the jobs on its devices, without its own."""
        ...

    def crowd(self, number: int) -> tuple[int, Mapping[int, tuple[float, ...]]]:
        """Return the devices that other jobs use on its nodes, and the windows by that number; nothing if it was not
        measured."""
        ...

    def utilisation(self, number: int) -> float:
        """Return the utilization of its devices while alone, from 0 to 1."""
        ...

    def signature(self, number: int) -> str:
        """Return the key of jobs that behave alike."""
        ...


class JobMeasures(Generic[_Measured]):
    """Measurements of one kind, by job number. One writer."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Measured] = {}

    def forget(self, number: int) -> None:
        """Drop a job that has ended."""
        self._jobs.pop(number, None)

    def keep(self, is_live: Callable[[int], bool]) -> None:
        """Drop the jobs that are not live; their ends were not reported."""
        for number in [number for number in self._jobs if not is_live(number)]:
            self.forget(number)

    @property
    def remembered(self) -> Mapping[int, _Measured]:
        """Return the measurements, for a planner that continues from them."""
        return self._jobs

    def recall(self, remembered: Mapping[int, _Measured]) -> None:
        """Take over the measurements of an earlier planner."""
        self._jobs = dict(remembered)


@dataclass(slots=True)
class AttainedTime:
    """The last report of a job: `step` was done at `time_s`; and `received_s` since the first one."""

    step: int
    time_s: float
    step_s: float = float("inf")
    received_s: float = 0.0


class AttainedService(JobMeasures[AttainedTime]):
    """The device time that each running job has received: a time-sliced job steps only in its slices.

    Between two close reports it stepped all the time; between two distant ones its steps count, each with the job's
    time per step. Times are by the clocks of nodes, of which only differences count.
    """

    def record(self, number: int, step: int, time_s: float) -> None:
        """Record a report: `step` was done at `time_s`."""
        known = self._jobs.get(number)
        if known is None:
            self._jobs[number] = AttainedTime(step, time_s)
            return
        steps, span_s = step - known.step, time_s - known.time_s
        known.step, known.time_s = step, time_s
        if steps <= 0 or span_s <= 0.0:
            return
        if span_s <= _STEADY_S:
            known.received_s += span_s
            known.step_s = span_s / steps
            return
        known.step_s = min(_SLOWER * known.step_s, span_s / steps)
        known.received_s += min(span_s, steps * known.step_s)

    @property
    def received_s(self) -> dict[int, float]:
        """The seconds received since each job's first report."""
        return {number: known.received_s for number, known in self._jobs.items()}


class SpeedSource(Protocol):
    """Measured rates of elastic jobs, by job number, in one unit per second that is the same for all sizes of a job."""

    def windows(self, number: int) -> tuple[float, ...]:
        """Return the newest windows since the job's size changed, oldest first."""
        ...

    def rates(self, number: int) -> Mapping[int, float]:
        """Return the last measured rate with each number of GPUs."""
        ...


@dataclass(frozen=True, slots=True)
class SpeedsOfJob:
    """`since_s`: when the present run is steady; `rates`: the last one by number of GPUs."""

    # Epoch, devices and millicores of the present run; None while it does not run.
    running: tuple[int, int, int] | None = None
    since_s: float = 0.0
    windows: RateWindows = field(default_factory=RateWindows)
    rates: Mapping[int, float] = field(default_factory=dict)


class SpeedsByGpus(JobMeasures[SpeedsOfJob]):
    """Rates by job number, in reported steps per second, comparable between the sizes of one job. One writer."""

    def __init__(self, pace: TrialPace) -> None:
        super().__init__()
        self._pace = pace

    def put(self, job: JobRecord, gang: Gang | None, now: float) -> None:
        """Record a job as it is now. With other GPUs or cores it is measured anew."""
        if job.state.is_finished or not job.spec.is_elastic:
            self.forget(job.number)
            return
        seen = self._jobs.get(job.number, SpeedsOfJob())
        runs = (
            gang is not None and job.state is JobState.HOLDING and gang.intent is GangIntent.RUN and job.running_since
        )
        running = None
        if gang is not None and runs:
            running = gang.epoch, gang.devices, sum([sum(claim.millicores) for claim in gang.claims])
        if running != seen.running:
            seen = replace(seen, running=running, since_s=now + self._pace.settle_s, windows=RateWindows())
        self._jobs[job.number] = seen

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

    def windows(self, number: int) -> tuple[float, ...]:
        """Return the last full windows of its present run, oldest first."""
        seen = self._jobs.get(number)
        return seen.windows.rates if seen is not None else ()

    def rates(self, number: int) -> Mapping[int, float]:
        """Return the rate last measured with each number of GPUs, in steps per second."""
        seen = self._jobs.get(number)
        return seen.rates if seen is not None else {}
