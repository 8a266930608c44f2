"""Rates of jobs by how much others have in use on their nodes."""

from __future__ import annotations

import pytest
from planner.test_together import Seen


def test_a_job_is_measured_with_each_load_of_its_node_as_others_come_and_go() -> None:
    seen = Seen()
    seen.runs(1, 0b1, rate=10.0)
    seen.go_on(60.0)
    load, rates = seen.crowd(1)
    assert (load, set(rates)) == (0, {0})
    seen.runs(2, 0b1110)
    seen.rates[1] = 7.0
    # What settles yet does not count.
    seen.go_on(4.0)
    assert set(seen.crowd(1)[1]) == {0}
    seen.go_on(40.0)
    load, rates = seen.crowd(1)
    assert (load, set(rates)) == (3, {0, 3})
    assert rates[0] == pytest.approx([10.0] * len(rates[0]))
    assert rates[3] == pytest.approx([7.0] * len(rates[3]), rel=0.1)
    assert len(rates[0]) <= 16
    seen.ends(2)
    assert seen.crowd(1)[0] == 0


def test_who_shares_its_device_is_not_measured_and_other_cores_make_void_what_was() -> None:
    seen = Seen()
    seen.runs(1, 0b1)
    seen.go_on(60.0)
    seen.runs(2, 0b1)
    seen.go_on(60.0)
    assert set(seen.crowd(1)[1]) == {0}
    seen.ends(2)
    seen.runs(1, 0b1, cores=2_000)
    assert seen.crowd(1) == (0, {})
    seen.ends(1)
    assert seen.crowd(1) == (0, {})
