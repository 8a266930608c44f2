"""What a job loses when its GPUs lie further apart, and how far apart it may be put.

Relative speed is against the same GPUs in one server at the best level. Across servers the lost time grows with servers
and GPUs, fitted by non-negative least squares; inside a server and beyond a rack it grows by level. Measured: Xiao et
al. (SOSP 2017 SRC), Figure 1; Chronus's table of five models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from ganger.cluster.resources import LocalityLevel

from ganger_master.estimators.fitting import NOT_FITTED, FitError, fit_error, is_usable

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

    def widest_level(self, gpus: int, gpus_per_node: int, loss: float) -> LocalityLevel:
        """The widest level at which the job, on as few servers as hold it, loses at most `loss` of its best possible
        speed there; at least the closest that holds it at all."""
        nodes = max(1, -(-gpus // max(1, gpus_per_node)))
        levels = [level for level in LocalityLevel if (level > LocalityLevel.NODE) == (nodes > 1)]
        if nodes == 1 and gpus > 1:
            # a job that fits one server may also be split over two
            levels = list(LocalityLevel)
        tolerated = levels[0]
        best = self.relative_speed(gpus, nodes, levels[0])
        for level in levels:
            spread = max(nodes, 2) if level > LocalityLevel.NODE else nodes
            if self.relative_speed(gpus, spread, level) >= (1.0 - loss) * best:
                tolerated = level
        return LocalityLevel.CLUSTER if gpus < 2 else tolerated


# The middle of Chronus's five models, and of Figure 1b for the levels inside a server (AlexNet -27 %, ResNet152 -11 %
# from one switch to another socket). Beyond a rack nothing is published: a tenth per level.
UNKNOWN_JOB = LocalityModel(across=0.05, per_node=0.1, per_gpu=0.03, inside=0.1, beyond=0.1)


def fit_locality(points: Iterable[LocalityPoint], prior: LocalityModel = UNKNOWN_JOB) -> LocalityModel:
    """The coefficients of least error in relative speed; the prior itself without a usable point.

    Points of one GPU, or with a speed that is not finite and above zero, say nothing and are left out; speeds above 1
    are noise and count as they are. Fewer points than coefficients: the rest follows the prior.
    """
    # Loading it takes longer than a short simulation, which may fit nothing.
    from scipy.optimize import nnls

    usable = [p for p in points if is_usable(p.relative_speed) and p.gpus > 1 and p.nodes >= 1]
    if not usable:
        return prior
    rows = np.array([_features(point) for point in usable])
    speeds = np.array([point.relative_speed for point in usable])
    believed = np.array([prior.across, prior.per_node, prior.per_gpu, prior.inside, prior.beyond])
    # residual in relative speed: speed * (1 + lost) - 1, lost being linear
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
