"""What commands print about job arrays, against a server with canned answers."""

from __future__ import annotations

import json

import pytest
from ganger.v1 import array_pb2, job_pb2, job_service_pb2
from kit.canned import Call, CannedMaster, add_members

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (["running"], ["1_0"]),
        (["RUNNING", "stopped"], ["1_0", "1_1"]),
        (["holding"], ["1_0", "6"]),
        (["held"], ["1_2"]),
        (["pending"], ["5"]),
        (["parked"], ["6"]),
        (["failed"], []),
    ],
)
def test_the_queue_is_asked_in_the_words_that_it_shows_and_finds_members_of_arrays(
    call: Call, master: CannedMaster, capsys: Output, words: list[str], listed: list[str]
) -> None:
    add_members(master)
    waiting = job_pb2.Job(name="jobs/5", state=job_pb2.Job.STATE_PENDING)
    held = job_pb2.Job(name="jobs/4", state=job_pb2.Job.STATE_PENDING)
    held.array.CopyFrom(array_pb2.ArrayMembership(array="arrays/1", held=True, member=array_pb2.ArrayMember(index=2)))
    parked = job_pb2.Job(name="jobs/6", state=job_pb2.Job.STATE_HOLDING)
    parked.gang.phase, parked.gang.parked_level = job_pb2.Gang.PHASE_PARKED, job_pb2.SUSPEND_LEVEL_OFFLOAD
    master.jobs.update({job.name: job for job in (waiting, held, parked)})
    assert call("queue", *(part for word in words for part in ("--state", word))) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == listed


def test_the_queue_finds_jobs_by_name_and_label(call: Call, master: CannedMaster, capsys: Output) -> None:
    assert call("queue", "--name", "digits", "-l", "team=vision", "-l", "run=1") == 0
    asked = next(request for request in master.requests if isinstance(request, job_service_pb2.ListJobsRequest))
    assert (asked.display_name, dict(asked.labels)) == ("digits", {"team": "vision", "run": "1"})
    assert call("queue", "-l", "team") == 2
    assert "--label" in capsys.readouterr().err


def test_an_array_is_one_line_of_the_queue_and_a_table_of_its_own(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    add_members(master)
    assert call("queue") == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[:5] == ["1[2]", "search", "ann", "array", "2"]
    assert line.endswith("best accuracy 0.875 of 1_0 lr=0.1  1 holding, 1 stopped")
    assert call("queue", "--members", "--all") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["1_0", "1_1"]
    for name in ("1", "arrays/1"):
        assert call("show", name) == 0
        told = capsys.readouterr().out
        assert (
            "asha by accuracy, more is better, from epoch 3 on, then at 2 times as many, where 1 of 2 goes on" in told
        )
        assert told.splitlines()[-2].split()[:3] == ["1_0", "2", "running"]
        assert told.splitlines()[-1].endswith("0.875     halving: accuracy 0.5 at epoch 3: 1 did better")
    assert call("show", "1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [member["name"] for member in shown["members"]] == ["jobs/2", "jobs/3"]


def test_a_member_is_named_by_its_array_and_index(call: Call, master: CannedMaster, capsys: Output) -> None:
    add_members(master)
    assert call("show", "1_1") == 0
    told = capsys.readouterr().out
    assert "1_1, one of 2: lr=9" in told
    assert "at its rungs: 0.5" in told
    assert call("cancel", "1_0") == 0
    assert capsys.readouterr().out == "job 1_0 is cancelled\n"
    assert master.jobs["jobs/2"].state == job_pb2.Job.STATE_CANCELLED
    assert call("cancel", "1_7", "1") == 3
    captured = capsys.readouterr()
    assert "array 1 has no member 7" in captured.err
    assert captured.out == "array 1: 1 holding, 1 stopped\n"


def test_waiting_for_an_array_is_good_when_a_rule_stopped_members(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    add_members(master)
    master.jobs["jobs/2"].state = job_pb2.Job.STATE_SUCCEEDED
    assert call("wait", "1") == 0
    assert capsys.readouterr().out.splitlines() == [
        "job 1_0 has succeeded",
        "job 1_1 was stopped by the rule of its array: halving: accuracy 0.5 at epoch 3: 1 did better",
    ]
    master.jobs["jobs/2"].state = job_pb2.Job.STATE_FAILED
    assert call("wait", "1") == 1


def test_submit_makes_an_array_of_flags_and_follows_none(call: Call, master: CannedMaster, capsys: Output) -> None:
    stop = "halving,metric=accuracy,goal=max,first=10"
    arguments = ("--array", "lr=0.1,0.2%1", "--stop", stop, "--", "train", "{lr}")
    assert call("submit", *arguments) == 0
    assert capsys.readouterr().out == "submitted array 1 of 2 jobs\n"
    request = master.requests[0]
    assert (request.max_concurrent, request.rule.first_rung, list(request.spec.command)) == (1, 10, ["train", "{lr}"])
    assert call("submit", "--dry-run", "--json", *arguments) == 0
    assert json.loads(capsys.readouterr().out)["members"][1] == {"index": 1, "parameters": {"lr": "0.2"}}
    assert call("submit", "--follow", *arguments) == 2
    assert call("submit", "--stop", stop, "--", "x") == 2
    assert call("submit", "--array", "0-1%0", "--", "x") == 2
