"""Sorting by several columns, and looking up many values, at the speed of sorting one column of numbers.

Of many rows most differ in the first column that has more than one value: only those that it leaves tied are sorted by
the others. NumPy's stable sorts, which `lexsort` needs, take five to ten times as long as its others, so that of many
tied rows columns are turned into ranks, and ranks into one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ganger_master.policies.job_facts import Flags, Floats, Integers

# With fewer rows `lexsort` is faster: it makes use of columns that are nearly in order, as those by arrival are.
_MANY = 2_000
_MOST = 2**62


def sorted_by(*columns: NDArray[Any]) -> Integers:
    """Positions, smallest first; the first column decides, then the next; ties that all leave stay in their order. NaN
    comes last."""
    if len(columns[0]) < _MANY:
        return np.lexsort(columns[::-1])
    at = next((at for at, column in enumerate(columns) if not (column == column[:1]).all()), None)
    if at is None:
        return np.arange(len(columns[0]))
    line: Integers = np.argsort(columns[at])
    ordered = columns[at][line]
    # Of which NaN is none: it counts as tied with its neighbours.
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
    # What is still tied stays in its order, without a stable sort.
    key, _ = _narrow(key, distinct, count)
    return np.argsort(key * count + np.arange(count))


def _narrow(key: Integers, distinct: int, factor: int) -> tuple[Integers, int]:
    """The same order in numbers that may be multiplied by `factor`, and how many there may be."""
    if distinct * factor <= _MOST:
        return key, distinct
    keys, key = np.unique(key, return_inverse=True)
    return key, len(keys)


def behind(columns: Sequence[NDArray[Any]], at: int) -> Flags:
    """Which rows come after the one at this position, as they would be sorted; none that equals it in all columns."""
    found, is_tied = np.zeros(len(columns[0]), bool), np.ones(len(columns[0]), bool)
    for column in columns:
        value = column[at]
        if value != value:
            is_tied &= column != column
        else:
            found |= is_tied & ~(column <= value)
            is_tied &= column == value
        if np.count_nonzero(is_tied) == 1:
            # Nobody but itself.
            break
    return found


def counted_below(values: Floats, limits: Floats) -> Integers:
    """How many of `values`, ascending, are at most each of the `limits`: as `searchsorted`, for many limits."""
    by_limit = np.argsort(limits)
    counts = np.empty(len(limits), np.int64)
    # In their order neighbours of neighbours are found, not each from afar.
    counts[by_limit] = np.searchsorted(values, limits[by_limit], side="right")
    return counts
