"""Migrations between time-slice groups, so that all jobs receive the same time in the long run."""

from __future__ import annotations

import pytest
from ganger_master.policies.fairness import Going, ServiceBalance, balanced, quantum_s

QUANTUM_S = 10.0


def one(number: int, device: int, behind_s: float, **other: object) -> ServiceBalance:
    fields = {"settled_s": 100.0, "pause_s": 1.0, **other}
    return ServiceBalance(number, (1, 0), (("n1", 1 << device),), behind_s, **fields)  # type: ignore[arg-type]


def six(behind: float, **first: object) -> list[ServiceBalance]:
    """Two pairs and two alone: the pairs are behind."""
    pairs = [one(1, 0, 0.0, **first), one(2, 1, 0.0), one(5, 0, behind), one(6, 1, 0.0)]
    return [*pairs, one(3, 2, -behind), one(4, 3, 0.0)]


def test_a_neighbour_of_the_job_furthest_behind_goes_to_the_job_furthest_ahead() -> None:
    assert balanced(six(6.0), QUANTUM_S) == [Going(1, 3, 5, 12.0)]


def test_both_pairs_send_one_at_once_each_to_another() -> None:
    standings = [one(1, 0, 6.0), one(5, 0, 7.0), one(2, 1, 6.0), one(6, 1, 8.0), one(3, 2, -14.0), one(4, 3, -13.0)]
    assert balanced(standings, QUANTUM_S) == [Going(2, 3, 6, 22.0), Going(1, 4, 5, 20.0)]


@pytest.mark.parametrize(
    "standings",
    [
        six(5.0),
        six(6.0, may_move=False),
        six(6.0, may_share=False),
        six(6.0, settled_s=19.0),
        six(6.0, pause_s=2.1),
        [one(1, 0, 20.0), one(3, 2, -20.0)],
        [one(1, 0, 20.0), one(5, 0, 20.0), one(2, 1, -20.0), one(6, 1, -20.0)],
    ],
    ids=[
        "one more quantum mends it",
        "it is not to be moved",
        "it takes no turns",
        "it came a moment ago",
        "what moves cost is more than a fiftieth",
        "it has its device alone",
        "as many are where it would go",
    ],
)
def test_no_job_moves_where(standings: list[ServiceBalance]) -> None:
    assert balanced(standings, QUANTUM_S) == []


def test_only_devices_as_good_count() -> None:
    other = ServiceBalance(3, (2, 0), (("n1", 4),), -6.0, 100.0, 1.0)
    assert balanced([one(1, 0, 0.0), one(5, 0, 6.0), other], QUANTUM_S) == []


def test_quantum_is_fifty_switches_at_least() -> None:
    assert quantum_s(0.1) == 60.0
    assert quantum_s(2.0) == 100.0
    assert quantum_s(0.05, wanted_s=1.0) == 2.5
