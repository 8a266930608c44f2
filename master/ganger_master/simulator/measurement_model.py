"""The losses that modelled jobs report as they train: l(k) = 1/(b0*k + b1) + b2 of epoch k, with noise, until it has
converged.

Optimus (EuroSys 2018, section 3.1) fits this curve, and its jobs end when an epoch lowers the loss by less than their
owner said, 1 to 5 % of the largest loss. How steep a curve is, how high its floor and how patient the owner are drawn
for each job by the seed (declared here, for the paper publishes none); with them it is known how many epochs it takes,
and how much work is in one follows from the work after which the job converges. That is when it ends, if the trace says
nothing else (`converges_s`): a job that is stopped earlier, or goes on, misleads whoever believes its losses.

What is measured of jobs that share GPUs: rates, in windows that scatter, how busy a device is, and who is where.

What a policy that fits speeds and losses (Optimus) would have measured of the modelled jobs by now, and what it
believes by that.

Before a job is profiled nothing is known of it. Then its speeds with a few numbers of GPUs are, each off by some
percent, and the speed of every size it has really run with; and its losses as far as it has trained. Steps are seconds
of work at the pace of its trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ganger_master.core.model import Gang, JobRecord
from ganger_master.estimators.convergence import Curve, LossPoint
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.planner.job_estimates import FitCache
from ganger_master.policies.optimus_sizes import NOTHING, OptimusEstimate, first_sizes, steps_left
from ganger_master.policies.trial_test import FIRST_WINDOWS, MOST_WINDOWS
from ganger_master.simulator.traces.workload import Workload
from ganger_master.simulator.true_rates import Footprints

# Epochs it takes for the falling part to halve, the floor as a part of the first loss, what the owner gives an epoch
# at least to fall, of the first loss.
_HALVES, _FLOORS, _THRESHOLDS = (2.0, 20.0), (0.1, 0.5), (0.01, 0.05)
_NOISE = 0.03
POINTS_AN_EPOCH = 10


class Losses:
    """Of the jobs of a workload, by position."""

    def __init__(self, jobs: Workload, seed: int) -> None:
        count = len(jobs)
        random = np.random.default_rng([seed, 1])
        self._slope = 1.0 / np.exp(random.uniform(math.log(_HALVES[0]), math.log(_HALVES[1]), count))
        floor = random.uniform(*_FLOORS, count)
        self._floor = floor / (1.0 - floor)
        self._threshold = random.uniform(*_THRESHOLDS, count)
        self._work = np.where(np.isnan(jobs.converges_s), jobs.duration_s, jobs.converges_s)
        self._seed = seed

    def threshold(self, job: int) -> float:
        """Converged is what falls by less than this part of the largest loss in an epoch; its owner says so."""
        return float(self._threshold[job])

    def epoch_s(self, job: int) -> float:
        """Work in an epoch: what the size of its data tells."""
        curve = self._curve(job)
        return float(self._work[job]) / (curve.slow_from(self.threshold(job) * curve.loss(0.0), 1.0) + 1.0)

    def points(self, job: int, done_s: float) -> list[LossPoint]:
        """What it has reported by now, by work done."""
        curve, each = self._curve(job), self.epoch_s(job) / POINTS_AN_EPOCH
        count = math.floor(done_s / each)
        noise = np.random.default_rng([self._seed, 2, job]).standard_normal(count)
        return [
            LossPoint(at * each, curve.loss(at / POINTS_AN_EPOCH) * max(0.1, 1.0 + _NOISE * scatter))
            for at, scatter in enumerate(noise.tolist(), 1)
        ]

    def _curve(self, job: int) -> Curve:
        """By epoch; falls from one to the floor."""
        return Curve(float(self._slope[job]), 1.0, float(self._floor[job]))


# A window is several mini-batches; of the first one after a change, caches and pipelines fill.
WINDOW_S = 5.0
_SCATTER = 0.05
# Of when it ran alone, the last ones.
_MOST_ALONE = 16


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A job trains at one rate, with so many GPUs, beside the same others."""

    since_s: float
    rate: float
    beside: frozenset[int]
    number: int
    gpus: int


class ModelledRates:
    """By job number; `now` is set by whoever asks. What of rates is noise comes from the seed."""

    def __init__(self, footprints: Footprints, seed: int) -> None:
        self.now = 0.0
        self._footprints = footprints
        self._seed = seed
        self._stretches: dict[int, _Stretch] = {}
        self._counted: dict[int, int] = {}
        self._alone: dict[int, tuple[float, ...]] = {}
        self._by_size: dict[int, dict[int, tuple[float, ...]]] = {}
        # All of a stretch, by its number, and those that there are by now, as last asked for: they change only with a
        # window more.
        self._whole: dict[int, tuple[int, tuple[float, ...]]] = {}
        self._made: dict[int, tuple[int, tuple[float, ...]]] = {}
        self._kept: dict[int, tuple[float, ...]] = {}

    def trains(self, number: int, now: float, rate: float, beside: frozenset[int], gpus: int) -> None:
        """From now on at this rate, with so many GPUs, beside these."""
        self.rests(number, now)
        count = self._counted[number] = self._counted.get(number, 0) + 1
        self._stretches[number] = _Stretch(now, rate, beside, count, gpus)

    def rests(self, number: int, now: float) -> None:
        stretch = self._stretches.pop(number, None)
        if stretch is not None and not stretch.beside:
            self._keep(number, stretch, now)

    def forget(self, number: int) -> None:
        """It has ended."""
        for known in (
            self._stretches,
            self._counted,
            self._alone,
            self._by_size,
            self._whole,
            self._made,
            self._kept,
        ):
            known.pop(number, None)

    def alone(self, number: int) -> tuple[float, ...]:
        stretch = self._stretches.get(number)
        if stretch is not None and not stretch.beside:
            self._keep(number, stretch, self.now)
        return self._alone.get(number, ())

    def present(self, number: int) -> tuple[float, ...]:
        stretch = self._stretches.get(number)
        return () if stretch is None else self._windows(number, stretch, self.now)

    def beside(self, number: int) -> frozenset[int]:
        stretch = self._stretches.get(number)
        return frozenset() if stretch is None else stretch.beside

    def utilisation(self, number: int) -> float:
        return self._footprints.utilisation(number - 1)

    def signature(self, number: int) -> str:
        return self._footprints.signature(number - 1)

    def windows(self, number: int) -> tuple[float, ...]:
        """Since its number of GPUs changed last: what says whether that helped."""
        return self.present(number)

    def rates(self, number: int) -> Mapping[int, float]:
        """By number of GPUs, as last measured with each."""
        self.alone(number)
        return {gpus: median(windows) for gpus, windows in self._by_size.get(number, {}).items()}

    def next_look_s(self, number: int) -> float:
        """When there will be enough windows for the next look at how it does as it trains now; infinite if there is
        none to come, or it rests."""
        stretch = self._stretches.get(number)
        if stretch is None:
            return math.inf
        count, there_are = FIRST_WINDOWS, len(self._windows(number, stretch, self.now))
        while count <= there_are:
            count *= 2
        # A hair later, so that rounding leaves no window out.
        return stretch.since_s + (count + 1) * WINDOW_S + 1e-3 if count <= MOST_WINDOWS else math.inf

    def crowd(self, number: int) -> tuple[int, Mapping[int, tuple[float, ...]]]:
        """Gangs on one node take nothing from each other here but devices, cores and memory that are counted."""
        return 0, {}

    def _keep(self, number: int, stretch: _Stretch, now: float) -> None:
        windows = self._windows(number, stretch, now)
        if self._kept.get(number) is windows:
            return
        self._kept[number] = windows
        if len(windows) >= 2:
            self._alone[number] = windows[-_MOST_ALONE:]
        if len(windows) >= FIRST_WINDOWS:
            self._by_size.setdefault(number, {})[stretch.gpus] = windows

    def _windows(self, number: int, stretch: _Stretch, now: float) -> tuple[float, ...]:
        count = min(MOST_WINDOWS, int((now - stretch.since_s) / WINDOW_S) - 1)
        if count < 1:
            return ()
        known = self._made.get(number)
        if known is not None and known[0] == stretch.number and len(known[1]) == count:
            return known[1]
        whole = self._whole.get(number)
        if whole is None or whole[0] != stretch.number:
            noise = np.random.default_rng([self._seed, 3, number, stretch.number]).standard_normal(MOST_WINDOWS)
            whole = stretch.number, tuple((stretch.rate * (1.0 + _SCATTER * noise).clip(0.1)).tolist())
            self._whole[number] = whole
        windows = whole[1][:count]
        self._made[number] = stretch.number, windows
        return windows


# Measured speeds scatter by this part.
_MEASURED_NOISE = 0.05


class ModelledEstimates:
    """`work_done(position)`: steps; `true_rate(position, GPUs)`: steps a second, the noise is added here;
    `is_profiled(position)`."""

    def __init__(
        self,
        losses: Losses,
        work_done: Callable[[int], float],
        true_rate: Callable[[int, int], float],
        is_profiled: Callable[[int], bool],
        gpus_per_node: int,
        seed: int,
    ) -> None:
        self._losses = losses
        self._work_done = work_done
        self._true_rate = true_rate
        self._is_profiled = is_profiled
        self._gpus_per_node = gpus_per_node
        self._seed = seed
        self._fits = FitCache()
        # With each number of GPUs it has had, the seconds of a step.
        self._seconds: dict[int, dict[int, float]] = {}

    def believed(self, jobs: Sequence[tuple[JobRecord, Gang | None]]) -> list[OptimusEstimate]:
        """Of live jobs, with the gangs they have."""
        return [self._believed(job, gang) for job, gang in jobs]

    def forget(self, number: int) -> None:
        """It has ended."""
        self._fits.forget(number)
        self._seconds.pop(number, None)

    def _believed(self, job: JobRecord, gang: Gang | None) -> OptimusEstimate:
        at = job.number - 1
        if not self._is_profiled(at):
            return NOTHING
        done = self._work_done(at)
        epoch_s = self._losses.epoch_s(at)
        threshold = self._losses.threshold(at)
        whole = self._fits.end(
            job.number, int(done / epoch_s), lambda: self._losses.points(at, done), threshold, epoch_s
        )
        left, is_guess = steps_left(whole, done, epoch_s)
        return OptimusEstimate(left, is_guess, self._speed(job, gang))

    def _speed(self, job: JobRecord, gang: Gang | None) -> AllReduceModel | None:
        spec = job.spec
        seconds = self._seconds.get(job.number)
        if seconds is None:
            each = spec.roles[0].shape.gpus
            least, most = (spec.gpus_min, spec.gpus_max) if spec.is_elastic else (spec.gpus, spec.gpus)
            sizes = first_sizes(least, most, each)
            seconds = self._seconds[job.number] = {gpus: self._step_s(job.number - 1, gpus) for gpus in sizes}
        if gang is not None and job.running_since and gang.devices not in seconds:
            seconds[gang.devices] = self._step_s(job.number - 1, gang.devices)
        return self._fits.speed(job.number, seconds, self._gpus_per_node)

    def _step_s(self, at: int, gpus: int) -> float:
        scatter = float(np.random.default_rng([self._seed, 3, at, gpus]).standard_normal())
        return 1.0 / (self._true_rate(at, gpus) * max(0.1, 1.0 + _MEASURED_NOISE * scatter))
