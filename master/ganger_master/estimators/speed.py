"""Speed of data-parallel training with all-reduce: seconds of a step (Pollux, OSDI 2021, section 3.2).

Computing takes a + b*m; summing gradients nothing on one GPU, al + bl*(n - 2) within a node, an + bn*(n - 2) across
nodes. T = (T_compute^gamma + T_sync^gamma)^(1/gamma).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

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
