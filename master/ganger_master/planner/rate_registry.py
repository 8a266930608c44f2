"""The registry of measured rates: of jobs alone and co-located, by load of their nodes, by GPUs and by cores.

A rate holds under a condition: the epoch, devices and cores of a job, and the jobs beside it. When one of these
changes, its windows begin anew, once the job has settled. In a simulation the models answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Final

from ganger.cluster.view import View
from ganger.job_state import JobState

from ganger_master.core.gang_model import Gang, GangIntent
from ganger_master.core.job_model import JobRecord
from ganger_master.core.plan_changes import CoresCurve
from ganger_master.estimators.cores_and_memory import CpuPoint
from ganger_master.planner.core_profiles import CoreProfile, curves_of
from ganger_master.planner.cores_curves import CurveNews
from ganger_master.planner.job_measurements import (
    AttainedTime,
    FitCache,
    MeasuredJob,
    RatesByLoad,
    ReportedLosses,
    RunCondition,
    SeriesRates,
    optimus_estimate,
)
from ganger_master.planner.remaining_time import (
    NO_FORECASTS,
    Calibration,
    ForecastLedger,
    RemainingTime,
    fitted_rate,
    remaining_time,
)
from ganger_master.planner.resource_trials import NO_MEMORY, MemorySample, ProfiledResources, next_trials
from ganger_master.policies.optimus_sizes import Believed, OptimusEstimate, nothing_believed
from ganger_master.policies.trials import ProgressSample, RateWindows, TrialPace
from ganger_master.policies.tunings import NOTHING, Known

# Series whose curves by cores are kept, the most recently measured ones.
_MOST_SERIES: Final = 4096
# Resizes by checkpoint whose pauses are kept, and the longest; a job that waits longer waits for room.
_MOST_PAUSES: Final = 16
_LONGEST_PAUSE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """A job's report.

    step, time_s: Steps done, and when the last one was done, by the node's clock.
    since_s: As in `ProgressSample`.
    use: Utilisation of the job's devices, from 0 to 1; None if it was not measured.
    loss: Loss at this step; NaN if it is not known.
    passes, passes_in_all: Passes over the data done, and in total; zero if not reported.
    evaluated, evaluated_in_row, evaluated_s: Mini-batches evaluated so far, those since the last step, and when the
    last one was done; NaN: the job trains.
    memory: Host memory on the node that the report is from.
    """

    step: int
    time_s: float
    since_s: float = math.nan
    use: float | None = None
    loss: float = math.nan
    passes: int = 0
    passes_in_all: int = 0
    evaluated: int = 0
    evaluated_in_row: int = 0
    evaluated_s: float = math.nan
    memory: MemorySample = NO_MEMORY

    @property
    def evaluates(self) -> bool:
        """Return whether the job evaluates now, so that it does no steps."""
        return not math.isnan(self.evaluated_s)


class JobRates:
    """What stages read of jobs, by number. Rates are in steps/s; windows are several steps long, oldest first. Of this
    class itself no job is measured, and it ignores all reports."""

    def alone(self, number: int) -> tuple[float, ...]:
        """Return the windows when the job last had its devices to itself; empty if that was too short."""
        return ()

    def present(self, number: int) -> tuple[float, ...]:
        """Return the windows since the job's neighbours, devices or cores changed last."""
        return ()

    def neighbours(self, number: int) -> frozenset[int]:
        """Return the numbers of the other jobs on the job's devices."""
        return frozenset()

    def interference(self, number: int) -> tuple[int, RatesByLoad]:
        """Return the devices that other jobs use on the job's nodes now, and its windows by load."""
        return 0, {}

    @property
    def compared(self) -> Sequence[int]:
        """Return the numbers of the jobs with windows for more than one load."""
        return ()

    def same_series(self, number: int, gpus: int) -> Mapping[str, SeriesRates]:
        """Return what gangs of the job's series with so many GPUs were measured with, by type of GPU."""
        return {}

    @property
    def series(self) -> Iterable[Mapping[str, SeriesRates]]:
        """Return the same of all series and numbers of GPUs."""
        return ()

    def utilisation(self, number: int) -> float:
        """Return the utilisation of the job's devices while it is alone on them, from 0 to 1; 1 without reports."""
        return 1.0

    def signature(self, number: int) -> str:
        """Return the key of jobs of the same series."""
        return ""

    def of_size(self, number: int) -> tuple[float, ...]:
        """Return the windows since the number of the job's GPUs or its cores changed, of an elastic job."""
        return ()

    def by_gpus(self, number: int) -> Mapping[int, float]:
        """Return the rate last measured with each number of GPUs, of an elastic job, in one unit for all sizes."""
        return {}

    @property
    def known(self) -> Known:
        """Return the curves of rates by cores, for a tuning policy."""
        return NOTHING

    @property
    def trials(self) -> Mapping[int, int]:
        """Return the millicores per GPU that jobs are to have for their trials, by job number."""
        return {}

    @property
    def received_s(self) -> Mapping[int, float]:
        """Return the seconds of device time that each running job has received since its first report."""
        return {}

    def believed(self, gpus_per_node: int) -> Believed:
        """Return the function that estimates the remaining steps and the speeds of jobs."""
        return nothing_believed

    def remaining(self, jobs: Iterable[tuple[JobRecord, Gang]], gpus_per_node: int, now: float) -> list[RemainingTime]:
        """Return the remaining times of running jobs, as far as they are known, and note them for their judgement."""
        return []

    @property
    def calibration(self) -> Calibration:
        """Return how often the truth has lain in the ranges of remaining times."""
        return NO_FORECASTS

    @property
    def resize_s(self) -> float | None:
        """Return the seconds that jobs lately stood still for another size by checkpoint; None: none was measured."""
        return None

    def settle(self, job: JobRecord) -> None:
        """Judge the forecasts of a job that is no longer live."""

    def put(self, job: JobRecord, gang: Gang | None, signature: int, now: float, device_type: str = "") -> None:
        """Record a job as it is now. `signature`: of its series; `device_type`: of its devices, empty without any."""

    def forget(self, number: int, now: float) -> None:
        """Drop a job that has ended."""

    def keep(self, is_live: Callable[[int], bool], now: float) -> None:
        """Drop the jobs that are not live; their ends were not reported."""

    def record(self, number: int, report: ProgressReport, now: float) -> bool:
        """Record a report; return whether it is reason for another plan."""
        return False

    def update_trials(self, view: View, running_s: Mapping[int, float], now: float) -> bool:
        """Begin and end trials of cores. Return whether curves or trials have changed since the last plan. `running_s`:
        total running times by number; `view` has the free cores of the jobs' nodes."""
        return False

    def curve_news(self, is_all: bool = False) -> tuple[CoresCurve, ...]:
        """Return the curves by cores to report: those changed since the last call. `is_all`: all are due again."""
        return ()

    @property
    def remembered(self) -> RememberedRates:
        """Return the measurements, for a planner that continues from them."""
        return RememberedRates()


@dataclass(frozen=True, slots=True)
class RememberedRates:
    """State of a `RateRegistry`: jobs by number, curves by cores by series, GPU type and phase (`series_key`), rates by
    series and number of GPUs, and by GPU type, and the record of remaining times."""

    jobs: Mapping[int, MeasuredJob] = field(default_factory=dict)
    series: Mapping[str, tuple[CpuPoint, ...]] = field(default_factory=dict)
    by_series: Mapping[str, Mapping[str, SeriesRates]] = field(default_factory=dict)
    calibration: Calibration = NO_FORECASTS


class RateRegistry(JobRates):
    """Measurements of all live jobs. `weighs_sizes`: losses are kept, too."""

    def __init__(self, pace: TrialPace | None = None) -> None:
        self._pace = pace or TrialPace()
        self._jobs: dict[int, MeasuredJob] = {}
        self._series: dict[str, tuple[CpuPoint, ...]] = {}
        self._rates_by_series: dict[str, Mapping[str, SeriesRates]] = {}
        # Masks of the devices in use, by node and job.
        self._used: dict[str, dict[int, int]] = {}
        # Fits that plans rest on are not made earlier for what is only shown: a recording repeats them.
        self._fits, self._shown_fits = FitCache(), FitCache()
        # Curves by cores; they are stale once a point or a job has come or gone.
        self._known, self._is_stale = NOTHING, False
        self._news = CurveNews()
        self._ledger = ForecastLedger()
        # Of the newest resizes by checkpoint, in seconds.
        self._pauses: tuple[float, ...] = ()
        self.weighs_sizes = False

    # -- reports -------------------------------------------------------------------------------------------------------

    def put(self, job: JobRecord, gang: Gang | None, signature: int, now: float, device_type: str = "") -> None:
        number = job.number
        if job.state.is_finished:
            self.forget(number, now)
            return
        known = self._of(number)
        is_new = number not in self._jobs or known.create_time != job.create_time
        if is_new:
            self.forget(number, now)
            known = self._jobs[number] = MeasuredJob(job.create_time, signature, ProfiledResources(CoreProfile()))
        # A job that waits between two runs keeps what it was measured with.
        if is_new or device_type not in ("", known.device_type):
            known.device_type = device_type or known.device_type
            known.cores = known.cores.on_device(self._of_series(known))
            self._is_stale = self._is_stale or bool(known.cores.profile.points)
            self._news.note(number)
        running = gang if _is_running(job, gang) else None
        known.keeps_sizes = job.spec.is_elastic or self.weighs_sizes
        limits = known.cores.memory_limits
        known.cores = known.cores.put(job, running, now, self._pace)
        self._is_stale = self._is_stale or known.cores.memory_limits != limits
        run = RunCondition() if running is None else _run_of(running)
        if run != known.run:
            self._change(number, known, run, max(now, job.running_since), now)

    def forget(self, number: int, now: float) -> None:
        known = self._jobs.get(number)
        if known is None:
            return
        self._is_stale = True
        self._fits.forget(number)
        self._shown_fits.forget(number)
        self._occupy(number, known.run.devices, {})
        del self._jobs[number]
        self._update(self._on(known.run.devices), now)

    def keep(self, is_live: Callable[[int], bool], now: float) -> None:
        for number in [number for number in self._jobs if not is_live(number)]:
            self.forget(number, now)

    def record(self, number: int, report: ProgressReport, now: float) -> bool:
        job, pace = self._jobs.get(number), self._pace
        if job is None:
            return False
        sample = ProgressSample(report.time_s, report.step, report.since_s)
        in_row = report.evaluated_in_row if report.evaluates else None
        cores = job.cores.with_memory(report.memory, now, pace)
        cores = cores.in_phase(report.step, in_row, now, pace, self._of_series(job))
        # It has other curves now, by which the cores are divided anew.
        self._is_stale = self._is_stale or cores.phase != job.cores.phase
        own = ProgressSample(report.evaluated_s, report.evaluated) if report.evaluates else sample
        self._put_cores(number, job, cores.after(own, now, pace) if cores.is_in(report.evaluates) else cores)
        if report.evaluates or cores.is_short_of_memory(now):
            job.interrupt_windows()
            return False
        # The last step of an earlier time slice, or a report that does not show which slice it belongs to, is ignored.
        if now >= job.present.since_s and (not job.run.is_time_sliced or report.time_s >= report.since_s):
            if job.run.devices and not job.neighbours:
                before = job.by_load
                job.record_loaded(sample, now, pace)
                if job.by_load is not before and len(job.run.devices) == 1:
                    self._record_series(job)
            job.record_present(sample, report.use, now, pace)
        job.attained = job.attained or AttainedTime(report.step, report.time_s)
        job.attained.follow(report.step, report.time_s)
        sizes = len(job.by_gpus)
        is_full = job.record_size(sample, now, pace)
        if not self.weighs_sizes:
            return is_full
        job.losses = job.losses or ReportedLosses()
        job.losses.record(report.step, report.loss, report.passes, report.passes_in_all)
        # Sizes are planned every interval anyway: only the first measurement of a size is reason for a plan.
        return len(job.by_gpus) > sizes

    def update_trials(self, view: View, running_s: Mapping[int, float], now: float) -> bool:
        before = self.trials
        cores = {number: job.cores for number, job in self._jobs.items()}
        for number, found in next_trials(cores, view, running_s, now, self._pace):
            self._put_cores(number, self._jobs[number], found)
        return self._is_stale or before != self.trials

    def curve_news(self, is_all: bool = False) -> tuple[CoresCurve, ...]:
        for number in self._jobs if is_all else ():
            self._news.note(number)
        return self._news.taken(lambda number: job.cores if (job := self._jobs.get(number)) else None)

    @property
    def remembered(self) -> RememberedRates:
        return RememberedRates(self._jobs, self._series, self._rates_by_series, self._ledger.calibration)

    def recall(self, remembered: RememberedRates) -> None:
        """Continue from what an earlier registry `remembered`."""
        self._jobs, self._series = dict(remembered.jobs), dict(remembered.series)
        self._rates_by_series = dict(remembered.by_series)
        self._ledger = ForecastLedger(remembered.calibration)
        self._used, self._is_stale = {}, True
        for number, known in self._jobs.items():
            self._occupy(number, {}, known.run.devices)

    # -- measurements --------------------------------------------------------------------------------------------------

    def _of(self, number: int) -> MeasuredJob:
        return self._jobs.get(number) or MeasuredJob(0.0, 0, ProfiledResources(CoreProfile()))

    def alone(self, number: int) -> tuple[float, ...]:
        return self._of(number).baseline.rates

    def present(self, number: int) -> tuple[float, ...]:
        return self._of(number).present.rates

    def neighbours(self, number: int) -> frozenset[int]:
        return self._of(number).neighbours

    def interference(self, number: int) -> tuple[int, RatesByLoad]:
        known = self._of(number)
        return known.load, known.by_load

    @property
    def compared(self) -> Sequence[int]:
        return [number for number, known in self._jobs.items() if len(known.by_load) > 1]

    def same_series(self, number: int, gpus: int) -> Mapping[str, SeriesRates]:
        known = self._jobs.get(number)
        return {} if known is None else self._rates_by_series.get(f"{known.signature:016x}/{gpus}", {})

    @property
    def series(self) -> Iterable[Mapping[str, SeriesRates]]:
        return self._rates_by_series.values()

    def utilisation(self, number: int) -> float:
        return fmean(self._of(number).baseline.utilisations or (1.0,))

    def signature(self, number: int) -> str:
        known = self._jobs.get(number)
        return "" if known is None else f"{known.signature:016x}"

    def of_size(self, number: int) -> tuple[float, ...]:
        return self._of(number).sized.rates

    def by_gpus(self, number: int) -> Mapping[int, float]:
        return self._of(number).by_gpus

    @property
    def known(self) -> Known:
        if self._is_stale:
            jobs = [(number, job.cores) for number, job in sorted(self._jobs.items())]
            self._known = curves_of([(number, cores.profile, cores.memory_limits) for number, cores in jobs])
            self._is_stale = False
        return self._known

    @property
    def trials(self) -> Mapping[int, int]:
        return {number: trial.millicores for number, job in self._jobs.items() if (trial := job.cores.trial)}

    @property
    def received_s(self) -> Mapping[int, float]:
        return {number: job.attained.received_s for number, job in self._jobs.items() if job.attained is not None}

    def believed(self, gpus_per_node: int) -> Believed:
        return partial(self._believed, self._fits, max(1, gpus_per_node))

    def _believed(
        self, fits: FitCache, per_node: int, jobs: Sequence[tuple[JobRecord, Gang | None]]
    ) -> list[OptimusEstimate]:
        found = []
        for job, _ in jobs:
            known, by_gpus = self._of(job.number), self.by_gpus(job.number)
            found.append(optimus_estimate(job, known.losses, by_gpus, fits, per_node, known.by_tasks))
        return found

    def remaining(self, jobs: Iterable[tuple[JobRecord, Gang]], gpus_per_node: int, now: float) -> list[RemainingTime]:
        pairs, per_node = list(jobs) if self.weighs_sizes else [], max(1, gpus_per_node)
        found = []
        for (job, _), estimate in zip(pairs, self._believed(self._shown_fits, per_node, pairs), strict=True):
            run = self._of(job.number).run
            fitted = fitted_rate(job, estimate, run, per_node)
            one = remaining_time(job.number, estimate, self.of_size(job.number), fitted)
            if one is not None and run.epoch:
                self._ledger = self._ledger.noted(job, run.tasks or (run.gpus,), one, now)
                found.append(one)
        return found

    @property
    def calibration(self) -> Calibration:
        return self._ledger.calibration

    @property
    def resize_s(self) -> float | None:
        return median(self._pauses) if self._pauses else None

    def settle(self, job: JobRecord) -> None:
        self._ledger = self._ledger.settled(job)

    def describe_cores(self, number: int) -> str:
        """Return the measurements behind a change of a job's cores, as text; empty without measurements."""
        return self._of(number).cores.describe()

    # -- one job -------------------------------------------------------------------------------------------------------

    def _change(self, number: int, known: MeasuredJob, run: RunCondition, begins_s: float, now: float) -> None:
        old, known.run = known.run, run
        if old.epoch and not run.epoch:
            known.stopped = old.gpus, old.tasks, now
        elif run.epoch and known.stopped is not None:
            *size, since_s = known.stopped
            if size != [run.gpus, run.tasks] and begins_s - since_s < _LONGEST_PAUSE_S:
                self._pauses = (*self._pauses, begins_s - since_s)[-_MOST_PAUSES:]
            known.stopped = None
        if run.epoch not in (0, known.warm[0]):
            # A job that was parked in memory resumes in the same epoch and need not warm up again.
            known.warm = run.epoch, begins_s + self._pace.warm_s
        settled_s = begins_s + self._pace.settle_s if run.epoch else math.inf
        steady_s = max(settled_s, known.warm[1])
        known.sized = RateWindows(since_s=settled_s)
        known.present = known.loaded = RateWindows(since_s=steady_s)
        known.load = -1
        if _footprint(run) != _footprint(old):
            known.by_load = {}
        self._occupy(number, old.devices, run.devices)
        self._update({number} | self._on({**old.devices, **run.devices}), now)

    def _put_cores(self, number: int, job: MeasuredJob, cores: ProfiledResources) -> None:
        if cores.profile != job.cores.profile:
            self._is_stale = True
            key = series_key(job.signature, job.device_type, cores.phase)
            self._series.pop(key, None)
            self._series[key] = cores.profile.all_points
            if len(self._series) > _MOST_SERIES:
                del self._series[next(iter(self._series))]
        if cores.profile is not job.cores.profile or cores.trial is not job.cores.trial:
            self._news.note(number)
        job.cores = cores

    def _record_series(self, job: MeasuredJob) -> None:
        """Record the newest window by load for the gangs of the series that come later."""
        key = f"{job.signature:016x}/{job.run.gpus}"
        known = self._rates_by_series.pop(key, {})
        rates = known.get(job.device_type, SeriesRates()).after(job.run.millicores, job.load, job.by_load[job.load][-1])
        self._rates_by_series[key] = {**known, job.device_type: rates}
        if len(self._rates_by_series) > _MOST_SERIES:
            del self._rates_by_series[next(iter(self._rates_by_series))]

    def _of_series(self, job: MeasuredJob) -> Callable[[str], tuple[CpuPoint, ...]]:
        """Return the function from phases to the points of earlier jobs of the series: those on the same type of GPU,
        or else the newest on another one."""

        def points(phase: str) -> tuple[CpuPoint, ...]:
            known = self._series.get(series_key(job.signature, job.device_type, phase))
            if known is not None:
                return known
            start, end = series_key(job.signature, "", phase).split("//")
            others = [of for key, of in self._series.items() if key.startswith(f"{start}/") and key.endswith(f"/{end}")]
            return others[-1] if others else ()

        return points

    # -- jobs on the same nodes ----------------------------------------------------------------------------------------

    def _occupy(self, number: int, old: Mapping[str, int], new: Mapping[str, int]) -> None:
        for node in old:
            del self._used[node][number]
            if not self._used[node]:
                del self._used[node]
        for node, mask in new.items():
            self._used.setdefault(node, {})[number] = mask

    def _on(self, nodes: Iterable[str]) -> set[int]:
        return {number for node in nodes for number in self._used.get(node, ())}

    def _update(self, numbers: Iterable[int], now: float) -> None:
        """Update neighbours and loads of these jobs; one with others is measured anew once it has settled."""
        settled_s = now + self._pace.settle_s
        for number in sorted(numbers):
            job = self._jobs[number]
            on = [
                (other, theirs, mask & theirs)
                for node, mask in job.run.devices.items()
                for other, theirs in self._used[node].items()
                if other != number
            ]
            neighbours = frozenset([other for other, _, common in on if common])
            if neighbours != job.neighbours:
                # While a neighbour warms up, the rates beside it do not count.
                others_s = max([self._jobs[other].present.since_s for other in neighbours], default=now)
                job.present = RateWindows(since_s=max(job.present.since_s, others_s, settled_s))
                job.neighbours = neighbours
            load = sum([theirs.bit_count() for _, theirs, _ in on])
            if load != job.load:
                job.load, job.loaded = load, RateWindows(since_s=max(job.loaded.since_s, settled_s))


def series_key(signature: int, device_type: str, phase: str) -> str:
    """Return the key of a series' curve on one type of GPU in one phase."""
    return f"{signature:016x}/{device_type.replace('/', '_')}/{phase}"


def _is_running(job: JobRecord, gang: Gang | None) -> bool:
    holds = gang is not None and job.state is JobState.HOLDING and gang.intent is GangIntent.RUN
    return holds and bool(job.running_since)


def _run_of(gang: Gang) -> RunCondition:
    devices: dict[str, int] = {}
    if not gang.node_set:
        for claim in gang.claims:
            if claim.device_mask:
                devices[claim.node] = devices.get(claim.node, 0) | claim.device_mask
    millicores = sum([sum(claim.millicores) for claim in gang.claims])
    tasks = tuple(map(sum, zip(*[claim.tasks for claim in gang.claims], strict=False)))
    return RunCondition(gang.epoch, gang.devices, millicores, bool(gang.node_set), devices, tasks)


def _footprint(run: RunCondition) -> tuple[int, int] | None:
    """Return what rates by load depend on; None for a job that does not run on devices of its own."""
    return (run.millicores, run.gpus) if run.devices else None
