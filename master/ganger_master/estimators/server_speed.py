"""Steps per second of training over parameter servers, by their number and that of the workers.

Optimus (EuroSys 2018), section 3.2: a step takes the worker's computation, the transfer over the servers' links, which
as many workers share, the update, and something for every connection. With p servers and w workers

    synchronous   1 / (t0*M/w + t1 + t2*w/p + t3*w + t4*p + t5/p)     M: global batch
    asynchronous  w / (t0 + t1*w/p + t2*w + t3*p)

all t >= 0: linear in t once turned around, fitted by non-negative least squares in relative error. t5 is ours: servers
apply one summed update per synchronous step, each to its share of the model; without it the published measurements with
one server are off by a factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike

from ganger_master.estimators.fitting import NOT_FITTED, FitError, Floats, fit_error, is_usable, left_out_error


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
    """The fitted coefficients in seconds; `error` on the points used, `left_out` on each when the others are used."""

    mode: UpdateMode
    coefficients: tuple[float, ...]
    batch: float = 1.0
    error: FitError = NOT_FITTED
    left_out: FitError = NOT_FITTED

    def steps_per_second(self, servers: int, workers: int) -> float:
        """Zero without a server or a worker."""
        if servers < 1 or workers < 1:
            return 0.0
        p, w, t = float(servers), float(workers), self.coefficients
        if self.mode is UpdateMode.ASYNCHRONOUS:
            seconds = t[0] + t[1] * w / p + t[2] * w + t[3] * p
            return w / seconds if seconds > 0.0 else math.inf
        seconds = t[0] * self.batch / w + t[1] + t[2] * w / p + t[3] * w + t[4] * p + t[5] / p
        return 1.0 / seconds if seconds > 0.0 else math.inf

    def all_steps_per_second(self, servers: ArrayLike, workers: ArrayLike) -> Floats:
        """`steps_per_second` for arrays of one shape."""
        p, w = np.broadcast_arrays(np.asarray(servers, float), np.asarray(workers, float))
        runs = (p >= 1.0) & (w >= 1.0)
        seconds = features(self.mode, np.where(runs, p, 1.0), np.where(runs, w, 1.0), self.batch) @ self.coefficients
        with np.errstate(divide="ignore"):
            rates = np.where(self.mode is UpdateMode.ASYNCHRONOUS, w, 1.0) / seconds
        return np.asarray(np.where(runs, rates, 0.0), float)


def features(mode: UpdateMode, servers: ArrayLike, workers: ArrayLike, batch: float = 1.0) -> Floats:
    """What multiplies each coefficient in the seconds of a step; shape of the inputs plus one last axis."""
    p, w = np.broadcast_arrays(np.asarray(servers, float), np.asarray(workers, float))
    if mode is UpdateMode.ASYNCHRONOUS:
        return np.stack([np.ones_like(p), w / p, w, p], axis=-1)
    return np.stack([batch / w, np.ones_like(p), w / p, w, p, 1.0 / p], axis=-1)


def fit_server_speed(points: Iterable[ServerPoint], mode: UpdateMode, batch: float = 1.0) -> ServerSpeed | None:
    """The coefficients of least relative error; None if no point is usable (speeds must be finite and above zero,
    counts at least one: the published file has failed runs with speed 0).

    With fewer points than coefficients those that nothing measured follow a weak prior: what was measured is met, what
    lies far from it is a guess, and `left_out` says how good such guesses were.
    """
    if not is_usable(batch):
        raise ValueError(f"batch {batch} must be finite and above zero")
    usable = [p for p in points if is_usable(p.steps_per_second) and p.servers >= 1 and p.workers >= 1]
    if not usable:
        return None
    coefficients = _solve(usable, mode, batch)
    model = ServerSpeed(mode, coefficients, batch)

    def predict(others: Sequence[ServerPoint], point: ServerPoint) -> float:
        alone = ServerSpeed(mode, _solve(others, mode, batch), batch)
        return alone.steps_per_second(point.servers, point.workers)

    return ServerSpeed(
        mode,
        coefficients,
        batch,
        fit_error(
            [model.steps_per_second(point.servers, point.workers) for point in usable],
            [point.steps_per_second for point in usable],
        ),
        left_out_error(usable, lambda point: point.steps_per_second, predict),
    )


def _solve(points: Sequence[ServerPoint], mode: UpdateMode, batch: float) -> tuple[float, ...]:
    p = np.array([point.servers for point in points])
    w = np.array([point.workers for point in points])
    rates = np.array([point.steps_per_second for point in points])
    per_step = rates / w if mode is UpdateMode.ASYNCHRONOUS else rates
    rows = features(mode, p, w, batch) * per_step[:, None]
    # scaled so that a coefficient of one is a whole step at the middle of what was measured
    scale = 1.0 / np.exp(np.mean(np.log(rows), axis=0))
    wish = np.array(_PRIOR_SHARE[mode])
    matrix = np.vstack([rows * scale, _PRIOR_TRUST * np.eye(len(scale))])
    from scipy.optimize import nnls

    solution, _ = nnls(matrix, np.concatenate([np.ones(len(points)), _PRIOR_TRUST * wish]))
    return tuple(float(value) for value in solution * scale)
