"""Teams as operators write them, and the limits of users and teams."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.cluster.refusals import Reason
from ganger_master.core.accounting import Owner, by_user, limits_of
from ganger_master.core.answers import Refused
from ganger_master.core.commands import ProposePlan, SubmitJob
from ganger_master.core.explain import explain
from ganger_master.core.job_rules import rules
from ganger_master.core.plan_changes import StartChange
from ganger_master.core.settings import CoreSettings
from ganger_master.core.tenancy import NO_TEAM, Team, TeamIndex, teams_of

TEAMS = {"vision": Team(("ann", "bob"), 2.0, 4), "others": Team(("*",), 0.5)}


def settings_of(teams: dict[str, Team], **quotas: int) -> CoreSettings:
    return CoreSettings(teams=teams, quota_devices=by_user(quotas))


def test_teams_are_a_table_or_its_toml() -> None:
    toml = 'vision = {users = ["ann", "bob"], weight = 2, gpus = 4}\nothers = {users = ["*"], weight = 0.5}\n'
    table = {"vision": {"users": ["ann", "bob"], "weight": 2, "gpus": 4}, "others": {"users": ["*"], "weight": 0.5}}
    assert teams_of(toml) == teams_of(table) == TEAMS
    assert teams_of({"a": {"users": ["ann"]}}) == {"a": Team(("ann",), 1.0, None)}


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (7, "7 is no table of teams"),
        ("[[", "teams: "),
        ({"a b": {"users": ["ann"]}}, "'a b' is no name of a team"),
        ({"a": 7}, "'a' is no table with users"),
        ({"a": {}}, "'a' needs users"),
        ({"a": {"users": "ann"}}, "'a' has users = 'ann': write a list of names"),
        ({"a": {"users": ["ann"], "quota": 3}}, "'a' has 'quota': a team has users, weight, gpus"),
        ({"a": {"users": ["ann"], "weight": 0}}, "weight = 0: write a number from 1e-06 to 1e+06"),
        ({"a": {"users": ["ann"], "weight": 10**400}}, "write a number from 1e-06"),
        ({"a": {"users": ["ann"], "gpus": 10**26}}, "write a number from 0 to 1000000000"),
        ({"a": {"users": ["ann"], "weight": float("nan")}}, "write a number from 1e-06"),
        ({"a": {"users": ["ann"], "gpus": -1}}, "gpus = -1: write a number from 0 to 1000000000"),
        ({"a": {"users": ["ann"], "gpus": True}}, "write a number from 0 to 1000000000"),
        ({"a": {"users": ["ann"]}, "b": {"users": ["ann"]}}, "'ann' is in 'a' and in 'b': a user has one team"),
        ({"a": {"users": ["*"]}, "b": {"users": ["*"]}}, "'*' is in 'a' and in 'b'"),
    ],
)
def test_mistakes_of_teams_are_named(value: object, wrong: str) -> None:
    with pytest.raises(ValueError, match="teams: ") as refused:
        teams_of(value)
    assert wrong in str(refused.value)


def test_all_mistakes_of_teams_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="weight") as refused:
        teams_of({"a": {"users": ["ann"], "weight": -1}, "b": {"users": ["ann"], "gpus": "many"}})
    for told in ("weight = -1", "gpus = 'many'", "'ann' is in 'a' and in 'b'"):
        assert told in str(refused.value)


def test_a_user_is_in_the_team_that_names_it_or_in_that_of_all_others() -> None:
    assert [TeamIndex(TEAMS).of(user) for user in ("ann", "cat", "")] == ["vision", "others", "others"]
    assert TeamIndex({"vision": TEAMS["vision"]}).of("cat") == NO_TEAM
    assert TeamIndex({}).of("ann") == NO_TEAM


def test_a_limit_is_of_a_user_or_of_a_team_and_the_default_is_for_users_only() -> None:
    limits, teams = limits_of(by_user({"ann": 3, "*": 8}), TEAMS), TeamIndex(TEAMS)
    assert [limits.of(owner) for owner in limits.owners("ann", teams.of("ann"))] == [3, 4]
    assert [limits.of(owner) for owner in limits.owners("cat", teams.of("cat"))] == [8]
    assert limits.of(Owner(team="others")) is None


@pytest.mark.parametrize("policy", ["fifo", "las"])
def test_users_of_a_team_share_its_limit_and_why_names_the_jobs_that_hold_it(policy: str) -> None:
    drive = Drive(2, CoreSettings(policy=policy, teams=TEAMS))
    first, second = drive.submit(job_of(3), "ann"), drive.submit(job_of(2), "bob")
    other = drive.submit(job_of(2), "cat")
    for number in (first, other):
        drive.step(ProposePlan((StartChange(number, drive.job(number).revision, drive.places(number)[0]),)))
    (refusal,) = rules(drive.state, drive.job(second))
    assert (refusal.reason, refusal.figures) == (Reason.QUOTA, {"needed": 2, "held": 3, "limit": 4})
    (blocker,) = explain(drive.state, second, drive.now).blockers
    assert blocker.message.startswith("team 'vision' holds 3 of the 4 GPUs of its quota: jobs/1 (3)")


def test_a_plan_that_starts_two_jobs_of_a_team_keeps_to_its_limit() -> None:
    drive = Drive(2, CoreSettings(policy="las", teams=TEAMS))
    jobs = [drive.submit(job_of(3), user) for user in ("ann", "bob")]
    first, second = [drive.places(number)[0] for number in jobs]
    assert first == second, "both would take the same place"
    apart = next(claims for claims in drive.places(jobs[1]) if claims[0].node != first[0].node)
    changes = [StartChange(number, 1, claims) for number, claims in zip(jobs, (first, apart), strict=True)]
    drive.step(ProposePlan(tuple(changes)))
    assert drive.state.jobs.charges.held == {Owner("ann"): 3, Owner(team="vision"): 3}


def test_a_job_larger_than_its_team_s_limit_is_refused_at_submission() -> None:
    drive = Drive(2, settings_of(TEAMS))
    answer = drive.step(SubmitJob(job_of(5), "uid", "ann"))
    assert isinstance(answer, Refused)
    assert answer.reason == "QUOTA_EXCEEDED"
    assert answer.metadata == {"user": "ann", "team": "vision", "needed": "5", "limit": "4"}
    assert "the quota of team 'vision' is 4: ask for 4 or fewer" in answer.message
    drive.submit(job_of(5), "cat")
