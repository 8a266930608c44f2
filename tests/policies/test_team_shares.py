"""Teams and users below their share go first, whatever the policy: by weight, by past use, and without flapping."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from ganger_master.policies.fairness import TeamShares
from ganger_master.policies.order_registry import LAS, ORDERS
from ganger_master.policies.orders import Facts, ranked, with_aging
from hypothesis import given
from hypothesis import strategies as st
from kit.facts import capacity_of, facts_of, live_jobs
from msgspec.structs import replace

NOW = 1_000.0


def with_teams(facts: Facts, *teams: int, **columns: Any) -> Facts:
    """The jobs in these teams, of weight 1 and without use unless said."""
    count = len(facts)
    plain = {"weight": np.ones(count), "team_gpus": np.zeros(count), "user_gpus": np.zeros(count)}
    given = {name: np.array(column, float) for name, column in columns.items()}
    return replace(facts, teams=TeamShares(np.array(teams, np.int64), **{**plain, **given}))


def line_of(facts: Facts, order: Any = LAS, gpus: int = 64) -> list[int]:
    return facts.number[ranked(order, facts, NOW, capacity_of(gpus))].tolist()


def jobs(*users: int, **more: Any) -> Facts:
    return facts_of(*[{"user": user, "attained_s": float(at), **more} for at, user in enumerate(users)])


def test_teams_take_turns_at_places_and_each_keeps_the_order_of_the_policy() -> None:
    facts = jobs(0, 0, 0, 0, 1, 1)
    assert line_of(facts) == [0, 1, 2, 3, 4, 5], "least attained service first"
    assert line_of(with_teams(facts, 0, 0, 0, 0, 1, 1)) == [0, 4, 1, 5, 2, 3]


def test_a_team_gets_places_by_its_weight() -> None:
    facts = with_teams(jobs(*[0] * 9, *[1] * 9), *[0] * 9, *[1] * 9, weight=[2.0] * 9 + [1.0] * 9)
    first = line_of(facts)[:9]
    assert Counter(number < 9 for number in first) == {True: 6, False: 3}


def test_a_team_that_used_more_waits_until_the_other_has_as_many_gpus() -> None:
    facts = with_teams(jobs(0, 0, 0, 1, 1, 1, 1), 0, 0, 0, 1, 1, 1, 1, team_gpus=[2.5] * 3 + [0.0] * 4)
    assert line_of(facts) == [3, 4, 5, 0, 6, 1, 2]


def test_users_of_a_team_are_compared_in_the_same_way() -> None:
    facts = jobs(0, 0, 0, 1, 1, 1)
    assert line_of(with_teams(facts, *[0] * 6)) == [0, 3, 1, 4, 2, 5]
    used = with_teams(facts, *[0] * 6, user_gpus=[1.5] * 3 + [0.0] * 3)
    assert line_of(used) == [3, 4, 0, 5, 1, 2]


def test_a_higher_priority_goes_before_every_share() -> None:
    facts = facts_of(*[{"user": 0, "priority": 1}] * 3, {"user": 1})
    assert line_of(with_teams(facts, 0, 0, 0, 1, team_gpus=[60.0] * 3 + [0.0])) == [0, 1, 2, 3]


def test_an_overdue_job_goes_before_every_share_of_its_priority() -> None:
    facts = facts_of({"user": 0, "waited_s": 900.0}, {"user": 1})
    behind = with_teams(facts, 0, 1, team_gpus=[60.0, 0.0])
    assert line_of(behind) == [1, 0]
    assert line_of(behind, with_aging(LAS, after_s=500.0)) == [0, 1]


def test_a_gang_that_fits_nowhere_does_not_hold_up_the_small_ones_of_its_team() -> None:
    facts = facts_of(*[{"user": 0, "gpus": gpus} for gpus in (99, 1, 1)], *[{"user": 1}] * 2)
    assert line_of(with_teams(facts, 0, 0, 0, 1, 1), gpus=8) == [1, 3, 2, 4, 0]


@pytest.mark.parametrize(("past", "goes_first"), [(1.0, 0), (1.2, 0), (1.4, 1)])
def test_a_running_job_keeps_its_place_until_its_team_is_clearly_ahead(past: float, goes_first: int) -> None:
    facts = facts_of({"user": 0, "gpus": 8, "is_running": True, "attained_s": 9.0}, {"user": 1, "gpus": 8})
    # Two hundredths of 16 GPUs are the margin.
    both = with_teams(facts, 0, 1, team_gpus=[past, 1.0])
    assert line_of(both, gpus=16)[0] == goes_first


def test_jobs_that_cannot_be_preempted_count_for_their_team_whatever_their_place() -> None:
    stays = {"user": 0, "gpus": 2, "is_running": True, "is_preemptible": False, "attained_s": 99.0}
    facts = facts_of({"user": 0}, {"user": 0}, stays, {"user": 1}, {"user": 1})
    assert line_of(with_teams(facts, 0, 0, 0, 1, 1), gpus=8) == [2, 3, 4, 0, 1]


@given(live_jobs(most=20), st.sampled_from(sorted(set(ORDERS) - {"tiresias-gittins"})), st.integers(0, 2**32 - 1))
def test_jobs_of_one_user_keep_the_order_of_every_policy(facts: Facts, name: str, seed: int) -> None:
    order, random = ORDERS[name], np.random.default_rng(seed)
    facts = replace(facts, is_preemptible=np.ones(len(facts), bool), index=np.full(len(facts), 1e-3))
    if not order.preempts:
        facts = replace(facts, is_running=np.zeros(len(facts), bool))
    shared = with_teams(
        facts, *(facts.user % 2).tolist(), team_gpus=random.uniform(0, 9, 2)[facts.user % 2],
        user_gpus=random.uniform(0, 5, 8)[facts.user],
    )  # fmt: skip
    plain, fair = line_of(facts, order, 1_000), line_of(shared, order, 1_000)
    assert sorted(plain) == sorted(fair)
    user = dict(zip(facts.number.tolist(), facts.user.tolist(), strict=True))
    for one in set(user.values()):
        of_user = [[number for number in line if user[number] == one] for line in (plain, fair)]
        assert of_user[0] == of_user[1]


@given(live_jobs(most=20))
def test_one_team_of_one_user_changes_nothing(facts: Facts) -> None:
    facts = replace(facts, user=np.zeros(len(facts), np.int64), is_preemptible=np.ones(len(facts), bool))
    assert line_of(with_teams(facts, *[0] * len(facts), user_gpus=[3.0] * len(facts))) == line_of(facts)
