"""A long plan is told in parts, and what belongs together in one of them."""

from __future__ import annotations

import pytest
from ganger.cluster.resources import Claim
from ganger_master.core.commands import KeepPlace
from ganger_master.core.plan_changes import Goal, PlanChange, StartChange, SuspendChange, TrialFinding
from ganger_master.planner.context import Plan, parts_of
from hypothesis import given
from hypothesis import strategies as st


def plan(*groups: int) -> Plan:
    """Groups of so many changes; zero stands for one without a group."""
    changes: list[PlanChange] = []
    for group in groups:
        first = len(changes) + 1
        numbers = range(first, first + max(1, group))
        changes.extend([SuspendChange(number, 1, together=first if group else 0) for number in numbers])
    return Plan(tuple(changes))


@pytest.mark.parametrize(
    ("groups", "lengths"),
    [
        ((), []),
        ((0, 0, 0), [3]),
        ((0, 0, 0, 0), [3, 1]),
        ((0, 0, 2), [2, 2]),
        ((2, 2, 0), [2, 3]),
        # One that is longer than a part is one by itself.
        ((0, 5, 0), [1, 5, 1]),
    ],
)
def test_a_part_ends_before_the_group_that_no_longer_fits(groups: tuple[int, ...], lengths: list[int]) -> None:
    assert [len(part.changes) for part in parts_of(plan(*groups), 3)] == lengths


def test_a_part_ends_before_the_gang_whose_claims_no_longer_fit() -> None:
    claims = tuple([Claim(f"n{number}", 1, (1_000,), 1 << 30, 0, (1,)) for number in range(4)])
    changes = [StartChange(number, 1, claims[:many]) for number, many in enumerate((2, 2, 1, 4, 1))]
    parts = parts_of(Plan(tuple(changes)), most_claims=3)
    assert [[change.number for change in part.changes] for part in parts] == [[0], [1, 2], [3], [4]]


@given(st.lists(st.integers(0, 6), max_size=20), st.integers(1, 8))
def test_nothing_is_lost_or_cut(groups: list[int], most: int) -> None:
    whole = plan(*groups)
    parts = [part.changes for part in parts_of(whole, most)]
    assert tuple([change for part in parts for change in part]) == whole.changes
    seen: set[int] = set()
    for part in parts:
        names = {change.together for change in part if change.together}
        assert not names & seen
        seen |= names
        assert len(part) <= most or len({change.together for change in part}) == 1


def test_findings_and_kept_places_go_with_the_first_part_and_the_line_with_the_last() -> None:
    findings, kept_places = (TrialFinding(1, Goal.PACK, True, 1.2),), (KeepPlace(7, ()),)
    whole = Plan(plan(0, 0, 0).changes, findings, (7, 8), kept_places)
    first, second, last = parts_of(whole, 1)
    assert (first.findings, first.line, first.kept_places) == (findings, None, kept_places)
    assert (second.findings, second.line, second.kept_places) == ((), None, None)
    assert (last.findings, last.line, last.kept_places) == ((), (7, 8), None)
    assert list(parts_of(Plan(line=()))) == [Plan(line=())]
    assert list(parts_of(Plan())) == []
