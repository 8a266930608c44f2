"""Where gangs go by what was measured of gangs like them: beside how many devices in use, and on which type of GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from ganger_master.policies.measured_places import harmless_load, types_by_gain

FAST = (9.9, 10.0, 10.1, 10.0)
SLOW = tuple(0.7 * rate for rate in FAST)
NOISY = (4.0, 14.0, 12.0, 6.0)


@pytest.mark.parametrize(
    ("rates", "load"),
    [
        ({}, math.inf),
        ({0: FAST}, math.inf),
        ({0: FAST, 4: FAST}, math.inf),
        ({0: SLOW, 4: FAST}, math.inf),
        ({0: FAST, 4: SLOW}, 0),
        ({0: FAST, 3: FAST, 4: SLOW}, 3),
        ({0: FAST, 40: SLOW}, 4),
        # What may be chance, or rests on too few windows, is no harm.
        ({0: NOISY, 4: SLOW}, math.inf),
        ({0: FAST, 4: SLOW[:3]}, math.inf),
    ],
)
def test_a_gang_is_kept_from_nodes_with_more_devices_in_use_than_are_harmless(
    rates: Mapping[int, tuple[float, ...]], load: float
) -> None:
    assert harmless_load(rates) == load


GAINS_MUCH, GAINS_LITTLE, GAINS_NOTHING = {"old": 1.0, "new": 3.0}, {"old": 4.0, "new": 5.0}, {"old": 4.0, "new": 4.1}


@pytest.mark.parametrize(
    ("own", "is_scarce", "types"),
    [
        ({}, True, []),
        ({"new": 3.0}, True, []),
        (GAINS_NOTHING, False, []),
        (GAINS_NOTHING, True, []),
        (GAINS_LITTLE, False, ["new", "old"]),
        (GAINS_MUCH, False, ["new", "old"]),
        (GAINS_LITTLE, True, ["old", "new"]),
        (GAINS_MUCH, True, ["new", "old"]),
    ],
)
def test_once_devices_are_scarce_the_fast_ones_are_left_to_programs_that_gain_much(
    own: Mapping[str, float], is_scarce: bool, types: list[str]
) -> None:
    assert list(types_by_gain(own, [GAINS_MUCH, GAINS_LITTLE, {"new": 1.0}], is_scarce=is_scarce)) == types


def test_the_only_known_program_takes_the_fastest_type() -> None:
    assert list(types_by_gain(GAINS_LITTLE, [GAINS_LITTLE], is_scarce=True)) == ["new", "old"]
