"""Synergy's matrix from a few probes, and what is read from it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from ganger_master.models.accuracy import fit_error
from ganger_master.models.cpu import CpuPoint
from ganger_master.models.sensitivity import MOST_POINTS, SensitivityMatrix, next_cores, sensitivity
from ganger_master.models.storage import MemoryPoint, fit_fetch
from hypothesis import given
from hypothesis import strategies as st
from models.published import GRID, SYNERGY, synergy_matrices

GB = 1e9


def profile(rate: dict[int, float], most: int) -> list[CpuPoint]:
    points: list[CpuPoint] = []
    while (count := next_cores(points, most)) is not None:
        points.append(CpuPoint(count, rate[count]))
    return points


def interpolated(rates: tuple[float, ...] | list[float]) -> dict[int, float]:
    return {count: float(np.interp(count, GRID, rates)) for count in range(1, 25)}


@pytest.mark.parametrize("name", SYNERGY)
def test_bisection_reads_a_published_curve_from_eight_points(name: str) -> None:
    points = profile(interpolated(SYNERGY[name]), 24)
    assert len(points) <= MOST_POINTS
    matrix = sensitivity(points, None, GRID, [1.0])
    assert matrix is not None
    assert fit_error(matrix.table[:, 0], SYNERGY[name]).worst < 0.05


def test_every_published_matrix_is_rebuilt_from_one_axis_and_a_cache_model() -> None:
    for name, published in synergy_matrices().items():
        table = published.rates
        memory = [gigabytes * GB for gigabytes in published.memory_gigabytes]
        fetch = fit_fetch([MemoryPoint(amount, rate) for amount, rate in zip(memory, table[-1], strict=True)])
        matrix = sensitivity(profile(interpolated(table[:, -1].tolist()), 24), fetch, GRID, memory)
        assert matrix is not None
        error = fit_error(matrix.table.ravel(), table.ravel())
        assert error.mean < 0.005, name
        assert error.worst < 0.03, name
        cores, amount = matrix.demand(0.99)
        assert cores == published.best_cores, name
        assert amount / GB == pytest.approx(published.best_gigabytes, abs=1.0), name


def test_equal_ends_are_not_split_and_all_cores_come_first() -> None:
    assert next_cores([], 24) == 24
    assert next_cores([CpuPoint(24, 1.0)], 24) == 1
    assert next_cores([CpuPoint(24, 1.0), CpuPoint(1, 0.95)], 24) is None
    assert next_cores([CpuPoint(24, 1.0), CpuPoint(1, 0.5)], 24) == 12
    assert next_cores([CpuPoint(2, 1.0), CpuPoint(1, 0.5)], 2) is None
    assert next_cores([CpuPoint(1, 0.5)], 1) is None
    assert next_cores([], 0) is None


def naive_rate(matrix: SensitivityMatrix, cores: float, memory: float) -> float:
    column = max((j for j, m in enumerate(matrix.memory_bytes) if m <= memory * (1 + 1e-9)), default=-1)
    share = 1.0 if column >= 0 else memory / matrix.memory_bytes[0]
    grid = [(0.0, 0.0), *((c, row[max(column, 0)]) for c, row in zip(matrix.cores, matrix.rates, strict=True))]
    for (c0, r0), (c1, r1) in pairwise(grid):
        if cores <= c1:
            return share * (r0 + (r1 - r0) * (cores - c0) / (c1 - c0))
    return share * grid[-1][1]


@given(
    st.lists(st.lists(st.floats(0.1, 5.0), min_size=3, max_size=3), min_size=4, max_size=4),
    st.floats(0.1, 20.0),
    st.floats(0.1, 20.0),
)
def test_reading_between_cells_agrees_with_doing_it_by_hand(
    rates: list[list[float]], cores: float, memory: float
) -> None:
    matrix = SensitivityMatrix((1.0, 2.0, 4.0, 8.0), (2.0, 4.0, 8.0), tuple(map(tuple, rates)))
    assert matrix.rate(cores, memory) == pytest.approx(naive_rate(matrix, cores, memory))


def test_no_cores_or_no_memory_run_nothing() -> None:
    matrix = SensitivityMatrix((1.0,), (1.0,), ((1.0,),))
    assert (matrix.rate(0.0, 1.0), matrix.rate(1.0, 0.0)) == (0.0, 0.0)


def test_shapes_that_are_no_matrix_are_refused() -> None:
    for cores, memory, rates in (
        ((), (1.0,), ()),
        ((2.0, 1.0), (1.0,), ((1.0,), (1.0,))),
        ((1.0,), (1.0,), ((1.0, 2.0),)),
    ):
        with pytest.raises(ValueError, match=r"sensitivity matrix|rates must"):
            SensitivityMatrix(cores, memory, rates)


def test_nothing_measured_makes_no_matrix_and_falling_rates_are_made_flat() -> None:
    assert sensitivity([], None, [1.0], [1.0]) is None
    matrix = sensitivity([CpuPoint(1, 2.0), CpuPoint(4, 1.0)], None, [1.0, 4.0], [1.0])
    assert matrix is not None
    assert matrix.rates == ((2.0,), (2.0,))
