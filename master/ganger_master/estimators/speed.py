"""Speed of training: by GPUs and nodes, where jobs share a GPU, and where a job's GPUs lie further apart.

**All-reduce**: seconds of a step of data-parallel training (Pollux, OSDI 2021, section 3.2). Computing takes a + b*m;
summing gradients nothing on one GPU, al + bl*(n - 2) within a node, an + bn*(n - 2) across nodes.
T = (T_compute^gamma + T_sync^gamma)^(1/gamma).

**Interference.** Residents that together want more than the whole GPU each run at min(1, 1 / sum of loads); a load is
utilisation times a multiplier plus an overhead, both learned by type of GPU.

**Locality.** Lost time grows with servers and GPUs, fitted by non-negative least squares (Xiao et al., SOSP 2017 SRC,
Figure 1; Chronus's table).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from ganger.cluster.fit import MEMORY_SHARE
from ganger.cluster.resources import LocalityLevel

from ganger_master.estimators.fitting import (
    NOT_FITTED,
    Belief,
    FitError,
    Floats,
    fit_error,
    is_usable,
    jacobian,
    posterior,
)

MOST_OVERLAP = 10.0
# A law of seven numbers misses measured steps by about this much (see the tests); fits need not do better.
_NOISE = 0.05
# Before any step is measured, as shares of a step on one GPU: half of it grows with the batch; synchronising costs a
# tenth within a node and four tenths across. A factor of ten either way is plausible, so three points outweigh it.
_SHARES = (0.5, 0.5, 0.1, 0.02, 0.4, 0.02)
_DEVIATION = 2.3
# ... of the logit of gamma between 1 and 10; its mean is gamma = 2.
_OVERLAP_MEAN, _OVERLAP_DEVIATION = math.log(1 / 8), 1.5


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A measurement: `samples` per GPU, all > 0, nodes <= gpus."""

    gpus: int
    nodes: int
    samples: float
    seconds: float


@dataclass(frozen=True, slots=True)
class AllReduceModel:
    """Coefficients in seconds (`per_sample`: per sample, `*_per_gpu`: per GPU beyond two), overlap from 1 to 10."""

    fixed: float
    per_sample: float
    local: float
    local_per_gpu: float
    across: float
    across_per_gpu: float
    overlap: float
    error: FitError = NOT_FITTED

    def compute_s(self, samples: float) -> float:
        """Return the seconds that a GPU computes in one step on `samples` samples."""
        return self.fixed + self.per_sample * samples

    def sync_s(self, gpus: int, nodes: int) -> float:
        """Return the seconds that one step synchronises, as if none of it overlapped with computing."""
        if gpus < 2:
            return 0.0
        if nodes < 2:
            return self.local + self.local_per_gpu * (gpus - 2)
        return self.across + self.across_per_gpu * (gpus - 2)

    def step_s(self, gpus: int, nodes: int, samples: float) -> float:
        """Return the seconds of one step of the whole job."""
        return overlapped(self.compute_s(samples), self.sync_s(gpus, nodes), self.overlap)

    def all_step_s(self, gpus: Floats, nodes: Floats, samples: Floats) -> Floats:
        """Return `step_s` for arrays of one shape."""
        beyond = np.maximum(gpus - 2.0, 0.0)
        sync = np.where(nodes < 2, self.local + self.local_per_gpu * beyond, self.across + self.across_per_gpu * beyond)
        compute = self.fixed + self.per_sample * np.asarray(samples, float)
        sync = np.where(gpus < 2, 0.0, sync)
        longer, shorter = np.maximum(compute, sync), np.minimum(compute, sync)
        return np.asarray(longer * (1.0 + (shorter / longer) ** self.overlap) ** (1.0 / self.overlap), float)


def overlapped(compute: float, sync: float, overlap: float) -> float:
    """Return (compute^overlap + sync^overlap)^(1/overlap), without leaving the range of floats."""
    longer, shorter = max(compute, sync), min(compute, sync)
    if shorter <= 0.0:
        return longer
    return longer * math.pow(1.0 + math.pow(shorter / longer, overlap), 1.0 / overlap)


def fit_allreduce(points: Iterable[StepPoint]) -> AllReduceModel | None:
    """Return the coefficients of least relative error; None if no point is usable. Coefficients that nothing measured
    follow a weak prior in shares of the step (see `_SHARES`): one point gives a step time and a guess how it scales.
    Unusable points (not finite, not above zero, more nodes than GPUs) are left out."""
    usable = [p for p in points if is_usable(p.samples, p.seconds) and 1 <= p.nodes <= p.gpus]
    if not usable:
        return None
    columns = [np.array([getattr(point, name) for point in usable], float) for name in ("gpus", "nodes", "samples")]
    seconds = np.array([point.seconds for point in usable])
    belief = posterior(
        _prior(usable),
        lambda numbers: np.log(_model(numbers).all_step_s(*columns)),
        np.log(seconds),
        _NOISE**2 * np.eye(len(usable)),
    )
    model = _model(belief.mean)
    return replace(model, error=fit_error(model.all_step_s(*columns), seconds))


def _prior(points: Sequence[StepPoint]) -> Belief:
    least = min(points, key=lambda point: (point.gpus, point.nodes, point.seconds))
    fixed, sample, *sync = (math.log(share * least.seconds) for share in _SHARES)
    mean = np.array([fixed, sample - math.log(least.samples), *sync, _OVERLAP_MEAN])
    return Belief.independent(mean, np.array([_DEVIATION] * 6 + [_OVERLAP_DEVIATION]))


def _model(numbers: Floats) -> AllReduceModel:
    fixed, sample, local, local_more, across, across_more = (math.exp(min(n, 300.0)) for n in numbers[:6].tolist())
    overlap = 1.0 + (MOST_OVERLAP - 1.0) / (1.0 + math.exp(-max(min(float(numbers[6]), 30.0), -30.0)))
    return AllReduceModel(fixed, sample, local, local_more, across, across_more, overlap)


# -- slowdown ----------------------------------------------------------------------------------------------------------

# What a measured speed in a pack scatters by: noise, and what two numbers cannot say (see the tests: MAE 0.07).
_SHARED_NOISE = 0.1
# Loads near one are neither contended nor not; the corner is rounded by this much so that trials there teach.
_CORNER = 16.0


@dataclass(frozen=True, slots=True)
class Pressure:
    """What one job alone uses of its GPU. `utilisation`: the share of time with a kernel running, from 0 to 1."""

    utilisation: float
    memory_bytes: float = 0.0


@dataclass(frozen=True, eq=False)
class Contention:
    """Belief over (log multiplier, log overhead) of one type of GPU; `trials` were learned from."""

    belief: Belief
    trials: int = 0

    @property
    def multiplier(self) -> float:
        return math.exp(float(self.belief.mean[0]))

    @property
    def overhead(self) -> float:
        return math.exp(float(self.belief.mean[1]))


# Prior of a GPU type without co-location trials: utilisation counts once, ± 15 %; each resident costs about 5 % more.
UNKNOWN_DEVICE = Contention(Belief.independent(np.array([0.0, math.log(0.05)]), np.array([0.15, 1.0])))


@dataclass(frozen=True, slots=True)
class ColocationTrial:
    """A measured co-location: the pressure of each job alone, and its speed relative to alone (> 0)."""

    pressures: tuple[Pressure, ...]
    speeds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Sum of relative speeds (time slicing gives exactly 1), with its 80 % range."""

    gain: float
    low: float
    high: float
    fits: bool


def shared_speeds(pressures: Sequence[Pressure], contention: Contention = UNKNOWN_DEVICE) -> tuple[float, ...]:
    """Speed of each resident relative to running alone; one resident runs at 1."""
    return tuple(_speeds(pressures, contention.multiplier, contention.overhead))


def fit_together(pressures: Iterable[Pressure], device_memory_bytes: float) -> bool:
    """Whether there is memory for all of them on one GPU."""
    return sum([pressure.memory_bytes for pressure in pressures]) <= MEMORY_SHARE * device_memory_bytes


def forecast(
    pressures: Sequence[Pressure], device_memory_bytes: float, contention: Contention = UNKNOWN_DEVICE
) -> Forecast:
    """What packing these jobs on one GPU would give. No jobs: a gain of zero, nothing to try."""
    speeds = shared_speeds(pressures, contention)
    fits = fit_together(pressures, device_memory_bytes)
    if not speeds:
        return Forecast(0.0, 0.0, 0.0, fits)
    gain = sum(speeds)

    def law(numbers: Floats) -> Floats:
        return np.array([math.log(sum(_speeds(pressures, *np.exp(numbers).tolist())))])

    slope = jacobian(contention.belief, law)
    spread = math.sqrt(float((slope @ contention.belief.covariance @ slope.T)[0, 0]) + _SHARED_NOISE**2 / len(speeds))
    if len(speeds) == 1:
        spread = 0.0
    # 1.28 deviations either way hold 80 %
    return Forecast(gain, gain * math.exp(-1.28 * spread), gain * math.exp(1.28 * spread), fits)


def learn(contention: Contention, trials: Iterable[ColocationTrial]) -> Contention:
    """The belief after trials. Trials with a speed or utilisation that is not finite and above zero, or with one
    resident, teach nothing. Packs without contention teach only that there is none below their load."""
    usable = [
        trial
        for trial in trials
        if len(trial.pressures) == len(trial.speeds) > 1
        and is_usable(*trial.speeds, *(pressure.utilisation for pressure in trial.pressures))
    ]
    if not usable:
        return contention
    wanted = np.array([sum(p.utilisation for p in t.pressures) for t in usable for _ in t.speeds])
    residents = np.array([float(len(t.pressures)) for t in usable for _ in t.speeds])

    def law(numbers: Floats) -> Floats:
        # -log(max(1, load)), its corner rounded
        load = wanted * math.exp(numbers[0]) + residents * math.exp(numbers[1])
        return np.asarray(-np.logaddexp(0.0, _CORNER * np.log(load)) / _CORNER, float)

    measured = np.log([speed for trial in usable for speed in trial.speeds])
    # Residents of one trial see one another's noise: a pair counts as one measurement, not two.
    noise = np.diag([_SHARED_NOISE**2 * len(trial.speeds) for trial in usable for _ in trial.speeds])
    return Contention(posterior(contention.belief, law, measured, noise), contention.trials + len(usable))


def _speeds(pressures: Sequence[Pressure], multiplier: float, overhead: float) -> list[float]:
    if len(pressures) < 2:
        return [1.0] * len(pressures)
    load = sum(multiplier * max(0.0, pressure.utilisation) + overhead for pressure in pressures)
    return [min(1.0, 1.0 / load)] * len(pressures)


# Weight of the prior against one measured point; coefficients nothing measured follow it.
_PRIOR_TRUST = 0.15


@dataclass(frozen=True, slots=True)
class LocalityPoint:
    """A measurement: speed on `gpus` over `nodes` servers against the same GPUs in one, > 0 (1.0: no loss)."""

    gpus: int
    nodes: int
    relative_speed: float
    level: LocalityLevel = LocalityLevel.RACK


@dataclass(frozen=True, slots=True)
class LocalityModel:
    """Extra time as a share of the step in one server: `across` for leaving it, more for each node and GPU beyond two;
    `inside` for each level wider than NVLINK in a server, `beyond` for each wider than RACK."""

    across: float
    per_node: float
    per_gpu: float
    inside: float
    beyond: float
    error: FitError = NOT_FITTED

    def relative_speed(self, gpus: int, nodes: int, level: LocalityLevel) -> float:
        """1 for a single GPU, whatever the level."""
        if gpus < 2:
            return 1.0
        if nodes < 2:
            return 1.0 / (1.0 + self.inside * (min(level, LocalityLevel.NODE) - LocalityLevel.NVLINK))
        apart = self.across + self.per_node * (nodes - 2) + self.per_gpu * (gpus - 2)
        return 1.0 / (1.0 + apart + self.beyond * (max(level, LocalityLevel.RACK) - LocalityLevel.RACK))


# The middle of Chronus's five models, and of Figure 1b for the levels inside a server (AlexNet -27 %, ResNet152 -11 %
# from one switch to another socket). Beyond a rack nothing is published: a tenth per level.
UNKNOWN_JOB = LocalityModel(across=0.05, per_node=0.1, per_gpu=0.03, inside=0.1, beyond=0.1)


def fit_locality(points: Iterable[LocalityPoint]) -> LocalityModel:
    """The coefficients of least error in relative speed; `UNKNOWN_JOB`, the prior, without a usable point. Points of
    one GPU, or with a speed that is not finite and above zero, say nothing and are left out; speeds above 1 are noise
    and count as they are. Fewer points than coefficients: the rest follows the prior."""
    # Loading it takes longer than a short simulation, which may fit nothing.
    from scipy.optimize import nnls

    usable = [p for p in points if is_usable(p.relative_speed) and p.gpus > 1 and p.nodes >= 1]
    prior = UNKNOWN_JOB
    if not usable:
        return prior
    rows = np.array([_features(point) for point in usable])
    speeds = np.array([point.relative_speed for point in usable])
    believed = np.array([prior.across, prior.per_node, prior.per_gpu, prior.inside, prior.beyond])
    # Residual in relative speed: speed * (1 + lost) - 1, lost being linear.
    trust = _PRIOR_TRUST * np.eye(5)
    matrix = np.vstack([rows * speeds[:, None], trust])
    solution, _ = nnls(matrix, np.concatenate([1.0 - speeds, trust @ believed]))
    across, per_node, per_gpu, inside, beyond = (float(value) for value in solution)
    model = LocalityModel(across, per_node, per_gpu, inside, beyond)
    predicted = [model.relative_speed(point.gpus, point.nodes, point.level) for point in usable]
    return replace(model, error=fit_error(predicted, speeds))


def _features(point: LocalityPoint) -> list[float]:
    if point.nodes < 2:
        return [0.0, 0.0, 0.0, float(min(point.level, LocalityLevel.NODE) - LocalityLevel.NVLINK), 0.0]
    beyond = float(max(point.level, LocalityLevel.RACK) - LocalityLevel.RACK)
    return [1.0, point.nodes - 2.0, point.gpus - 2.0, 0.0, beyond]


# A smaller loss of speed is noise.
LEAST_LOSS = 0.05


@dataclass(frozen=True, slots=True)
class LocalityLoss:
    """The widest level that a gang tolerates, and the share of its speed that it loses at the widest measured one."""

    tolerated: LocalityLevel
    share: float


# Asked in every plan, mostly about the same measurements.
@lru_cache(4096)
def measured_loss(
    points: tuple[LocalityPoint, ...], gpus: int, nodes: int, inside: LocalityLevel = LocalityLevel.NODE
) -> LocalityLoss | None:
    """Return the loss of a gang beyond the level that it tolerates; None if no measured level costs more than
    `LEAST_LOSS`, or none was measured. Levels without a measurement count as not tolerated. `points`: of gangs that
    behave like it; `nodes`: the fewest servers that hold it; `inside`: the level of its GPUs in one."""
    usable = [point for point in points if is_usable(point.relative_speed) and point.gpus > 1]
    measured = sorted({point.level for point in usable if point.nodes > 1})
    closest = LocalityLevel.NODE if nodes < 2 else LocalityLevel.RACK
    if gpus < 2 or (nodes > 1 and closest not in measured):
        return None
    model = fit_locality(points)
    best = model.relative_speed(gpus, nodes, min(inside, closest) if nodes < 2 else closest)
    tolerated, share = closest, 0.0
    for level in measured:
        if level > closest:
            share = 1.0 - model.relative_speed(gpus, max(nodes, 2), level) / best
            tolerated = level if share <= LEAST_LOSS else tolerated
    return LocalityLoss(tolerated, share) if share > LEAST_LOSS else None
