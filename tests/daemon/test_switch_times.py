"""What a node makes of the switches it has measured, by which quanta are as long as they are."""

from __future__ import annotations

import pytest
from ganger_daemon.rotation import Standing


@pytest.mark.parametrize("switches", [[4.0, 0.1], [0.1, 4.0], [0.1, 4.0, 0.1], [4.0, 0.1, 0.1, 4.0]])
def test_a_switch_that_was_late_makes_no_quantum_long_once_others_were_not(switches: list[float]) -> None:
    assert Standing(1, switches=switches).switch_seconds == 0.1


def test_switches_that_take_long_are_believed() -> None:
    assert Standing(1).switch_seconds == 0.0
    assert Standing(1, switches=[4.0]).switch_seconds == 4.0
    assert Standing(1, switches=[4.0, 4.1, 0.1, 4.2, 3.9]).switch_seconds == 4.0
