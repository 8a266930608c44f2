"""Modelled measurements: losses, rates in windows, and the estimates of Optimus that are fitted to them.

`Losses`: reported losses follow l(k) = 1/(b0*k + b1) + b2 for epoch k, with noise, until convergence (Optimus, EuroSys
2018, section 3.1). A job has converged when an epoch lowers the loss by less than 1 to 5 % of the largest loss. The
paper publishes no distribution of slope, floor and threshold, so the seed draws them. They give the number of epochs,
and the work of one epoch follows from the work until convergence: the job's duration, or `converges_s` of the trace.
Where the two differ, the losses mislead a policy that trusts them.

`ModelledRates`: noisy windows of rates, utilisation and co-location as daemons measure them, and no interference:
modelled gangs of one node share no resource but counted cores and memory. It answers in place of a `RateRegistry`.

`ModelledEstimates`: estimates of Optimus. A job has none until it is profiled. Then it has noisy speeds for a few sizes
and for every size that it ran with, and its losses so far. A step is one second of work at the recorded rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from ganger_master.core.gang_model import Gang
from ganger_master.core.job_model import JobRecord
from ganger_master.estimators.convergence import Curve, LossPoint
from ganger_master.estimators.speed import AllReduceModel
from ganger_master.planner.job_measurements import FitCache
from ganger_master.planner.rate_registry import JobRates
from ganger_master.policies.optimus_sizes import (
    NOTHING,
    Believed,
    OptimusEstimate,
    first_sizes,
    nothing_believed,
    steps_left,
)
from ganger_master.policies.trials import FIRST_WINDOWS, MOST_WINDOWS
from ganger_master.policies.tunings import NOTHING as NOTHING_KNOWN
from ganger_master.policies.tunings import Known
from ganger_master.simulator.inputs import ReplayOptions
from ganger_master.simulator.traces.workload import Workload
from ganger_master.simulator.true_rates import Footprints, devices_by_node

# Ranges of: epochs until the falling part halves; floor as a share of the first loss; least fall of the loss per epoch
# before convergence, as a share of the first loss.
_HALVES, _FLOORS, _THRESHOLDS = (2.0, 20.0), (0.1, 0.5), (0.01, 0.05)
_NOISE = 0.03
# A job is at its beginning while less than this share of its steps is done.
_YOUNG = 0.1
POINTS_AN_EPOCH = 10


class Losses:
    """Training losses of the jobs of a workload, by position."""

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
        """Return the share of the largest loss by which an epoch lowers the loss before convergence."""
        return float(self._threshold[job])

    def epoch_s(self, job: int) -> float:
        """Return the work of one epoch in seconds."""
        curve = self._curve(job)
        return float(self._work[job]) / (curve.slow_from(self.threshold(job) * curve.loss(0.0), 1.0) + 1.0)

    def misjudged(self, job: int, done_s: float, error: float) -> tuple[float, bool]:
        """Return the seconds of work left until convergence, off by up to a share `error` either way, which the seed
        draws and which falls with the progress, and whether the job is at its beginning."""
        whole_s = float(self._work[job])
        left_s = max(whole_s - done_s, self.epoch_s(job))
        off = float(np.random.default_rng([self._seed, 4, job]).uniform(-error, error))
        return left_s * (1.0 + off * left_s / whole_s), done_s < _YOUNG * whole_s

    def points(self, job: int, done_s: float) -> list[LossPoint]:
        """Return the losses reported after `done_s` seconds of work."""
        curve, each = self._curve(job), self.epoch_s(job) / POINTS_AN_EPOCH
        count = math.floor(done_s / each)
        noise = np.random.default_rng([self._seed, 2, job]).standard_normal(count)
        return [
            LossPoint(at * each, curve.loss(at / POINTS_AN_EPOCH) * max(0.1, 1.0 + _NOISE * scatter))
            for at, scatter in enumerate(noise.tolist(), 1)
        ]

    def _curve(self, job: int) -> Curve:
        return Curve(float(self._slope[job]), 1.0, float(self._floor[job]))


# A window spans several mini-batches. The first one after a change is dropped: caches and pipelines fill.
WINDOW_S = 5.0
_SCATTER = 0.05
# Number of the last windows alone that are kept.
_MOST_ALONE = 16


@dataclass(frozen=True)
class _Stretch:
    """A time in which a job trains at one rate, with the same GPUs and co-located jobs. `seed`: of its noise."""

    since_s: float
    rate: float
    beside: frozenset[int]
    gpus: int
    seed: tuple[int, ...]

    @cached_property
    def _whole(self) -> tuple[float, ...]:
        noise = np.random.default_rng(self.seed).standard_normal(MOST_WINDOWS)
        return tuple((self.rate * (1.0 + _SCATTER * noise).clip(0.1)).tolist())

    def windows(self, now: float) -> tuple[float, ...]:
        count = min(MOST_WINDOWS, int((now - self.since_s) / WINDOW_S) - 1)
        return self._whole[:count] if count > 0 else ()


class ModelledRates(JobRates):
    """Measured rates by job. The caller sets `now`; the seed gives the noise. `footprints`: None if not read."""

    def __init__(self, footprints: Footprints | None, seed: int) -> None:
        self.now = 0.0
        self._footprints = footprints
        self._seed = seed
        self._stretches: dict[int, _Stretch] = {}
        self._counted: dict[int, int] = {}
        self._alone: dict[int, tuple[float, ...]] = {}
        self._by_size: dict[int, dict[int, tuple[float, ...]]] = {}
        # What other models answer.
        self._curves: Known = NOTHING_KNOWN
        self._believed: Believed = nothing_believed
        self._received_s: Callable[[], Mapping[int, float]] = dict

    def answer_by(
        self, curves: Known | None, believed: Believed, received_s: Callable[[], Mapping[int, float]]
    ) -> None:
        """Take over the answers of other models: of rates by cores, of remaining steps, and of received device time."""
        self._curves = NOTHING_KNOWN if curves is None else curves
        self._believed, self._received_s = believed, received_s

    @property
    def known(self) -> Known:
        return self._curves

    @property
    def received_s(self) -> Mapping[int, float]:
        return self._received_s()

    def believed(self, gpus_per_node: int) -> Believed:
        return self._believed

    def trains(self, number: int, now: float, rate: float, beside: frozenset[int], gpus: int) -> None:
        """Start a stretch: the job trains at this rate on `gpus` GPUs, co-located with `beside`."""
        self.rests(number, now)
        count = self._counted[number] = self._counted.get(number, 0) + 1
        self._stretches[number] = _Stretch(now, rate, beside, gpus, (self._seed, 3, number, count))

    def rests(self, number: int, now: float) -> None:
        stretch = self._stretches.pop(number, None)
        if stretch is not None and not stretch.beside:
            self._keep(number, stretch, now)

    def ended(self, number: int) -> None:
        """Drop a job that has ended."""
        for known in (self._stretches, self._counted, self._alone, self._by_size):
            known.pop(number, None)

    def alone(self, number: int) -> tuple[float, ...]:
        stretch = self._stretches.get(number)
        if stretch is not None and not stretch.beside:
            self._keep(number, stretch, self.now)
        return self._alone.get(number, ())

    def present(self, number: int) -> tuple[float, ...]:
        stretch = self._stretches.get(number)
        return () if stretch is None else stretch.windows(self.now)

    def neighbours(self, number: int) -> frozenset[int]:
        stretch = self._stretches.get(number)
        return frozenset() if stretch is None else stretch.beside

    def utilisation(self, number: int) -> float:
        assert self._footprints is not None, "rates are modelled"
        return self._footprints.utilisation(number - 1)

    def signature(self, number: int) -> str:
        assert self._footprints is not None, "rates are modelled"
        return self._footprints.signature(number - 1)

    def of_size(self, number: int) -> tuple[float, ...]:
        return self.present(number)

    def by_gpus(self, number: int) -> Mapping[int, float]:
        self.alone(number)
        return {gpus: median(windows) for gpus, windows in self._by_size.get(number, {}).items()}

    def next_look_s(self, number: int) -> float:
        """Return when it has enough windows for the next evaluation; infinite if it is parked or none is to come."""
        stretch = self._stretches.get(number)
        if stretch is None:
            return math.inf
        count, there_are = FIRST_WINDOWS, len(stretch.windows(self.now))
        while count <= there_are:
            count *= 2
        # Slightly later, so that rounding does not drop a window.
        return stretch.since_s + (count + 1) * WINDOW_S + 1e-3 if count <= MOST_WINDOWS else math.inf

    def _keep(self, number: int, stretch: _Stretch, now: float) -> None:
        windows = stretch.windows(now)
        if len(windows) >= 2:
            self._alone[number] = windows[-_MOST_ALONE:]
        if len(windows) >= FIRST_WINDOWS:
            self._by_size.setdefault(number, {})[stretch.gpus] = windows


class ModelledEstimates:
    """Estimates that Optimus would have made by now.

    `work_done(position)`: steps. `true_rate(position, GPUs by node)`: steps per second without noise.
    `is_profiled(position)`. `options`: errors and seed.
    """

    def __init__(
        self,
        losses: Losses,
        work_done: Callable[[int], float],
        true_rate: Callable[[int, Sequence[int]], float],
        is_profiled: Callable[[int], bool],
        gpus_per_node: int,
        options: ReplayOptions,
    ) -> None:
        self._losses = losses
        self._work_done = work_done
        self._true_rate = true_rate
        self._is_profiled = is_profiled
        self._gpus_per_node = gpus_per_node
        self._options = options
        self._fits = FitCache()
        # By job: step time in seconds by number of GPUs.
        self._known_s: dict[int, dict[int, float]] = {}

    def believed(self, jobs: Sequence[tuple[JobRecord, Gang | None]]) -> list[OptimusEstimate]:
        """Return the estimates of live jobs, given with their gangs."""
        return [self._believed(job, gang) for job, gang in jobs]

    def forget(self, number: int) -> None:
        """Drop a job that has ended."""
        self._fits.forget(number)
        self._known_s.pop(number, None)

    def _believed(self, job: JobRecord, gang: Gang | None) -> OptimusEstimate:
        at = job.number - 1
        if not self._is_profiled(at):
            return NOTHING
        done = self._work_done(at)
        epoch_s = self._losses.epoch_s(at)
        threshold = self._losses.threshold(at)
        if self._options.steps_error is not None:
            left, is_guess = self._losses.misjudged(at, done, self._options.steps_error)
            return OptimusEstimate(left, is_guess, self._speed(job, gang))
        whole = self._fits.end(
            job.number, int(done / epoch_s), lambda: self._losses.points(at, done), threshold, epoch_s
        )
        left, is_guess = steps_left(whole, done, epoch_s)
        return OptimusEstimate(left, is_guess, self._speed(job, gang))

    def _speed(self, job: JobRecord, gang: Gang | None) -> AllReduceModel | None:
        spec = job.spec
        seconds = self._known_s.get(job.number)
        if seconds is None:
            each = spec.roles[0].shape.gpus
            least, most = (spec.gpus_min, spec.gpus_max) if spec.is_elastic else (spec.gpus, spec.gpus)
            sizes = first_sizes(least, most, each)
            seconds = self._known_s[job.number] = {
                gpus: self._step_s(job.number - 1, on_fewest_nodes(gpus, self._gpus_per_node)) for gpus in sizes
            }
        if gang is not None and job.running_since and gang.devices not in seconds:
            seconds[gang.devices] = self._step_s(job.number - 1, devices_by_node(gang))
        return self._fits.speed(job.number, seconds, self._gpus_per_node)

    def _step_s(self, at: int, gpus: Sequence[int]) -> float:
        scatter = float(np.random.default_rng([self._options.seed, 3, at, sum(gpus)]).standard_normal())
        return 1.0 / (self._true_rate(at, gpus) * max(0.1, 1.0 + self._options.speed_error * scatter))


def on_fewest_nodes(gpus: int, per_node: int) -> list[int]:
    """Return the GPUs on each of the fewest nodes that hold them, as equal as can be."""
    nodes = -(-gpus // per_node)
    return [(gpus + node) // nodes for node in range(nodes)]
