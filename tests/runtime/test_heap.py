"""The collector of cycles leaves alone what is there, for as long as it is told to."""

from __future__ import annotations

import gc

from ganger_master.runtime.process_setup import settled


def test_what_lives_long_is_looked_at_again_afterwards() -> None:
    # Other tests of this process may have set other thresholds, and left objects frozen.
    found = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    try:
        with settled():
            assert gc.get_freeze_count() > 0
            assert gc.get_threshold() > (700, 10, 10)
        assert (gc.get_threshold(), gc.get_freeze_count()) == ((700, 10, 10), 0)
    finally:
        gc.set_threshold(*found)
