"""Rates of running jobs: alone on their devices, co-located with others, and under load of other jobs on their nodes.

The planner reports every changed job and every progress report. All rates may be lost at any time: they are measured
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, TypeAlias

from ganger.cluster.topology import bits
from ganger.job_state import JobState

from ganger_master.core.gang_model import Gang, GangIntent
from ganger_master.core.job_model import JobRecord
from ganger_master.policies.trials import ProgressSample, RateWindows, TrialPace

_DEFAULT: Final = TrialPace()
_NO_WINDOWS: Final = RateWindows()
# The newest windows of a job that ran alone.
_MOST_BASELINE_WINDOWS: Final = 16
# The newest utilisation reports of a job that ran alone.
_MOST_UTILISATIONS: Final = 60
# Windows kept for each load of a job, and loads kept for each job.
_MOST_LOAD_WINDOWS: Final = 16
_MOST_LOADS: Final = 16

# Node name and device number.
Devices: TypeAlias = frozenset[tuple[str, int]]
_NO_DEVICES: Final[Devices] = frozenset()
# Windows in steps/s, by the number of devices that other jobs use on the job's nodes.
RatesByLoad: TypeAlias = Mapping[int, tuple[float, ...]]
# Millicores and number of devices of a running job; None while it does not run.
_Footprint: TypeAlias = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class _LoadedJob:
    """Rates of one job by load. Another `footprint` makes them void. Reports count from `since_s` on."""

    devices: Devices
    footprint: _Footprint
    load: int = 0
    since_s: float = 0.0
    windows: RateWindows = field(default_factory=RateWindows)
    rates: RatesByLoad = field(default_factory=dict)


RememberedLoads: TypeAlias = Mapping[int, _LoadedJob]


class InterferenceRates:
    """Rates of jobs by the number of devices that other jobs use on the same nodes.

    They show how much each job loses to jobs that share its host's cores, links and memory. No placement is changed to
    measure them: jobs come and go on their own. Jobs are named by number.

    Args:
        settle_s: Time until caches and data loaders have followed a change of load.
        window_s: Least length of a window.
        window_steps: Least number of steps of a window.
    """

    def __init__(self, settle_s: float, window_s: float, window_steps: int) -> None:
        self._settle_s, self._window_s, self._window_steps = settle_s, window_s, window_steps
        self._jobs: dict[int, _LoadedJob] = {}
        # Number of devices in use, by node and job.
        self._used: dict[str, dict[int, int]] = {}

    def put(self, number: int, devices: Devices, footprint: _Footprint, since_s: float, now: float) -> None:
        """Record the devices of a job, none while it does not run. Its reports count from `since_s` on."""
        old = self._jobs.get(number, _LoadedJob(frozenset(), footprint))
        rates = old.rates if old.footprint == footprint else {}
        self._jobs[number] = _LoadedJob(devices, footprint, -1, since_s, rates=rates)
        touched = {node for node, _ in old.devices | devices}
        for node in touched:
            used = self._used.setdefault(node, {})
            count = sum(one == node for one, _ in devices)
            if count:
                used[number] = count
            else:
                used.pop(number, None)
            if not used:
                del self._used[node]
        self._update_loads({number} | {other for node in touched for other in self._used.get(node, ())}, now)

    def forget(self, number: int, now: float) -> None:
        """Remove a job that has ended."""
        if number in self._jobs:
            self.put(number, frozenset(), None, now, now)
            del self._jobs[number]

    def record(self, number: int, sample: ProgressSample, now: float) -> None:
        """Record a progress report of a job that is alone on its devices."""
        job = self._jobs.get(number)
        if job is None or not job.devices or now < job.since_s:
            return
        windows = job.windows.after(sample, self._window_s, self._window_steps)
        if windows.rates is not job.windows.rates:
            rates_now = (*job.rates.get(job.load, ()), windows.rates[-1])[-_MOST_LOAD_WINDOWS:]
            rates = {load: some for load, some in job.rates.items() if load != job.load}
            if len(rates) >= _MOST_LOADS:
                # The first key is the load that was measured longest ago.
                del rates[next(iter(rates))]
            job = replace(job, rates={**rates, job.load: rates_now})
        self._jobs[number] = replace(job, windows=windows)

    def load(self, number: int) -> int:
        """Return the number of devices that other jobs use on the job's nodes."""
        job = self._jobs.get(number)
        return 0 if job is None else max(0, job.load)

    def rates(self, number: int) -> RatesByLoad:
        """Return the job's windows in steps/s, by load."""
        job = self._jobs.get(number)
        return {} if job is None else job.rates

    @property
    def remembered(self) -> RememberedLoads:
        """State from which `recall` continues."""
        return self._jobs

    def recall(self, remembered: RememberedLoads) -> None:
        """Continue from what an earlier instance `remembered`."""
        self._jobs, self._used = dict(remembered), {}
        for number, job in self._jobs.items():
            for node, _ in job.devices:
                used = self._used.setdefault(node, {})
                used[number] = used.get(number, 0) + 1

    def _update_loads(self, numbers: Iterable[int], now: float) -> None:
        for number in numbers:
            job = self._jobs[number]
            nodes = {node for node, _ in job.devices}
            load = sum(count for node in nodes for other, count in self._used[node].items() if other != number)
            if load != job.load:
                since_s = max(job.since_s, now + self._settle_s)
                self._jobs[number] = replace(job, load=load, since_s=since_s, windows=RateWindows())


@dataclass(frozen=True, slots=True)
class _Baseline:
    """Rates and utilisation of a job that is alone on its devices, in one epoch and with one number of cores.

    `first` holds epoch, millicores and rate of the first window in another epoch or with other cores. One window does
    not show the variance, so the older rates stand until a second window confirms the change.
    """

    epoch: int = 0
    millicores: int = 0
    rates: tuple[float, ...] = ()
    utilisations: tuple[float, ...] = ()
    first: tuple[int, int, float] | None = None

    def after(self, epoch: int, millicores: int, rate: float) -> _Baseline:
        """Return the baseline after one more window."""
        if (epoch, millicores) == (self.epoch, self.millicores):
            return replace(self, rates=(*self.rates, rate)[-_MOST_BASELINE_WINDOWS:])
        if self.first is None or self.first[:2] != (epoch, millicores):
            return replace(self, first=(epoch, millicores, rate))
        return _Baseline(epoch, millicores, (self.first[2], rate), self.utilisations)

    @property
    def utilisation(self) -> float:
        """Mean utilisation of the devices, from 0 to 1; 1 without reports."""
        return fmean(self.utilisations) if self.utilisations else 1.0


@dataclass(frozen=True, slots=True)
class _RatedJob:
    """Rates and neighbours of one job.

    `devices` are empty unless the job runs, and for time-sliced jobs, which no other job runs beside.
    """

    create_time: float
    signature: int
    epoch: int = 0
    millicores: int = 0
    devices: Devices = _NO_DEVICES
    is_time_sliced: bool = False
    neighbours: frozenset[int] = frozenset()
    # Epoch that ran last, and the time when it has warmed up.
    warm: tuple[int, float] = (0, 0.0)
    # Reports count from then on: this job and its neighbours have settled.
    since_s: float = float("inf")
    windows: RateWindows = _NO_WINDOWS
    baseline: _Baseline = _Baseline()


@dataclass(frozen=True, slots=True)
class RememberedColocations:
    """State of `ColocationRates`, by job number."""

    jobs: Mapping[int, _RatedJob] = field(default_factory=dict)
    loads: RememberedLoads = field(default_factory=dict)

    def create_time(self, number: int) -> float | None:
        """Return when the job with this number was submitted; None for an unknown number."""
        job = self.jobs.get(number)
        return None if job is None else job.create_time


class ColocationRates:
    """Rates of jobs alone and co-located, by job number.

    `now` is in seconds of the master's clock, like all times of jobs.
    """

    def __init__(self, pace: TrialPace = _DEFAULT) -> None:
        self._pace = pace
        self._jobs: dict[int, _RatedJob] = {}
        # Numbers of the jobs on each device.
        self._occupants: dict[tuple[str, int], set[int]] = {}
        self._interference = InterferenceRates(pace.settle_s, pace.window_s, pace.window_steps)

    # -- reports -------------------------------------------------------------------------------------------------------

    def put(self, job: JobRecord, gang: Gang | None, signature: int, now: float) -> None:
        """Record a job's current state. `signature` is the same for all jobs of one series."""
        number = job.number
        if job.state.is_finished:
            self.forget(number, now)
            return
        rated = self._jobs.get(number)
        if rated is None or rated.create_time != job.create_time:
            self.forget(number, now)
            rated = self._jobs[number] = _RatedJob(job.create_time, signature)
        is_running = _is_running(job, gang)
        is_time_sliced = is_running and gang is not None and bool(gang.node_set)
        devices = _devices_of(gang) if gang is not None and is_running and not is_time_sliced else _NO_DEVICES
        millicores = sum(sum(claim.millicores) for claim in gang.claims) if gang is not None and is_running else 0
        current = (devices, is_time_sliced, job.epoch, millicores)
        if current == (rated.devices, rated.is_time_sliced, rated.epoch, rated.millicores):
            return
        begins_s = max(now, job.running_since)
        warm = rated.warm
        if is_running and job.epoch != warm[0]:
            # A job that was parked in memory resumes in the same epoch and need not warm up again.
            warm = job.epoch, begins_s + self._pace.warm_s
        affected = self._occupy(number, rated.devices, devices)
        since_s = max(begins_s + self._pace.settle_s, warm[1])
        self._interference.put(number, devices, (millicores, len(devices)) if devices else None, since_s, now)
        self._jobs[number] = replace(
            rated,
            epoch=job.epoch,
            millicores=millicores,
            devices=devices,
            is_time_sliced=is_time_sliced,
            warm=warm,
            since_s=since_s if is_running else float("inf"),
            windows=_NO_WINDOWS,
        )
        for other in {number, *affected}:
            self._update_neighbours(other, now)

    def forget(self, number: int, now: float) -> None:
        """Remove a job that has ended."""
        rated = self._jobs.pop(number, None)
        self._interference.forget(number, now)
        if rated is not None:
            for other in self._occupy(number, rated.devices, _NO_DEVICES):
                self._update_neighbours(other, now)

    def keep(self, is_live: Callable[[int], bool], now: float) -> None:
        """Remove all jobs that are not live. Their ends were not reported."""
        for number in [number for number in self._jobs if not is_live(number)]:
            self.forget(number, now)

    def record(
        self,
        number: int,
        step: int,
        time_s: float,
        utilisation: float | None,
        now: float,
        resumed_s: float = float("nan"),
    ) -> None:
        """Record a progress report.

        Args:
            number: Number of the job.
            step: Steps done so far.
            time_s: When the last one was done, by the node's clock, which may differ from the master's.
            utilisation: Utilisation of the job's devices, from 0 to 1; None if it was not measured.
            now: Time of the report, by the master's clock.
            resumed_s: `ProgressSample.since_s` of the report.
        """
        rated = self._jobs.get(number)
        if rated is None or now < rated.since_s:
            return
        # The last step of an earlier time slice, or a report that does not show which slice it belongs to.
        if rated.is_time_sliced and not time_s >= resumed_s:
            return
        sample = ProgressSample(time_s, step, resumed_s)
        if not rated.neighbours:
            self._interference.record(number, sample, now)
        if utilisation is not None and self._is_alone(rated):
            utilisations = (*rated.baseline.utilisations, utilisation)[-_MOST_UTILISATIONS:]
            rated = self._jobs[number] = replace(rated, baseline=replace(rated.baseline, utilisations=utilisations))
        windows = rated.windows.after(sample, self._pace.window_s, self._pace.window_steps)
        if windows is rated.windows:
            return
        is_full = windows.rates is not rated.windows.rates
        rated = replace(rated, windows=windows)
        if is_full and self._is_alone(rated):
            rated = replace(rated, baseline=rated.baseline.after(rated.epoch, rated.millicores, windows.rates[-1]))
        self._jobs[number] = rated

    def recall(self, remembered: RememberedColocations) -> None:
        """Continue from what an earlier instance `remembered`."""
        self._jobs, self._occupants = dict(remembered.jobs), {}
        for number, rated in self._jobs.items():
            for device in rated.devices:
                self._occupants.setdefault(device, set()).add(number)
        self._interference.recall(remembered.loads)

    # -- measurements --------------------------------------------------------------------------------------------------

    @property
    def remembered(self) -> RememberedColocations:
        """State from which `recall` continues."""
        return RememberedColocations(self._jobs, self._interference.remembered)

    def alone(self, number: int) -> tuple[float, ...]:
        """Return the windows of the job's baseline, in steps/s, oldest first."""
        rated = self._jobs.get(number)
        return () if rated is None else rated.baseline.rates

    def present(self, number: int) -> tuple[float, ...]:
        """Return the windows since the job's neighbours, devices or cores changed last, in steps/s, oldest first."""
        rated = self._jobs.get(number)
        return () if rated is None else rated.windows.rates

    def beside(self, number: int) -> frozenset[int]:
        """Return the numbers of the jobs that run on devices of this one."""
        rated = self._jobs.get(number)
        return frozenset() if rated is None else rated.neighbours

    def crowd(self, number: int) -> tuple[int, RatesByLoad]:
        """Return the devices that other jobs use on the job's nodes now, and the job's windows in steps/s by load."""
        return self._interference.load(number), self._interference.rates(number)

    def utilisation(self, number: int) -> float:
        """Return the utilisation of the job's devices while it is alone on them, from 0 to 1; 1 without reports."""
        rated = self._jobs.get(number)
        return 1.0 if rated is None else rated.baseline.utilisation

    def signature(self, number: int) -> str:
        """Return the signature of the job's series as 16 hexadecimal digits; empty for an unknown job."""
        rated = self._jobs.get(number)
        return "" if rated is None else f"{rated.signature:016x}"

    # -- one job -------------------------------------------------------------------------------------------------------

    def _is_alone(self, rated: _RatedJob) -> bool:
        """Whether the job has no neighbours, and at least the cores of its baseline in this epoch.

        A host gives up cores before its guest arrives. Until then it has no neighbours, yet is slower than alone.
        """
        baseline = rated.baseline
        return not rated.neighbours and (rated.epoch != baseline.epoch or rated.millicores >= baseline.millicores)

    def _occupy(self, number: int, old: Devices, new: Devices) -> frozenset[int]:
        """Move a job from old to new devices. Return the other jobs on devices that it leaves or now holds."""
        found: set[int] = set()
        for device in old - new:
            self._occupants[device].discard(number)
            found |= self._occupants[device]
            if not self._occupants[device]:
                del self._occupants[device]
        for device in new:
            occupants = self._occupants.setdefault(device, set())
            found |= occupants
            occupants.add(number)
        return frozenset(found - {number})

    def _update_neighbours(self, number: int, now: float) -> None:
        rated = self._jobs[number]
        neighbours = frozenset(other for device in rated.devices for other in self._occupants[device]) - {number}
        if neighbours == rated.neighbours:
            return
        # While a neighbour warms up, the rates beside it do not count.
        settled_s = max([self._jobs[other].since_s for other in neighbours], default=now)
        since_s = max(rated.since_s, settled_s, now + self._pace.settle_s)
        self._jobs[number] = replace(rated, neighbours=neighbours, since_s=since_s, windows=_NO_WINDOWS)


def _is_running(job: JobRecord, gang: Gang | None) -> bool:
    holds = gang is not None and job.state is JobState.HOLDING and gang.intent is GangIntent.RUN
    return holds and bool(job.running_since)


def _devices_of(gang: Gang) -> Devices:
    return frozenset((claim.node, device) for claim in gang.claims for device in bits(claim.device_mask))
