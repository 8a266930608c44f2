"""Migrations off crowded nodes: only gangs measured to be slower there, where it pays and harms no other gang more."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from ganger.cluster.capacity_index import CapacityIndex
from ganger.cluster.view import View
from ganger_master.core.plan_changes import Goal
from ganger_master.policies.migration_choice import MigrationTerms, SlowedGang, Tried, at_most, relieved, tried
from ganger_master.policies.trials import FailedTrials
from kit.clusters import cluster
from policies.test_migration import put, rows

FAST = (9.9, 10.0, 10.1, 10.0)
SLOW = tuple(0.7 * rate for rate in FAST)
NOISY = (4.0, 14.0, 12.0, 6.0)


def crowded(
    view: View, number: int, node: int, load: int, rates: Mapping[int, tuple[float, ...]], remaining_s: float = 3600.0
) -> SlowedGang:
    return SlowedGang(put(view, number, (node, 1)), load, rates, remaining_s)


def test_a_gang_slower_beside_others_goes_where_as_few_are_as_when_it_was_faster() -> None:
    view = cluster(3)
    put(view, 8, (0, 3))
    put(view, 9, (1, 2))
    one = crowded(view, 1, 0, 3, {0: FAST, 3: SLOW})
    room, before = CapacityIndex(view), rows(view)
    (found,) = relieved(MigrationTerms(room), [one])
    assert rows(view) == before
    assert (found.goal, [claim.node for claim in found.moves[0].claims]) == (Goal.BALANCE, ["s2"])
    # Less than three tenths of what is left, for windows scatter.
    assert 0.25 * 3600.0 < found.saves < 0.3 * 3600.0
    failed = FailedTrials[Tried]().noted(tried(1, "", found.moves[0].claims), 0.0)
    assert relieved(MigrationTerms(room, 10.0, failed), [one]) == []
    assert relieved(MigrationTerms(room, 4000.0, failed), [one]) == [found]


@pytest.mark.parametrize(
    ("rates", "remaining_s", "why"),
    [
        ({}, 3600.0, "nothing was measured"),
        ({3: SLOW}, 3600.0, "nothing was measured with fewer"),
        ({0: FAST}, 3600.0, "nothing was measured as it is now"),
        ({0: FAST, 3: FAST}, 3600.0, "it is as fast"),
        ({0: SLOW, 3: FAST}, 3600.0, "it is faster here"),
        ({0: FAST[:2], 3: SLOW}, 3600.0, "too few windows"),
        ({0: NOISY, 3: SLOW}, 3600.0, "it may be chance"),
        ({0: FAST, 3: SLOW}, 5.0, "it ends soon"),
        ({6: FAST, 3: SLOW}, 3600.0, "it was faster only beside more"),
    ],
)
def test_no_gang_leaves(rates: Mapping[int, tuple[float, ...]], remaining_s: float, why: str) -> None:
    view = cluster(2)
    put(view, 9, (0, 3))
    assert relieved(MigrationTerms(CapacityIndex(view)), [crowded(view, 1, 0, 3, rates, remaining_s)]) == [], why


def test_no_gang_goes_where_devices_are_in_use_or_others_would_lose_more() -> None:
    view = cluster(2)
    put(view, 9, (0, 3))
    other = crowded(view, 2, 1, 0, {0: FAST, 1: SLOW}, remaining_s=9000.0)
    assert relieved(MigrationTerms(CapacityIndex(view)), [crowded(view, 1, 0, 3, {0: FAST, 3: SLOW})]) == []
    view = cluster(2)
    put(view, 9, (0, 2))
    other = crowded(view, 2, 1, 0, {0: FAST, 1: SLOW}, remaining_s=9000.0)
    one = crowded(view, 1, 0, 2, {1: FAST, 2: SLOW})
    assert relieved(MigrationTerms(CapacityIndex(view)), [one, other]) == []
    (found,) = relieved(MigrationTerms(CapacityIndex(view)), [one])
    assert found.moves[0].number == 1


def test_of_one_node_one_leaves_at_once_and_none_comes_to_a_node_to_which_another_goes() -> None:
    view = cluster(3)
    gangs = [crowded(view, number, number // 2, 1, {0: FAST, 1: SLOW}) for number in range(4)]
    (found,) = relieved(MigrationTerms(CapacityIndex(view)), gangs)
    assert [claim.node for claim in found.moves[0].claims] == ["s2"]


def test_how_much_faster_it_was_is_what_it_was_at_least() -> None:
    view = cluster(1)
    assert at_most(crowded(view, 1, 0, 2, {0: FAST, 1: NOISY, 2: SLOW})) == (0, pytest.approx(1.41, abs=0.03))
