"""Sets of nodes as integers: put together and walked through as one would bit by bit."""

from __future__ import annotations

from ganger.cluster.feasibility import each, each_from_last, together
from hypothesis import given
from hypothesis import strategies as st

SIZE = 1_000
SLOTS = st.one_of(
    st.sets(st.integers(0, SIZE - 1), max_size=SIZE),
    st.integers(0, SIZE).map(lambda count: set(range(count))),
    st.integers(0, 3).map(lambda count: {64 * place for place in range(count)} | {SIZE - 1}),
)


@given(SLOTS)
def test_slots_as_one_integer_are_those_that_were_put_together(slots: set[int]) -> None:
    assert together(list(slots), SIZE) == sum(1 << slot for slot in slots)


@given(SLOTS)
def test_slots_are_walked_through_in_order_from_either_end(slots: set[int]) -> None:
    mask = sum(1 << slot for slot in slots)
    assert list(each(mask)) == sorted(slots)
    assert list(each_from_last(mask)) == sorted(slots, reverse=True)
