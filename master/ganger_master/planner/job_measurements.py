"""All measurements of one job, and estimates from them: received device time, and for elastic jobs the steps left and
the rate with other numbers of GPUs (Optimus, EuroSys 2018, section 3). `now` is in seconds of the master's clock;
times in reports are those of the node's clock, so only their differences are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, TypeVar

from ganger_master.core.job_model import JobRecord
from ganger_master.core.job_spec import JobSpec
from ganger_master.estimators.convergence import LossPoint, StepsLeftEstimate, fit_convergence, steps_to_convergence
from ganger_master.estimators.server_speed import ServerPoint, ServerSpeed, fit_server_speed
from ganger_master.estimators.speed import AllReduceModel, StepPoint, fit_allreduce
from ganger_master.planner.resource_trials import ProfiledResources
from ganger_master.policies.optimus_sizes import NOTHING, OptimusEstimate, steps_left
from ganger_master.policies.trials import NO_WINDOWS, ProgressSample, RateWindows, TrialPace

# Passes over the data before the first fit of losses, and their growth until the next one.
_FIRST_PASSES: Final = 2
_REFIT: Final = 1.2
# Rates that differ by no more than this need no new fit.
_ALIKE: Final = 0.05
# Names of the role that keeps the parameters, in a job of two roles.
_SERVERS: Final = frozenset({"ps", "server", "servers", "parameter-server", "parameter-servers"})

# Tasks of a running gang by role.
Tasks: TypeAlias = tuple[int, ...]


def server_role(spec: JobSpec) -> int | None:
    """Return the position of the role of parameter servers in a job that has these and workers; None for others."""
    found = [at for at, role in enumerate(spec.roles) if role.name in _SERVERS]
    return found[0] if len(spec.roles) == 2 and len(found) == 1 else None


class FitCache:
    """Cache of fitted models by job number. Not thread-safe."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, StepsLeftEstimate | None]] = {}
        self._speeds: dict[int, tuple[Mapping[int, float], AllReduceModel | None]] = {}
        self._server_speeds: dict[int, tuple[Mapping[tuple[int, int], float], ServerSpeed | None]] = {}

    def forget(self, number: int) -> None:
        self._ends.pop(number, None)
        self._speeds.pop(number, None)
        self._server_speeds.pop(number, None)

    def end(
        self,
        number: int,
        passes: int,
        losses: Callable[[], Iterable[LossPoint]],
        least_decrease: float,
        pass_steps: float,
        converged_passes: int = 1,
    ) -> StepsLeftEstimate | None:
        """Return the steps from the start until convergence, by the losses of so many `passes` of `pass_steps` each;
        None while there are too few. `least_decrease`, `converged_passes`: as in `steps_to_convergence`."""
        if passes < _FIRST_PASSES:
            return None
        known = self._ends.get(number)
        if known is None or passes >= _REFIT * known[0] or passes < known[0]:
            model = fit_convergence(losses())
            end = None if model is None else steps_to_convergence(model, least_decrease, pass_steps, converged_passes)
            known = self._ends[number] = passes, end
        return known[1]

    def speed(self, number: int, seconds: Mapping[int, float], gpus_per_node: int) -> AllReduceModel | None:
        """Return the model of the rate by the seconds per step with each measured number of GPUs; None without any. A
        step has the same samples at every size, divided among its GPUs."""
        known = self._speeds.get(number)
        if known is None or not _are_alike(known[0], seconds):
            points = [StepPoint(n, -(-n // gpus_per_node), 1.0 / n, seconds[n]) for n in sorted(seconds)]
            model = fit_allreduce(points)
            known = self._speeds[number] = dict(seconds), model
        return known[1]

    def server_speed(self, number: int, rates: Mapping[tuple[int, int], float]) -> ServerSpeed | None:
        """Return the model of the rate by the steps/s with each measured (servers, workers); None without any."""
        known = self._server_speeds.get(number)
        if known is None or not _are_alike(known[0], rates):
            model = fit_server_speed([ServerPoint(p, w, rate) for (p, w), rate in sorted(rates.items())])
            known = self._server_speeds[number] = dict(rates), model
        return known[1]


_Key = TypeVar("_Key")


def _are_alike(before: Mapping[_Key, float], now: Mapping[_Key, float]) -> bool:
    return before.keys() == now.keys() and all(abs(now[key] - was) <= _ALIKE * was for key, was in before.items())


# Most loss points of a job. When it is reached, neighbours are averaged in pairs.
MOST_POINTS: Final = 256


# Longest time between two reports of a job that steps all the time.
_STEADY_S: Final = 2.5
# Most growth of the estimated step time per report; a decrease has no limit.
_SLOWER: Final = 1.1


@dataclass(slots=True)
class AttainedTime:
    """Device time that a job has received: a time-sliced one steps only in its slices. `step` was done at `time_s`.
    Between reports less than `_STEADY_S` apart the whole time counts; otherwise its steps x its step time."""

    step: int
    time_s: float
    step_s: float = math.inf
    received_s: float = 0.0

    def follow(self, step: int, time_s: float) -> None:
        """Take the next report into account."""
        steps, span_s = step - self.step, time_s - self.time_s
        self.step, self.time_s = step, time_s
        if steps <= 0 or span_s <= 0.0:
            return
        if span_s <= _STEADY_S:
            self.received_s += span_s
            self.step_s = span_s / steps
            return
        self.step_s = min(_SLOWER * self.step_s, span_s / steps)
        self.received_s += min(span_s, steps * self.step_s)


@dataclass(slots=True)
class ReportedLosses:
    """What a job last reported, and points of its loss curve. `each`: reports in a point; `open`: those of the next."""

    step: int = 0
    # Passes over the data done, and in total; zero if not reported.
    passes: int = 0
    passes_in_all: int = 0
    points: list[LossPoint] = field(default_factory=list)
    each: int = 1
    open: list[LossPoint] = field(default_factory=list)
    # Steps of a pass; zero until the first one is done.
    pass_steps: float = 0.0

    def record(self, step: int, loss: float, passes: int, passes_in_all: int) -> None:
        """Take a report into account. `loss`: NaN if it is not known."""
        if step < self.step:
            # It resumed from a checkpoint, and repeats these steps.
            self.points = [point for point in self.points if point.step <= step]
            self.open = []
        if passes > max(0, self.passes):
            # The pass began just now, or, at the first report, some time ago.
            begun = passes if self.step else passes + 0.5
            self.pass_steps = step / begun
        if math.isfinite(loss) and step > self.step:
            self._add(LossPoint(step, loss))
        self.step, self.passes, self.passes_in_all = step, passes, passes_in_all

    @property
    def curve(self) -> Sequence[LossPoint]:
        """Return the points to fit."""
        return (*self.points, *self.open)

    def _add(self, point: LossPoint) -> None:
        self.open.append(point)
        if len(self.open) < self.each:
            return
        self.points.append(_mean(self.open))
        self.open = []
        if len(self.points) >= MOST_POINTS:
            self.points = [_mean(self.points[at : at + 2]) for at in range(0, len(self.points), 2)]
            self.each *= 2


def optimus_estimate(
    job: JobRecord,
    losses: ReportedLosses | None,
    rates: Mapping[int, float],
    fits: FitCache,
    gpus_per_node: int,
    by_tasks: Mapping[Tasks, float] | None = None,
) -> OptimusEstimate:
    """Return the estimate of a job. `rates`: in steps/s by number of GPUs; `by_tasks`: by tasks of its roles, where it
    has several. Empty without rates or reports."""
    servers = server_role(job.spec)
    if servers is not None:
        found = {(tasks[servers], tasks[1 - servers]): rate for tasks, rate in (by_tasks or {}).items() if rate > 0.0}
        speed: AllReduceModel | ServerSpeed | None = fits.server_speed(job.number, found) if found else None
        tried = tuple([(workers, count) for count, workers in found])
    else:
        seconds = {gpus: 1.0 / rate for gpus, rate in rates.items() if rate > 0.0}
        speed = fits.speed(job.number, seconds, gpus_per_node) if seconds else None
        tried = tuple([(gpus, 0) for gpus in seconds])
    if losses is None or speed is None:
        return NOTHING
    return replace(_left(job, losses, fits), speed=speed, tried=tried)


def _left(job: JobRecord, losses: ReportedLosses, fits: FitCache) -> OptimusEstimate:
    """Return the steps that a job has left, without its speed."""
    done, pass_steps = losses.step, losses.pass_steps
    if not pass_steps:
        return OptimusEstimate(max(1.0, done))
    end, spec = None, job.spec
    if spec.least_decrease:
        end = fits.end(
            job.number, losses.passes, lambda: losses.curve, spec.least_decrease, pass_steps, spec.converged_passes
        )
    left, is_guess = steps_left(end, done, pass_steps)

    def beyond(steps: float) -> float:
        return max(0.0, steps - done)

    most = losses.passes_in_all * pass_steps
    if most and (most - done <= left or not spec.least_decrease):
        exact = max(1.0, most - done)
        low = exact if end is None else min(exact, beyond(end.low))
        return OptimusEstimate(exact, is_young=False, low=low, high=exact)
    low, high = (0.0, math.inf) if end is None else (beyond(end.low), beyond(end.high))
    return OptimusEstimate(left, is_guess, low=low, high=min(high, most - done) if most else high)


def _mean(points: Sequence[LossPoint]) -> LossPoint:
    count = len(points)
    return LossPoint(sum([point.step for point in points]) / count, sum([point.loss for point in points]) / count)


# Windows and utilisation reports that are kept of a job that ran alone, the newest ones.
_MOST_BASELINE_WINDOWS: Final = 16
_MOST_UTILISATIONS: Final = 60
# Windows that are kept for each load of a job, and loads for each job.
_MOST_LOAD_WINDOWS: Final = 16
_MOST_LOADS: Final = 16
# Numbers of cores for which the rates of a series are kept.
_MOST_CORES: Final = 4

# Windows in steps/s, by the number of devices that other jobs use on the job's nodes.
RatesByLoad: TypeAlias = Mapping[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Rates and utilisation of a job that is alone on its devices, in one epoch and with one number of cores. `first`
    holds epoch, millicores and rate of the first window in another epoch or with other cores. One window does not show
    the variance, so the older rates stand until a second window confirms the change."""

    epoch: int = 0
    millicores: int = 0
    rates: tuple[float, ...] = ()
    utilisations: tuple[float, ...] = ()
    first: tuple[int, int, float] | None = None

    def after(self, epoch: int, millicores: int, rate: float) -> Baseline:
        """Return the baseline after one more window."""
        if (epoch, millicores) == (self.epoch, self.millicores):
            return replace(self, rates=(*self.rates, rate)[-_MOST_BASELINE_WINDOWS:])
        if self.first is None or self.first[:2] != (epoch, millicores):
            return replace(self, first=(epoch, millicores, rate))
        return Baseline(epoch, millicores, (self.first[2], rate), self.utilisations)


@dataclass(frozen=True, slots=True)
class RunCondition:
    """Placement and cores of a running job; the default value means that it does not run. `devices`: masks by node;
    empty for a time-sliced job, as no other job runs at the same time. `tasks`: by role."""

    epoch: int = 0
    gpus: int = 0
    millicores: int = 0
    is_time_sliced: bool = False
    devices: Mapping[str, int] = field(default_factory=dict)
    tasks: Tasks = ()


def with_window(by_load: RatesByLoad, load: int, rate: float) -> RatesByLoad:
    """Return the windows with one more, in steps/s, under this load."""
    rates = (*by_load.get(load, ()), rate)[-_MOST_LOAD_WINDOWS:]
    others = {other: some for other, some in by_load.items() if other != load}
    if len(others) >= _MOST_LOADS:
        # The first key is the oldest.
        del others[next(iter(others))]
    return {**others, load: rates}


@dataclass(frozen=True, slots=True)
class SeriesRates:
    """Windows by load of one-node gangs of one series, size and type of GPU, by millicores. They outlive the jobs."""

    by_cores: Mapping[int, RatesByLoad] = field(default_factory=dict)

    @property
    def by_load(self) -> RatesByLoad:
        """Windows of the most often measured number of cores."""
        return max(self.by_cores.values(), key=lambda found: sum(map(len, found.values())), default={})

    def after(self, millicores: int, load: int, rate: float) -> SeriesRates:
        """Return the windows with one more of a gang with so many cores."""
        others = {cores: found for cores, found in self.by_cores.items() if cores != millicores}
        if len(others) >= _MOST_CORES:
            # The first key is the oldest.
            del others[next(iter(others))]
        return SeriesRates({**others, millicores: with_window(self.by_cores.get(millicores, {}), load, rate)})


@dataclass(slots=True)
class MeasuredJob:
    """All measurements of a job. `run`: its condition; `neighbours`: on its devices; `load`: others' devices."""

    create_time: float
    signature: int
    cores: ProfiledResources
    run: RunCondition = field(default_factory=RunCondition)
    neighbours: frozenset[int] = frozenset()
    load: int = 0
    # The last epoch that ran, and the time from which it counts as warmed up.
    warm: tuple[int, float] = (0, 0.0)
    keeps_sizes: bool = False
    device_type: str = ""
    # Of the run before, since it stopped: its GPUs and tasks, and when that was.
    stopped: tuple[int, Tasks, float] | None = None
    # Windows with the present run and neighbours.
    present: RateWindows = NO_WINDOWS
    # Windows under the present load.
    loaded: RateWindows = NO_WINDOWS
    # Windows with the present numbers of GPUs and cores.
    sized: RateWindows = NO_WINDOWS
    baseline: Baseline = field(default_factory=Baseline)
    by_load: RatesByLoad = field(default_factory=dict)
    by_gpus: Mapping[int, float] = field(default_factory=dict)
    # The same by tasks of each role, of a job of several.
    by_tasks: Mapping[Tasks, float] = field(default_factory=dict)
    attained: AttainedTime | None = None
    losses: ReportedLosses | None = None

    @property
    def is_alone(self) -> bool:
        """Whether the job has no neighbours, and at least the cores of its baseline in this epoch. A host gives up
        cores before its guest arrives. Until then it has no neighbours, yet is slower than alone."""
        baseline, run = self.baseline, self.run
        return not self.neighbours and (run.epoch != baseline.epoch or run.millicores >= baseline.millicores)

    def interrupt_windows(self) -> None:
        """Begin the windows under way anew: the job evaluates, and does no steps meanwhile."""
        if self.present.open or self.loaded.open or self.sized.open:
            self.present, self.loaded, self.sized = (
                replace(windows, open=None) for windows in (self.present, self.loaded, self.sized)
            )

    def record_loaded(self, sample: ProgressSample, now: float, pace: TrialPace) -> None:
        """Record a report under the present load."""
        before, self.loaded = self.loaded, self.loaded.after(sample, now, pace)
        if self.loaded.rates is before.rates:
            return
        self.by_load = with_window(self.by_load, self.load, self.loaded.rates[-1])

    def record_present(self, sample: ProgressSample, use: float | None, now: float, pace: TrialPace) -> None:
        """Record a report, and in the baseline if the job is alone."""
        if use is not None and self.is_alone:
            utilisations = (*self.baseline.utilisations, use)[-_MOST_UTILISATIONS:]
            self.baseline = replace(self.baseline, utilisations=utilisations)
        before, self.present = self.present, self.present.after(sample, now, pace)
        if self.present.rates is not before.rates and self.is_alone:
            self.baseline = self.baseline.after(self.run.epoch, self.run.millicores, self.present.rates[-1])

    def record_size(self, sample: ProgressSample, now: float, pace: TrialPace) -> bool:
        """Record a report with the present number of GPUs. Return whether it has filled a window."""
        if not self.keeps_sizes:
            return False
        before, self.sized = self.sized, self.sized.after(sample, now, pace)
        if self.sized.rates is before.rates:
            return False
        if self.sized.is_enough:
            self.by_gpus = {**self.by_gpus, self.run.gpus: self.sized.rate}
            if len(self.run.tasks) > 1:
                self.by_tasks = {**self.by_tasks, self.run.tasks: self.sized.rate}
        return True
