"""The CPU predictor on published curves, on few points, and on points that are no curve."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from estimators.published import GRID, SYNERGY, synergy_points
from ganger_master.estimators.cores_and_memory import (
    CpuModel,
    CpuPoint,
    Shelf,
    averaged,
    fit_cpu,
    sweet_point_bounds,
    sweet_point_bracket,
)
from ganger_master.estimators.fitting import fit_error
from hypothesis import example, given
from hypothesis import strategies as st

# The dossier's fits of the same curves without a shelf: mean and worst error in percent from all nine points, from
# {1, 3, 24} and from {1, 3, 6, 24} cores.
TABLE = {
    "resnet50": ((1.1, 5.2), (1.0, 8.9), (1.0, 8.9)),
    "mobilenet": ((2.0, 5.9), (1.6, 6.9), (1.6, 6.9)),
    "resnet18": ((4.1, 11.6), (4.1, 16.6), (4.4, 14.0)),
    "m5": ((3.1, 9.9), (5.6, 21.5), (3.2, 17.6)),
    "alexnet": ((8.4, 27.0), (8.2, 47.0), (6.6, 38.5)),
    "shufflenet": ((8.4, 27.0), (8.2, 47.0), (6.6, 38.5)),
    "deepspeech": ((0.0, 0.0), (1.0, 9.1), (1.0, 9.1)),
    "gnmt": ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
}
SUBSETS = (GRID, (1, 3, 24), (1, 3, 6, 24))


def fitted(points: list[CpuPoint]) -> CpuModel:
    model = fit_cpu(points)
    assert model is not None
    return model


@pytest.mark.parametrize("name", TABLE)
def test_published_curves_are_fitted_as_well_as_the_dossier_fits_them(name: str) -> None:
    for cores, (mean, worst) in zip(SUBSETS, TABLE[name], strict=True):
        model = fitted([point for point in synergy_points(name) if point.cores in cores])
        error = fit_error(model.rates(GRID), SYNERGY[name])
        assert 100 * error.mean <= mean + 1.0
        assert 100 * error.worst <= worst + 1.5


@pytest.mark.parametrize("name", ["alexnet", "shufflenet", "m5", "resnet18"])
def test_curves_with_a_second_knee_are_fitted_within_a_tenth(name: str) -> None:
    model = fitted(synergy_points(name))
    assert model.shelf is not None
    assert model.error.mean < 0.03
    assert model.error.worst < 0.1
    assert model.peak == pytest.approx(max(SYNERGY[name]), rel=1e-6)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet", "deepspeech", "gnmt"])
def test_curves_with_one_knee_get_no_shelf(name: str) -> None:
    assert fitted(synergy_points(name)).shelf is None


@given(
    st.floats(0.1, 2.0),
    st.floats(0.0, 0.5),
    st.integers(3, 20),
    st.sampled_from([(1, 2, 4, 8, 16, 24), (1, 3, 6, 12, 24), tuple(range(1, 25))]),
)
def test_exact_curves_come_back_exactly_where_they_were_measured(
    slope: float, bend: float, theta: int, cores: tuple[int, ...]
) -> None:
    truth = CpuModel(bend, slope, bend * math.log(theta) + slope * theta, theta)
    model = fitted([CpuPoint(count, truth.rate(count)) for count in cores])
    assert model.error.worst < 0.02
    assert model.peak == pytest.approx(truth.plateau, rel=0.02)


points_lists = st.lists(st.builds(CpuPoint, st.floats(0.5, 64.0), st.floats(1e-3, 1e3)), min_size=1, max_size=10)


@given(points_lists)
@example([CpuPoint(1.0, 3.0), CpuPoint(0.5, 1.0)])
@example([CpuPoint(0.5 + count / 32, 1.0 + count % 3) for count in range(9)])
def test_no_curve_ever_falls_and_arrays_agree_with_single_calls(points: list[CpuPoint]) -> None:
    model = fitted(points)
    cores = np.concatenate([np.linspace(0.0, 70.0, 211), [point.cores for point in points]])
    one_by_one = [model.rate(float(count)) for count in cores]
    assert model.rates(cores).tolist() == pytest.approx(one_by_one, rel=1e-12, abs=1e-300)
    rising = [model.rate(float(count)) for count in np.sort(cores)]
    assert all(high >= low * (1 - 1e-9) for low, high in pairwise(rising))


def test_one_point_is_proportional_up_to_it_and_flat_beyond() -> None:
    model = fitted([CpuPoint(4, 2.0)])
    assert model.rate(4) == pytest.approx(2.0, rel=0.01)
    assert model.rate(8) == pytest.approx(2.0, rel=0.01)
    assert model.rate(2) == pytest.approx(1.0, rel=0.1)


def test_equal_rates_need_one_core() -> None:
    model = fitted([CpuPoint(count, 3.0) for count in (1, 4, 8)])
    assert model.sweet_point == 1.0
    assert model.plateau == pytest.approx(3.0)


def test_falling_rates_give_a_flat_curve_whose_error_says_so() -> None:
    model = fitted([CpuPoint(1, 3.0), CpuPoint(4, 2.0), CpuPoint(8, 1.0)])
    assert model.rate(8) == pytest.approx(model.rate(1), rel=0.05)
    assert model.error.worst > 0.2


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_unusable_points_are_left_out(bad: float) -> None:
    good = [CpuPoint(1, 1.0), CpuPoint(4, 3.0)]
    assert fit_cpu([*good, CpuPoint(2, bad), CpuPoint(bad, 2.0)]) == fit_cpu(good)
    assert fit_cpu([CpuPoint(2, bad)]) is None
    assert fit_cpu([]) is None


def test_repeats_are_averaged() -> None:
    assert averaged([CpuPoint(2, 1.0), CpuPoint(1, 5.0), CpuPoint(2, 3.0)]) == (CpuPoint(1, 5.0), CpuPoint(2, 2.0))


def test_no_cores_run_nothing_and_half_a_core_runs_half() -> None:
    model = CpuModel(0.0, 1.0, 4.0, 4.0)
    assert (model.rate(0.0), model.rate(-1.0), model.rate(math.nan)) == (0.0, 0.0, 0.0)
    assert model.rate(0.5) == pytest.approx(0.5)


def test_a_shelf_is_climbed_in_a_line() -> None:
    model = CpuModel(0.0, 1.0, 2.0, 2.0, Shelf(6.0, 8.0, 3.0))
    assert [model.rate(count) for count in (1, 2, 6, 7, 8, 20)] == [1.0, 2.0, 2.0, 2.5, 3.0, 3.0]
    assert (model.peak, model.knee) == (3.0, 8.0)


def test_bracket_holds_the_sweet_point() -> None:
    assert sweet_point_bracket(synergy_points("resnet50")) == (3.0, 4.0)
    assert sweet_point_bracket([CpuPoint(1, 1.0), CpuPoint(8, 1.0)]) == (0.0, 1.0)
    assert sweet_point_bracket([]) == (0.0, math.inf)


def test_the_sweet_point_lies_within_its_bounds_which_are_open_where_the_rate_still_rises() -> None:
    flat = [CpuPoint(cores, min(cores, 3.0)) for cores in (1.0, 2.0, 3.0, 4.0, 8.0)]
    low, high = sweet_point_bounds(flat)
    assert low <= 3.0 <= high < 8.0
    assert high - low <= 1.0
    rising = [CpuPoint(cores, cores) for cores in (1.0, 4.0, 8.0)]
    assert sweet_point_bounds(rising)[1] == math.inf
    assert sweet_point_bounds(flat[:1]) == (0.0, math.inf)


def test_points_that_scatter_bound_the_sweet_point_less() -> None:
    cores = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
    noise = (0.97, 1.04, 0.95, 1.05, 0.96, 1.05, 0.94, 1.03)
    exact = [CpuPoint(count, min(count, 5.0)) for count in cores]
    rough = [CpuPoint(point.cores, point.rate * factor) for point, factor in zip(exact, noise, strict=True)]
    (low, high), (rough_low, rough_high) = sweet_point_bounds(exact), sweet_point_bounds(rough)
    assert rough_high - rough_low > high - low
    assert rough_low <= 5.0 <= rough_high
