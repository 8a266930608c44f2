"""Where a gang stops: the rule on tables, and on free-running gangs."""

from __future__ import annotations

import pytest
from ganger.protocol.stop_rules import BoundaryDecision, RankPoint, decide, stop_step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from injob.gang_model import DeadlockError, Gang, LeaderGang, OverrunError, Setting, fixed_allowance


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        pytest.param([RankPoint(5, 5)], BoundaryDecision(5, 5, False), id="alone, a rank stops where it is"),
        pytest.param(
            [RankPoint(5, 5), RankPoint(6, 6)],
            BoundaryDecision(7, 7, False),
            id="all acknowledged: one past the furthest",
        ),
        pytest.param(
            [RankPoint(5, 5), RankPoint(5, None)],
            BoundaryDecision(6, None, False),
            id="undecided: one step of allowance",
        ),
        pytest.param(
            [RankPoint(6, 5), RankPoint(9, None)],
            BoundaryDecision(10, None, False),
            id="the limit follows the open rank",
        ),
        pytest.param(
            [RankPoint(9, 9), RankPoint(4, None)], BoundaryDecision(10, None, False), id="never below the own ack + 1"
        ),
        pytest.param(
            [RankPoint(9, 9), RankPoint(10, None, True)], BoundaryDecision(11, 11, True), id="the other has ended"
        ),
        pytest.param(
            [RankPoint(9, 9), RankPoint(10, 9, True)], BoundaryDecision(10, 10, False), id="ended at the stop itself"
        ),
        pytest.param(
            [RankPoint(9, 9), RankPoint(9, None), RankPoint(10, None, True)],
            BoundaryDecision(10, None, True),
            id="one has ended, so no rank will stop, acknowledged or not",
        ),
        pytest.param([RankPoint(20, None, True)], BoundaryDecision(20, 20, True), id="alone and ended"),
    ],
)
def test_decision(points: list[RankPoint], expected: BoundaryDecision) -> None:
    assert decide(points, 0) == expected


def test_rank_that_has_not_acknowledged_may_not_ask() -> None:
    with pytest.raises(ValueError, match="acknowledge before"):
        decide([RankPoint(5, None), RankPoint(5, 5)], 0)


def test_gang_has_ended_only_when_all_points_are_in() -> None:
    assert stop_step([RankPoint(10, None, True), RankPoint(9, None)]) is None
    assert decide([RankPoint(10, None, True), RankPoint(9, 9)], 1).finished
    assert stop_step([RankPoint(9, 9), RankPoint(9, None)]) is None


@st.composite
def _settings(draw: st.DrawFn, least_ranks: int = 1) -> Setting:
    world = draw(st.sampled_from([size for size in (1, 2, 4, 8) if size >= least_ranks]))
    node_count = draw(st.integers(1, min(world, 4)))
    nodes = sorted([*range(node_count), *(draw(st.integers(0, node_count - 1)) for _ in range(world - node_count))])
    return Setting(
        nodes=tuple(nodes),
        queue_depth=draw(st.integers(1, 64)),
        sync_every=draw(st.integers(0, 50)),
        steps=draw(st.integers(1, 60)),
        orders=(*draw(st.lists(st.booleans(), max_size=4)), draw(st.booleans())),
        pace=tuple(draw(st.sampled_from([1, 10, 100])) for _ in range(world)),
        relay_pace=draw(st.sampled_from([1, 10, 100])),
        order_pace=draw(st.sampled_from([1, 3, 30])),
        seed=draw(st.integers(0, 1 << 32)),
    )


_CALM = settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@_CALM
@given(_settings())
def test_free_running_gang_always_stops_together(setting: Setting) -> None:
    Gang(setting, decide).run()


def _failures(make: object, sync_every: int, relay_pace: int) -> set[str]:
    """Run the same 300 gangs under a rule and say how it fails."""
    found = set()
    for seed in range(300):
        setting = Setting(
            nodes=(0, 0, 1, 1),
            queue_depth=1 + seed % 16,
            sync_every=sync_every,
            steps=60,
            orders=(True,),
            pace=tuple((1, 30, 100, 10)[(seed + rank) % 4] for rank in range(4)),
            relay_pace=relay_pace,
            order_pace=1 + seed % 5,
            seed=seed,
        )
        try:
            make(setting).run()  # type: ignore[operator]
        except OverrunError:
            found.add("overrun")
        except DeadlockError:
            found.add("deadlock")
    return found


@pytest.mark.parametrize("sync_every", [0, 2, 10])
def test_rule_survives_the_gangs_the_other_rules_fail_on(sync_every: int) -> None:
    assert _failures(lambda setting: Gang(setting, decide), sync_every, relay_pace=1) == set()


def test_model_sees_a_fixed_allowance_of_one_step_deadlock() -> None:
    assert "deadlock" in _failures(lambda setting: Gang(setting, fixed_allowance), 10, relay_pace=1)


def test_model_sees_a_leader_that_says_stop_two_ahead_overrun() -> None:
    assert "overrun" in _failures(lambda setting: LeaderGang(setting, decide), 0, relay_pace=10)
