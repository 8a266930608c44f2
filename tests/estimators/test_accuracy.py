"""Errors are relative, and say over how many points."""

from __future__ import annotations

import math

import pytest
from ganger_master.estimators.fitting import NOT_FITTED, fit_error, is_usable
from hypothesis import given
from hypothesis import strategies as st

positive = st.floats(0.01, 100.0)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=20))
def test_error_is_what_adding_up_by_hand_gives(pairs: list[tuple[float, float]]) -> None:
    found = fit_error([p for p, _ in pairs], [m for _, m in pairs])
    by_hand = [abs(p - m) / m for p, m in pairs]
    assert found.points == len(pairs)
    assert found.mean == pytest.approx(sum(by_hand) / len(by_hand))
    assert found.worst == pytest.approx(max(by_hand))


def test_no_points_make_no_error_and_unequal_numbers_of_points_are_refused() -> None:
    assert fit_error([], []) == NOT_FITTED
    with pytest.raises(ValueError, match="predictions for"):
        fit_error([1.0], [1.0, 2.0])


def test_only_finite_numbers_above_zero_are_usable() -> None:
    assert is_usable(1e-99, 1e99)
    assert not any(is_usable(1.0, bad) for bad in (0.0, -1.0, math.nan, math.inf, 1e-300, 1e300))
