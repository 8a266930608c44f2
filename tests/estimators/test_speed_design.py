"""Experiment design for linear laws: close to the best set of all, and sound at the edges."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from ganger_master.estimators.server_speed import ServerSpeed, UpdateMode, d_optimal, first_placements

GRID = [(p, w) for p in range(1, 9) for w in range(1, 9)]


def determinant(rows: np.ndarray, chosen: tuple[int, ...], known: np.ndarray | None = None) -> float:
    scaled = rows / np.sqrt(np.mean(rows**2, axis=0))
    information = 1e-3 * np.eye(rows.shape[1]) + scaled[list(chosen)].T @ scaled[list(chosen)]
    if known is not None:
        other = known / np.sqrt(np.mean(rows**2, axis=0))
        information = information + other.T @ other
    return float(np.linalg.det(information))


@pytest.mark.parametrize("seed", range(8))
def test_chosen_set_is_within_a_few_percent_of_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.lognormal(size=(12, 3))
    known = random.lognormal(size=(2, 3)) if seed % 2 else None
    found = d_optimal(rows, 4, known)
    best = max(determinant(rows, chosen, known) for chosen in combinations(range(12), 4))
    # the third root: per coefficient
    assert (determinant(rows, found, known) / best) ** (1 / 3) > 0.95


def test_more_than_all_are_all_and_none_is_none() -> None:
    rows = np.eye(3)
    assert d_optimal(rows, 5) == (0, 1, 2)
    assert d_optimal(rows, 0) == ()
    assert first_placements([], UpdateMode.SYNCHRONOUS) == ()
    with pytest.raises(ValueError, match="candidates by coefficients"):
        d_optimal(np.zeros(3), 1)


def test_equal_candidates_and_zero_columns_do_no_harm() -> None:
    assert len(set(d_optimal(np.ones((6, 3)), 3))) == 3
    assert len(set(d_optimal(np.zeros((6, 3)), 3))) == 3


@pytest.mark.parametrize("mode", UpdateMode)
def test_first_placements_reach_into_the_corners(mode: UpdateMode) -> None:
    chosen = first_placements(GRID, mode)
    assert len(chosen) == len(set(chosen)) == 8
    assert (1, 8) in chosen
    assert {min(p for p, _ in chosen), min(w for _, w in chosen)} == {1}
    assert max(p for p, _ in chosen) == 8


def test_known_points_are_not_paid_for_twice() -> None:
    model = ServerSpeed(UpdateMode.SYNCHRONOUS, (1.0, 0.5, 0.5, 0.01, 0.01, 0.3))
    known = first_placements(GRID, UpdateMode.SYNCHRONOUS, count=6)
    rest = [pair for pair in GRID if pair not in known]
    more = first_placements(rest, UpdateMode.SYNCHRONOUS, count=3, model=model, known=known)
    assert len(more) == 3
    assert not set(more) & set(known)


def test_the_choice_does_not_depend_on_the_run() -> None:
    assert first_placements(GRID, UpdateMode.ASYNCHRONOUS) == first_placements(list(GRID), UpdateMode.ASYNCHRONOUS)
