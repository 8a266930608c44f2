"""`ganger usage`: teams, users and their GPU-hours as a table and as JSON."""

from __future__ import annotations

import json
import time

import pytest
from ganger.v1 import job_pb2, usage_pb2
from ganger.wire import times
from kit.canned import Call, CannedMaster

Output = pytest.CaptureFixture[str]
DAY = 1_793_923_200.0
DAY_S = 86_400


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


def submitted(master: CannedMaster, number: int, user: str, ago_s: float) -> job_pb2.Job:
    """Let the master have a job that waited a minute, ran for half an hour on two GPUs, and ended at its deadline."""
    begun = time.time() - ago_s
    job = master.jobs[f"jobs/{number}"] = job_pb2.Job(
        name=f"jobs/{number}", user=user, state=job_pb2.Job.STATE_SUCCEEDED, create_time=times.timestamp(begun)
    )
    job.start_time.CopyFrom(times.timestamp(begun + 60))
    job.end_time.CopyFrom(times.timestamp(begun + 1_860))
    job.spec.deadline.CopyFrom(times.timestamp(begun + 1_860))
    for at, kind in ((0, "job_submitted"), (60, "gang_approved"), (60, "gang_running"), (1_860, "job_succeeded")):
        figures = {"gpus": "2"} if kind == "job_submitted" else {}
        master.events.append(
            job_pb2.Event(
                sequence=len(master.events) + 1,
                subject=job.name,
                kind=kind,
                time=times.timestamp(begun + at),
                figures=figures,
            )
        )
    return job


def test_a_report_has_gpu_hours_waiting_completion_times_and_deadlines_by_user(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    submitted(master, 1, "ann", 7_200)
    submitted(master, 2, "bob", 7_200)
    submitted(master, 3, "bob", 10 * DAY_S)
    assert call("report") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0][:6] == ["USER", "ENDED", "LIVE", "GPU-HOURS", "HELD", "IDLE"]
    assert rows[1][:6] == ["all", "2", "succeeded", "0", "2.00", "2.00"]
    assert rows[2][:7] == ["ann", "1", "succeeded", "0", "1.00", "1.00", "0.00"]
    assert rows[2][7:] == ["1m", "1m", "1m", "31m", "31m", "31m", "1", "met", "0"]
    assert rows[3][0] == "bob"
    assert call("report", "--user", "bob", "--since", "30d", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["users"]
    assert (found["ended"], found["live"]) == ({"succeeded": 2}, 0)
    assert found["gpu_hours"] == {"stepped": 2.0, "held": 2.0, "idle": 0.0}
    assert found["jct_s"] == {"mean": 1860.0, "p50": 1860.0, "p95": 1860.0, "count": 2}
    assert found["deadlines"] == {"met": 2, "missed": 0, "at_risk": 0, "open": 0}


def test_a_report_over_no_time_is_a_wrong_use(call: Call, capsys: Output) -> None:
    assert call("report", "--since", "1d", "--until", "2d") == 2
    assert "--until 2d is not after --since 1d" in capsys.readouterr().err
    assert call("report", "--until", "soon") == 2
    assert "--until: 'soon' is no date" in capsys.readouterr().err
    assert call("report") == 0
    assert "no job ended or lived in that time" in capsys.readouterr().err
