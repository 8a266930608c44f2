"""Sorting by columns."""

from __future__ import annotations

import numpy as np
from ganger_master.policies.orders import behind, sorted_by
from hypothesis import given
from hypothesis import strategies as st

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.5, np.inf, -np.inf, np.nan])


@given(st.lists(st.tuples(NUMBERS, st.booleans(), st.integers(-2, 2), NUMBERS), min_size=1, max_size=30))
def test_columns_sort_as_rows_do_ties_and_nan_included(rows: list[tuple[float, bool, int, float]]) -> None:
    columns = [np.array(column) for column in zip(*rows, strict=True)]

    def naive(at: int) -> list[tuple[bool, float]]:
        return [(bool(np.isnan(value)), 0.0 if np.isnan(value) else float(value)) for value in rows[at]]

    expected = sorted(range(len(rows)), key=naive)
    assert sorted_by(*columns).tolist() == expected


@given(st.lists(st.tuples(NUMBERS, st.booleans(), NUMBERS), min_size=1, max_size=30), st.data())
def test_behind_a_row_are_the_rows_sorted_after_it(rows: list[tuple[float, bool, float]], data: st.DataObject) -> None:
    columns = [*[np.array(column) for column in zip(*rows, strict=True)], np.arange(len(rows))]
    line = sorted_by(*columns).tolist()
    at = data.draw(st.integers(0, len(rows) - 1))
    assert sorted(line[line.index(at) + 1 :]) == behind(columns, at).nonzero()[0].tolist()
