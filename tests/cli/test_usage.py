"""`ganger usage`: teams, users and their GPU-hours as a table and as JSON."""

from __future__ import annotations

import json
import time

import pytest
from ganger.v1 import usage_pb2
from ganger.wire import times
from kit.canned import Call, CannedMaster

Output = pytest.CaptureFixture[str]
DAY = 1_793_923_200.0


def usage() -> usage_pb2.Usage:
    users = [
        usage_pb2.UserUsage(user="ann", gpu_seconds=7_200.0, used_share=0.5, running_gpus=2.5),
        usage_pb2.UserUsage(user="bob", gpu_seconds=1_800.0, used_share=0.2, gpus_limit=4),
    ]
    vision = usage_pb2.TeamUsage(team="vision", weight=3.0, share=0.75, used_share=0.7, gpus_limit=16, users=users)
    others = usage_pb2.TeamUsage(weight=1.0, share=0.25, used_share=0.3, users=[usage_pb2.UserUsage(user="cat")])
    return usage_pb2.Usage(since_time=times.timestamp(DAY), half_life=times.duration(604_800.0), teams=[vision, others])


@pytest.fixture
def table(master: CannedMaster) -> CannedMaster:
    master.usage.CopyFrom(usage())
    return master


def test_teams_and_users_are_a_table_that_a_script_can_cut(call: Call, table: CannedMaster, capsys: Output) -> None:
    assert call("usage") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["TEAM", "USER", "GPU-HOURS", "USED", "SHARE", "WEIGHT", "RUNNING", "LIMIT"]
    assert lines[1] == ["vision", "2.50", "70%", "75%", "3", "2.5", "16"]
    assert lines[2] == ["vision", "ann", "2.00", "50%", "2.5"]
    assert lines[3] == ["vision", "bob", "0.50", "20%", "0", "4"]
    assert lines[4] == ["-", "0.00", "30%", "25%", "1", "0"]
    assert " ".join(lines[-1]) == "GPU-hours since 2026-11-06; USED is the part of all use, halved in weight every 7d"


def test_one_team_or_one_user_is_shown_and_unknown_ones_are_named(
    call: Call, table: CannedMaster, capsys: Output
) -> None:
    assert call("usage", "--team", "-") == 0
    assert "vision" not in capsys.readouterr().out
    assert call("usage", "--user", "bob", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (team,) = found["teams"]
    assert (team["team"], team["gpus_limit"], [user["user"] for user in team["users"]]) == ("vision", 16, ["bob"])
    assert call("usage", "--team", "text") == 3
    assert "there is no team 'text': there are vision, -" in capsys.readouterr().err
    assert call("usage", "--user", "eve") == 3
    assert "there is no use of user 'eve'" in capsys.readouterr().err


def test_a_cluster_without_teams_is_called_that(call: Call, master: CannedMaster, capsys: Output) -> None:
    master.usage.teams.add(weight=1.0)
    assert call("usage", "--team", "text") == 3
    assert "there is no team 'text': the cluster has no teams" in capsys.readouterr().err


def test_since_is_a_date_or_a_duration(call: Call, table: CannedMaster, capsys: Output) -> None:
    assert call("usage", "--since", "2026-11-06") == 0
    assert times.unix_s(table.requests[-1].since_time) == DAY
    assert call("usage", "--since", "2d") == 0
    assert abs(time.time() - 2 * 86_400.0 - times.unix_s(table.requests[-1].since_time)) < 60.0
    capsys.readouterr()
    assert call("usage", "--since", "2999-01-01") == 2
    assert "--since: 2999-01-01 has not come yet (days are of UTC)" in capsys.readouterr().err
    assert call("usage", "--since", "lately") == 2
    assert "--since: 'lately' is no date (2026-11-01) and no duration (7d)" in capsys.readouterr().err


def test_without_any_use_a_script_reads_nothing(call: Call, master: CannedMaster, capsys: Output) -> None:
    assert call("usage") == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "no user has used a GPU\n")
