"""Synergy's matrix: where its profiling measures, and what is read from it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from estimators.published import GRID, SYNERGY
from ganger_master.estimators.cores_and_memory import MOST_POINTS, CpuPoint, SensitivityMatrix, averaged, next_cores
from ganger_master.estimators.fitting import fit_error
from hypothesis import given
from hypothesis import strategies as st


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
    measured = averaged(points)
    rates = np.interp(GRID, [point.cores for point in measured], [point.rate for point in measured])
    assert fit_error(rates, SYNERGY[name]).worst < 0.05


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
