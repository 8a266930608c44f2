"""The queue, kept in sorted runs, equals one sorted list."""

from __future__ import annotations

from bisect import insort

import pytest
from ganger_master.core import queue as waiting
from ganger_master.core.queue import Place, Waiting
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 400)), unique_by=lambda place: place[1]), st.data())
def test_any_sequence_of_adds_and_removes_keeps_the_order(places: list[Place], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_LONGEST_RUN", 4)
        queue, naive = Waiting(), list[Place]()
        for place in places:
            queue.add(place)
            insort(naive, place)
            if data.draw(st.booleans()):
                gone = naive.pop(data.draw(st.integers(0, len(naive) - 1)))
                queue.remove(gone)
            assert list(queue) == [number for _, number in naive]
            assert len(queue) == len(naive)
            assert [queue.rank(one) for one in naive] == list(range(len(naive)))
