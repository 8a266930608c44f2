"""Speed of training over parameter servers (Optimus, EuroSys 2018, section 3.2), with p servers, w workers, global
batch M and all t >= 0, in steps per second

    synchronous   1 / (t0*M/w + t1 + t2*w/p + t3*w + t4*p + t5/p)
    asynchronous  w / (t0 + t1*w/p + t2*w + t3*p)

t5 is an addition: servers apply one summed update per step, each to its part of the model. A job does not report its
mode: where it is not given, the law is taken that foretells each measured rate better from the others.

The first placements to measure are D-optimal. Optimus draws its eight to ten by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike

from ganger_master.estimators.fitting import NOT_FITTED, FitError, Floats, fit_error, is_usable


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


# Fewer points do not tell one law from the other.
_COMPARED = 8


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


def fit_server_speed(
    points: Iterable[ServerPoint], mode: UpdateMode | None = None, batch: float = 1.0
) -> ServerSpeed | None:
    """Return the coefficients of least relative error; None if no point is usable (speeds must be finite and above
    zero, counts at least one: the published file has failed runs with speed 0).

    With fewer points than coefficients, those that no point determines follow a weak prior. Speeds far from the points
    are guesses. `mode`: None: that of the better law; synchronous while there are too few points to compare.
    """
    if not is_usable(batch):
        raise ValueError(f"batch {batch} must be finite and above zero")
    usable = [p for p in points if is_usable(p.steps_per_second) and p.servers >= 1 and p.workers >= 1]
    if not usable:
        return None
    mode = _better_law(usable, batch) if mode is None else mode
    model = ServerSpeed(mode, _solve(usable, mode, batch), batch)
    predicted = [model.steps_per_second(point.servers, point.workers) for point in usable]
    return replace(model, error=fit_error(predicted, [point.steps_per_second for point in usable]))


def _better_law(points: Sequence[ServerPoint], batch: float) -> UpdateMode:
    """Return the mode whose law foretells each point best from the others, by the mean of relative errors."""
    if len(points) < _COMPARED:
        return UpdateMode.SYNCHRONOUS

    def error(mode: UpdateMode) -> float:
        found = 0.0
        for at, point in enumerate(points):
            model = ServerSpeed(mode, _solve([*points[:at], *points[at + 1 :]], mode, batch), batch)
            foretold = model.steps_per_second(point.servers, point.workers)
            found += abs(np.log(foretold / point.steps_per_second))
        return found

    return min(UpdateMode, key=error)


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


# -- where to measure a new job first ----------------------------------------------------------------------------------

# Samples of a new job; more gain little (Optimus: ten for an error below 10 %).
FIRST_POINTS = 8
# Keeps the determinant above zero until as many points as coefficients are chosen.
_RIDGE = 1e-3
# Exchanges converge; the bound is for ties that would alternate.
_MOST_EXCHANGES = 50
# Seconds per coefficient that weigh the candidates before any measurement: computation, overhead, transfer and update
# weigh the same, connections little.
_GUESS = {UpdateMode.SYNCHRONOUS: (1.0, 1.0, 1.0, 0.02, 0.02, 0.5), UpdateMode.ASYNCHRONOUS: (1.0, 1.0, 0.02, 0.02)}


def d_optimal(rows: Floats, count: int, known: Floats | None = None) -> tuple[int, ...]:
    """Return the indices, ascending, of the D-optimal `count` candidates: greedy on det(X^T X), then exchanges.

    `rows`: (candidates, coefficients) of a law that is linear in its coefficients. `known`: rows that are measured.
    Ties go to the earlier candidate; a `count` beyond the candidates gives all of them. ValueError for another shape.
    """
    candidates = np.asarray(rows, float)
    if candidates.ndim != 2:
        raise ValueError(f"rows must be candidates by coefficients, not {candidates.shape}")
    total, width = candidates.shape
    if count >= total:
        return tuple(range(total))
    size = np.maximum(np.sqrt(np.mean(candidates**2, axis=0)), 1e-300)
    x = candidates / size
    base = _RIDGE * np.eye(width)
    if known is not None and len(known):
        base = base + (known / size).T @ (known / size)
    chosen: list[int] = []
    information = base
    for _ in range(max(0, count)):
        chosen.append(_most_informative(x, information, chosen))
        information = information + np.outer(x[chosen[-1]], x[chosen[-1]])
    for _ in range(_MOST_EXCHANGES):
        better = _exchange(x, base, chosen)
        if better == chosen:
            break
        chosen = better
    return tuple(sorted(chosen))


def first_placements(
    candidates: Sequence[tuple[int, int]],
    mode: UpdateMode,
    batch: float = 1.0,
    count: int = FIRST_POINTS,
    model: ServerSpeed | None = None,
    known: Sequence[tuple[int, int]] = (),
) -> tuple[tuple[int, int], ...]:
    """Return the D-optimal `count` of the candidate (servers, workers) at which to measure a new job, in their order.

    Optimus draws its eight to ten at random; as many D-optimal ones leave about seven tenths of the error. `model`: the
    present fit, which weighs each candidate by its predicted step. `known`: placements that are measured.
    """

    def rows(pairs: Sequence[tuple[int, int]]) -> Floats:
        p, w = np.array([pair[0] for pair in pairs], float), np.array([pair[1] for pair in pairs], float)
        if model is None:
            plain = features(mode, p, w)
            return np.asarray(plain / (plain @ np.array(_GUESS[mode]))[:, None], float)
        rates = model.all_steps_per_second(p, w) / (w if mode is UpdateMode.ASYNCHRONOUS else 1.0)
        return np.asarray(features(mode, p, w, batch) * rates[:, None], float)

    if not candidates:
        return ()
    chosen = d_optimal(rows(candidates), count, rows(known) if known else None)
    return tuple(candidates[i] for i in chosen)


def _most_informative(x: Floats, information: Floats, taken: list[int]) -> int:
    gain = np.einsum("ij,ij->i", x @ np.linalg.inv(information), x)
    gain[taken] = -1.0
    return int(np.argmax(np.round(gain, 9)))


def _exchange(x: Floats, base: Floats, chosen: list[int]) -> list[int]:
    """Return the choice after the best exchange of one member for one candidate, or the same choice."""
    best = (float(np.linalg.slogdet(base + x[chosen].T @ x[chosen])[1]) + 1e-9, chosen)
    for place in range(len(chosen)):
        rest = [*chosen[:place], *chosen[place + 1 :]]
        information = base + x[rest].T @ x[rest]
        candidate = _most_informative(x, information, rest)
        swapped = [*rest, candidate]
        value = float(np.linalg.slogdet(information + np.outer(x[candidate], x[candidate]))[1])
        if value > best[0]:
            best = (value + 1e-9, swapped)
    return best[1]
