"""What memory buys: the cache model on Synergy's m5, and on numbers that are no curve."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from ganger_master.models.storage import FetchModel, MemoryPoint, fetch_from_dataset, fit_fetch
from hypothesis import given
from hypothesis import strategies as st

GB = 1e9
# Synergy's m5 at six cores, a V100 (msr-fiddle/synergy, MIT): GB, rate.
M5 = ((20.83, 0.1), (62.5, 1.5), (125.0, 2.0), (187.5, 2.5), (250.0, 2.5))


def fitted(rows: tuple[tuple[float, float], ...]) -> FetchModel:
    model = fit_fetch([MemoryPoint(memory * GB, rate) for memory, rate in rows])
    assert model is not None
    return model


def test_m5_is_fitted_within_a_percent_and_thrashes_below_its_working_set() -> None:
    model = fitted(M5)
    assert model.error.worst < 0.01
    assert model.working_set_bytes == 62.5 * GB
    assert model.rate(20 * GB) == 0.1


def test_two_points_predict_the_third_by_the_cache_share() -> None:
    # seconds per unit fall in a line with memory: 1/1.5, 1/2, so 1/3 at 187.5 GB, were nothing else in the way
    model = fetch_from_dataset(250 * GB, 1.0, 1.2, 1e9)
    measured = [MemoryPoint(m * GB, model.rate(m * GB)) for m in (62.5, 125.0, 250.0)]
    again = fit_fetch(measured)
    assert again is not None
    assert again.rate(187.5 * GB) == pytest.approx(model.rate(187.5 * GB), rel=0.05)


@given(st.lists(st.tuples(st.floats(1.0, 500.0), st.floats(0.01, 100.0)), min_size=1, max_size=6))
def test_more_memory_never_slows_a_job_down(rows: list[tuple[float, float]]) -> None:
    model = fitted(tuple(rows))
    rates = [model.rate(memory * GB) for memory in range(0, 600, 7)]
    assert all(high >= low * (1 - 1e-9) for low, high in pairwise(rates))


def test_one_point_and_equal_rates_say_memory_does_not_matter() -> None:
    for rows in (((50.0, 2.0),), ((50.0, 2.0), (100.0, 2.0), (200.0, 2.0))):
        model = fitted(rows)
        assert model.rate(50 * GB) == pytest.approx(2.0)
        assert model.rate(500 * GB) == pytest.approx(2.0)


def test_rates_that_fall_with_memory_are_flat_with_an_error() -> None:
    model = fitted(((50.0, 4.0), (100.0, 2.0)))
    assert model.rate(100 * GB) >= model.rate(50 * GB)
    assert model.error.worst > 0.2


@pytest.mark.parametrize("bad", [0.0, -3.0, math.nan, math.inf])
def test_unusable_numbers_are_left_out_or_refused(bad: float) -> None:
    assert fit_fetch([MemoryPoint(bad, 1.0), MemoryPoint(1.0, bad)]) is None
    with pytest.raises(ValueError, match="above zero"):
        fetch_from_dataset(bad, 1.0, 1.0, 1.0)


def test_a_job_that_fetches_nothing_is_never_held_up() -> None:
    assert FetchModel(0.0, 0.0, 0.0).rate(0.0) == math.inf
