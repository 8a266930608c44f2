"""Sorting by several columns, and look-up of many values, at the speed of sorting one column of numbers.

Most rows differ in the first column that has more than one value, so only rows that tie there are sorted by the other
columns. NumPy's stable sorts, which `lexsort` needs, take five to ten times as long as its unstable ones. So for many
tied rows each column becomes ranks, and the ranks become one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Flags, Floats, Integers

# With fewer rows `lexsort` is faster: it profits from columns that are nearly sorted, as arrivals are.
_MANY = 2_000
_MOST = 2**62


def sorted_by(*columns: NDArray[Any]) -> Integers:
    """Return positions, smallest first: the first column decides, then the next. Complete ties keep their order; NaN
    comes last."""
    if len(columns[0]) < _MANY:
        return np.lexsort(columns[::-1])
    at = next((at for at, column in enumerate(columns) if not (column == column[:1]).all()), None)
    if at is None:
        return np.arange(len(columns[0]))
    line: Integers = np.argsort(columns[at])
    ordered = columns[at][line]
    # NaN counts as tied with its neighbours.
    differs = ordered[1:] > ordered[:-1]
    if not differs.all():
        is_tied = np.zeros(len(line), bool)
        is_tied[1:] = ~differs
        is_tied[:-1] |= ~differs
        tied = np.sort(line[is_tied])
        line[is_tied] = tied[_sorted_by_all([column[tied] for column in columns[at:]])]
    return line


def _sorted_by_all(columns: Sequence[NDArray[Any]]) -> Integers:
    count = len(columns[0])
    if count < _MANY:
        return np.lexsort(columns[::-1])
    key, distinct = np.zeros(count, np.int64), 1
    for column in columns:
        values, ranks = np.unique(column, return_inverse=True)
        key, distinct = _narrow(key, distinct, len(values))
        key = key * len(values) + ranks
        distinct *= len(values)
        if len(values) == count:
            return np.argsort(key)
    # The position as last digit keeps ties in their order without a stable sort.
    key, _ = _narrow(key, distinct, count)
    return np.argsort(key * count + np.arange(count))


def _narrow(key: Integers, distinct: int, factor: int) -> tuple[Integers, int]:
    """Return keys of the same order, small enough to multiply by `factor`, and a bound of their number."""
    if distinct * factor <= _MOST:
        return key, distinct
    keys, key = np.unique(key, return_inverse=True)
    return key, len(keys)


def behind(columns: Sequence[NDArray[Any]], at: int) -> Flags:
    """Return which rows sort after the one at this position; a row that equals it in all columns does not."""
    found, is_tied = np.zeros(len(columns[0]), bool), np.ones(len(columns[0]), bool)
    for column in columns:
        value = column[at]
        if value != value:
            is_tied &= column != column
        else:
            found |= is_tied & ~(column <= value)
            is_tied &= column == value
        if np.count_nonzero(is_tied) == 1:
            # Only the row itself is still tied.
            break
    return found


def counted_below(values: Floats, limits: Floats) -> Integers:
    """Count, for each of the `limits`, the ascending `values` that are at most it: `searchsorted` for many limits."""
    by_limit = np.argsort(limits)
    counts = np.empty(len(limits), np.int64)
    # Sorted limits make the search cache-friendly.
    counts[by_limit] = np.searchsorted(values, limits[by_limit], side="right")
    return counts
