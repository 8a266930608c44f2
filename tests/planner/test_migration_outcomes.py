"""When to look at what a move has brought: as soon as there may be more to say, and not before."""

from __future__ import annotations

import pytest
from ganger_master.planner.migration_outcomes import next_judgement_in_s


@pytest.mark.parametrize(
    ("gone_s", "windows", "look_s"),
    [
        # Nothing has been seen yet: by and by.
        (5.0, 0, 10.0),
        (100.0, 0, 50.0),
        # A window every ten seconds, after the first: the fourth comes at 50 s, the eighth at 90 s.
        (20.0, 1, 30.0),
        (40.0, 3, 10.0),
        (50.0, 4, 40.0),
        (60.0, 5, 30.0),
        (80.0, 7, 10.0),
        (1.0, 3, 2.0),
    ],
)
def test_the_next_look_is_when_as_many_windows_are_full_as_judging_needs(
    gone_s: float, windows: int, look_s: float
) -> None:
    assert next_judgement_in_s(gone_s, windows) == pytest.approx(look_s)
