"""The collector of cycles leaves alone what is there, for as long as it is told to."""

from __future__ import annotations

import gc

from ganger_master.runtime.heap import settled


def test_what_lives_long_is_looked_at_again_afterwards() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with settled():
        assert gc.get_freeze_count() > before[1]
        assert gc.get_threshold() > before[0]
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before[0], 0)
