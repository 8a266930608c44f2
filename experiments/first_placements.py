"""Where to measure a new job over parameter servers first: D-optimal numbers of servers and workers.

Optimus draws its eight to ten placements at random.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ganger_master.estimators.fitting import Floats

from experiments.server_speed import ServerSpeed, UpdateMode, features

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
