"""Speed of training over parameter servers (Optimus, EuroSys 2018, section 3.2), with p servers, w workers, global
batch M and all t >= 0, in steps per second

    synchronous   1 / (t0*M/w + t1 + t2*w/p + t3*w + t4*p + t5/p)
    asynchronous  w / (t0 + t1*w/p + t2*w + t3*p)

t5 is an addition: servers apply one summed update per step, each to its part of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from ganger_master.estimators.fitting import NOT_FITTED, FitError, Floats, fit_error, is_usable
from ganger_master.policies.optimus_sizes import Speed
from ganger_master.policies.orders import Integers
from numpy.typing import ArrayLike


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


def server_speeds(models: Sequence[ServerSpeed]) -> Speed:
    """Return the speeds, in steps/s, of jobs that train over parameter servers. Kinds of tasks: servers, workers."""
    rows = np.zeros((len(models), 6))
    for row, model in zip(rows, models, strict=True):
        t = model.coefficients
        if model.mode is UpdateMode.ASYNCHRONOUS:
            row[1:5] = t
        else:
            row[:] = t
            row[0] *= model.batch
    is_asynchronous = np.array([model.mode is UpdateMode.ASYNCHRONOUS for model in models], bool)

    def speed(jobs: Integers, counts: Integers) -> Floats:
        p, w, t = counts[:, 0].astype(float), counts[:, 1].astype(float), rows[jobs].T
        seconds = t[0] / w + t[1] + t[2] * (w / p) + t[3] * w + t[4] * p + t[5] / p
        return np.asarray(np.where(is_asynchronous[jobs], w, 1.0) / seconds, float)

    return speed
