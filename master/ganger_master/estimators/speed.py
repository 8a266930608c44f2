"""Speed of data-parallel training: seconds of a step with all-reduce, and steps per second over parameter servers.

**All-reduce** (Pollux, OSDI 2021, section 3.2): computing takes a + b*m; summing gradients nothing on one GPU, al +
bl*(n - 2) within a node, an + bn*(n - 2) across nodes. T = (T_compute^gamma + T_sync^gamma)^(1/gamma).

**Parameter servers** (Optimus, EuroSys 2018, section 3.2), with p servers, w workers, global batch M and all t >= 0

    synchronous   1 / (t0*M/w + t1 + t2*w/p + t3*w + t4*p + t5/p)
    asynchronous  w / (t0 + t1*w/p + t2*w + t3*p)

t5 is an addition: servers apply one summed update per step, each to its part of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike

from ganger_master.estimators.fitting import NOT_FITTED, Belief, FitError, Floats, fit_error, is_usable, posterior

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


class UpdateMode(Enum):
    """Whether a step waits for every worker."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"


# Where fewer points than coefficients were measured, the rest is drawn towards a third of the step time each for
# computation, overhead and transfer, as weakly as a point measured with this relative trust.
_PRIOR_TRUST = 0.02
_PRIOR_SHARE = {
    UpdateMode.SYNCHRONOUS: (1 / 3, 1 / 3, 1 / 3, 0.01, 0.01, 0.0),
    UpdateMode.ASYNCHRONOUS: (2 / 3, 1 / 3, 0.01, 0.01),
}


@dataclass(frozen=True, slots=True)
class ServerPoint:
    """A measurement: `steps_per_second` of the whole job (asynchronous: of all workers together), all > 0."""

    servers: int
    workers: int
    steps_per_second: float


@dataclass(frozen=True, slots=True)
class ServerSpeed:
    """The fitted coefficients in seconds; `error` on the points used."""

    mode: UpdateMode
    coefficients: tuple[float, ...]
    batch: float = 1.0
    error: FitError = NOT_FITTED

    def steps_per_second(self, servers: int, workers: int) -> float:
        """Return the steps/s of a job; zero without a server or a worker."""
        return float(self.all_steps_per_second(servers, workers))

    def all_steps_per_second(self, servers: ArrayLike, workers: ArrayLike) -> Floats:
        """Return `steps_per_second` for arrays of one shape."""
        p, w = np.broadcast_arrays(np.asarray(servers, float), np.asarray(workers, float))
        runs = (p >= 1.0) & (w >= 1.0)
        seconds = features(self.mode, np.where(runs, p, 1.0), np.where(runs, w, 1.0), self.batch) @ self.coefficients
        with np.errstate(divide="ignore"):
            rates = np.where(self.mode is UpdateMode.ASYNCHRONOUS, w, 1.0) / seconds
        return np.asarray(np.where(runs, rates, 0.0), float)


def features(mode: UpdateMode, servers: ArrayLike, workers: ArrayLike, batch: float = 1.0) -> Floats:
    """Return what multiplies each coefficient in the seconds of a step; shape of the inputs plus one last axis."""
    p, w = np.broadcast_arrays(np.asarray(servers, float), np.asarray(workers, float))
    if mode is UpdateMode.ASYNCHRONOUS:
        return np.stack([np.ones_like(p), w / p, w, p], axis=-1)
    return np.stack([batch / w, np.ones_like(p), w / p, w, p, 1.0 / p], axis=-1)


def fit_server_speed(points: Iterable[ServerPoint], mode: UpdateMode, batch: float = 1.0) -> ServerSpeed | None:
    """Return the coefficients of least relative error; None if no point is usable (speeds must be finite and above
    zero, counts at least one: the published file has failed runs with speed 0).

    With fewer points than coefficients, those that no point determines follow a weak prior. Speeds far from the points
    are guesses.
    """
    if not is_usable(batch):
        raise ValueError(f"batch {batch} must be finite and above zero")
    usable = [p for p in points if is_usable(p.steps_per_second) and p.servers >= 1 and p.workers >= 1]
    if not usable:
        return None
    model = ServerSpeed(mode, _solve(usable, mode, batch), batch)
    predicted = [model.steps_per_second(point.servers, point.workers) for point in usable]
    return replace(model, error=fit_error(predicted, [point.steps_per_second for point in usable]))


def _solve(points: Sequence[ServerPoint], mode: UpdateMode, batch: float) -> tuple[float, ...]:
    p = np.array([point.servers for point in points])
    w = np.array([point.workers for point in points])
    rates = np.array([point.steps_per_second for point in points])
    per_step = rates / w if mode is UpdateMode.ASYNCHRONOUS else rates
    rows = features(mode, p, w, batch) * per_step[:, None]
    # Scaled so that a coefficient of one is a whole step at the middle of the measurements.
    scale = 1.0 / np.exp(np.mean(np.log(rows), axis=0))
    wish = np.array(_PRIOR_SHARE[mode])
    matrix = np.vstack([rows * scale, _PRIOR_TRUST * np.eye(len(scale))])
    from scipy.optimize import nnls

    solution, _ = nnls(matrix, np.concatenate([np.ones(len(points)), _PRIOR_TRUST * wish]))
    return tuple(float(value) for value in solution * scale)
