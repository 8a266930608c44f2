"""What the commands that change a job send, wait for and say, against a server with canned answers."""

from __future__ import annotations

import json
import time

import pytest
from ganger.v1 import array_pb2, job_pb2, job_service_pb2
from ganger.wire.errors import JobBusy, NodeNotFound, UpdateEndsJob
from kit.canned import Call, CannedMaster, running_job

Output = pytest.CaptureFixture[str]


def test_a_repin_names_the_cores_it_went_to(call: Call, master: CannedMaster, capsys: Output) -> None:
    job = running_job(master)
    job.gang.cores[:] = ["0-1", "2-3"]
    master.changing = lambda: job.gang.cores.__setitem__(slice(None), ["4-5", "6-7"])
    assert call("repin", "1") == 0
    assert capsys.readouterr().out == "job 1 is running on n1[0-1,3], cores rank 0: 4-5 | rank 1: 6-7\n"


def test_ranks_with_the_same_cores_are_one_entry(call: Call, master: CannedMaster, capsys: Output) -> None:
    job = running_job(master)
    job.gang.cores[:] = ["0-3", "4", "4", ""]
    assert call("repin", "1") == 0
    assert "cores rank 0: 0-3 | ranks 1-2: 4, as before\n" in capsys.readouterr().out


def test_cancelling_goes_on_after_one_that_is_not_there(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)
    assert call("cancel", "9", "1") == 3
    captured = capsys.readouterr()
    assert "job 1 is cancelled" in captured.out
    assert "there is no jobs/9" in captured.err


def test_suspend_waits_until_the_job_rests(call: Call, master: CannedMaster, capsys: Output) -> None:
    job = running_job(master)
    job.gang.phase = job_pb2.Gang.PHASE_PARKED
    job.gang.stop_step = 121
    assert call("suspend", "1", "--level", "offload") == 0
    assert capsys.readouterr().out == "job 1 is suspended (offload) at step 121 on n1[0-1,3]\n"


@pytest.mark.parametrize(
    ("offered", "advice"),
    [
        (["offload", "checkpoint"], ": `ganger suspend 1 --level offload` frees it"),
        (["checkpoint"], ": `ganger suspend 1 --level checkpoint` frees it"),
        ([], ""),
    ],
)
def test_a_suspend_that_keeps_a_gpu_names_a_level_that_frees_it_only_where_the_job_offers_one(
    call: Call, master: CannedMaster, capsys: Output, offered: list[str], advice: str
) -> None:
    job = running_job(master)
    job.state = job_pb2.Job.STATE_SUSPENDED
    job.gang.phase = job_pb2.Gang.PHASE_PARKED
    job.gang.parked_level = job_pb2.SUSPEND_LEVEL_PAUSE
    del job.gang.claims[1:]
    job.gang.claims[0].device_mask = 1
    job.capabilities.CopyFrom(job_pb2.Capabilities(can_pause=True, **{f"can_{level}": True for level in offered}))
    assert call("suspend", "1", "--level", "pause") == 0
    assert capsys.readouterr().out.endswith(f", and keeps its GPU{advice}\n")


def test_a_suspend_of_a_job_that_hangs_says_that_it_is_killed_and_from_where_it_continues(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    job = running_job(master)
    for stalled, step, told in (
        ("", 0, ""),
        ("rank 1 makes 150 steps while the others make 300", 0, ""),
        ("no step for 2m, step 700 is the last", 0, "it continues from the beginning once"),
        ("no step for 2m, step 700 is the last", 650, "it continues from its checkpoint of step 650 once"),
    ):
        job.progress.stall_reason = stalled
        if step:
            job.checkpoint.step = step
        assert call("suspend", "1", "--no-wait") == 0
        err = capsys.readouterr().err
        assert (f"hangs ({stalled}): if it reaches no boundary" in err) == bool(told)
        assert told in err


def test_a_suspend_that_takes_too_long_stands_and_is_said(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master).gang.phase = job_pb2.Gang.PHASE_STOPPING
    assert call("suspend", "1", "--level", "offload", "--timeout", "0.01s") == 4
    assert "the order stands" in capsys.readouterr().err


SILENT = "nodes/n1 has not called for 100 s: no order reaches it; it ends when an operator says so (`ganger lost n1`)"


@pytest.mark.parametrize("command", ["suspend", "resume", "move", "wait"])
def test_a_time_that_is_none_is_found_before_the_order(
    call: Call, master: CannedMaster, capsys: Output, command: str
) -> None:
    running_job(master)
    assert call(command, "1", "--timeout", "never") == 2
    assert "--timeout" in capsys.readouterr().err
    assert not master.requests


@pytest.mark.parametrize("command", [("suspend", "1", "--level", "offload"), ("resume", "1"), ("move", "1")])
def test_a_waiting_command_fails_at_once_when_no_order_reaches_the_node(
    call: Call, master: CannedMaster, capsys: Output, command: tuple[str, ...]
) -> None:
    master.explanation.blockers.add(reason="NODE_SILENT", message=SILENT)
    job = running_job(master)
    job.gang.phase = job_pb2.Gang.PHASE_STOPPING
    began = time.monotonic()
    assert call(*command) == 4
    assert time.monotonic() - began < 20.0, "and not after its two minutes"
    assert f"the order stands, but {SILENT}" in capsys.readouterr().err


def test_a_cancel_that_does_not_reach_the_node_says_when_the_job_ends(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    master.explanation.blockers.add(reason="NODE_SILENT", message=SILENT)
    job = running_job(master)

    def stop() -> None:
        job.state, job.gang.phase = job_pb2.Job.STATE_HOLDING, job_pb2.Gang.PHASE_STOPPING

    master.changing = stop
    assert call("cancel", "1") == 0
    assert capsys.readouterr().out == f"job 1 is stopping on n1[0-1,3]\n  but {SILENT}\n"


def test_of_a_node_that_takes_no_gangs_the_waiting_goes_on(call: Call, master: CannedMaster, capsys: Output) -> None:
    master.explanation.blockers.add(reason="NODE_UNAVAILABLE", message="nodes/n1 has not reported yet what runs there")
    running_job(master).gang.phase = job_pb2.Gang.PHASE_STOPPING
    assert call("suspend", "1", "--level", "offload", "--timeout", "1.5s") == 4
    assert "after 1.5s; the order stands" in capsys.readouterr().err


def test_a_move_that_was_called_off_is_no_success_and_its_reason_is_printed(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    running_job(master)
    for sequence, why in enumerate(("the first reason", "it is connected to 10.0.0.1:443"), 1):
        master.events.append(job_pb2.Event(sequence=sequence, subject="jobs/1", kind="move_aborted", message=why))
    assert call("move", "1", "--to", "n2") == 4
    assert "called off, nothing is lost: it is connected to 10.0.0.1:443" in capsys.readouterr().err
    assert next(request for request in master.requests if hasattr(request, "nodes")).nodes == ["nodes/n2"]


def test_a_move_to_a_node_that_does_not_exist_is_refused_before_the_job_has_reported_what_it_can(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    job = running_job(master)
    job.capabilities.is_presumed = True
    job.start_time.GetCurrentTime()
    master.failing = NodeNotFound("there is no nodes/n9")
    assert call("move", "1", "--to", "n9") == 3
    assert capsys.readouterr().err == "ganger: there is no nodes/n9\n"
    assert [type(request).__name__ for request in master.requests] == ["GetNodeRequest"]


def test_a_suspend_waits_for_an_agent_that_has_not_spoken_up_yet_but_not_for_one_that_is_silent_for_long(
    call: Call, master: CannedMaster
) -> None:
    job = running_job(master)
    job.capabilities.is_presumed = True
    job.start_time.GetCurrentTime()
    looks = 0

    def speak() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            job.capabilities.is_presumed = False

    def looks_before_the_order() -> int:
        kinds = [type(request).__name__ for request in master.requests]
        del master.requests[:]
        return kinds.index("SuspendJobRequest")

    master.looked_at = speak
    assert call("suspend", "1", "--level", "offload") == 0
    assert looks_before_the_order() == 3
    job.state, job.gang.phase = job_pb2.Job.STATE_HOLDING, job_pb2.Gang.PHASE_RUNNING
    job.capabilities.is_presumed = True
    job.start_time.FromSeconds(1_000)
    assert call("suspend", "1", "--level", "offload") == 0
    assert looks_before_the_order() == 1


@pytest.mark.parametrize("phase", ["STARTING", "MOVING", "RESIZING"])
@pytest.mark.parametrize("words", [("suspend", "1", "--level", "pause"), ("resize", "1", "2"), ("move", "1")])
def test_an_order_to_a_job_on_its_way_waits_until_it_can_be_carried_out(
    call: Call, master: CannedMaster, words: tuple[str, ...], phase: str
) -> None:
    job = running_job(master)
    job.gang.phase = job_pb2.Gang.Phase.Value(f"PHASE_{phase}")
    looks = 0

    def arrive() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            job.gang.phase = job_pb2.Gang.PHASE_RUNNING

    master.looked_at = arrive
    call(*words)
    kinds = [type(request).__name__ for request in master.requests]
    order = next(kind for kind in kinds if kind != "GetJobRequest")
    assert order == f"{words[0].title()}JobRequest"
    assert kinds.index(order) >= 3


@pytest.mark.parametrize("words", [("suspend", "1", "--level", "pause"), ("resize", "1", "2"), ("move", "1")])
def test_an_order_that_meets_a_move_which_began_after_the_look_waits_for_it(
    call: Call, master: CannedMaster, words: tuple[str, ...]
) -> None:
    job = running_job(master)
    looks = 0

    def begin_and_end_a_move() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            master.failing = JobBusy("jobs/1 is busy: it is being moved; try again")
        elif looks == 2:
            job.revision, job.gang.phase = job.revision + 1, job_pb2.Gang.PHASE_MOVING
        elif looks == 5:
            job.gang.phase = job_pb2.Gang.PHASE_RUNNING

    master.looked_at = begin_and_end_a_move
    call(*words)
    kinds = [type(request).__name__ for request in master.requests]
    refused, carried_out = [at for at, kind in enumerate(kinds) if kind == f"{words[0].title()}JobRequest"]
    assert refused == 1
    assert carried_out - refused > 3


def test_an_order_to_a_job_that_stays_busy_is_refused_at_once(call: Call, master: CannedMaster, capsys: Output) -> None:
    running_job(master)

    def refuse() -> None:
        master.failing = (
            JobBusy("jobs/1 is busy: a part of it has ended; try again") if not master.requests[1:] else None
        )

    master.looked_at = refuse
    assert call("move", "1") == 4
    assert "a part of it has ended" in capsys.readouterr().err


def test_an_update_sends_what_is_to_be_otherwise_and_says_where_the_job_stands_then(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    job = running_job(master)
    job.state, job.queue_rank = job_pb2.Job.STATE_PENDING, 2
    job.ClearField("gang")
    assert call("update", "1", "--priority", "-5", "--time", "2h", "--request-id", "r") == 0
    assert capsys.readouterr().out == "job 1 is pending, place 2 in the queue, priority -5, time 2h\n"
    request = master.requests[-1]
    assert (request.name, request.request_id) == ("jobs/1", "r")
    assert (request.update.priority, request.update.time_limit.seconds) == (-5, 7_200)
    assert not request.update.HasField("memory_bytes")


def test_a_wrong_update_names_its_flags_all_at_once_and_is_not_sent(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    running_job(master)
    assert call("update", "1", "--priority", "high", "--memory", "much", "--locality", "near") == 2
    error = capsys.readouterr().err
    assert all(f"--{flag}: " in error for flag in ("priority", "memory", "locality"))
    assert call("update", "1") == 2
    assert "say what to change" in capsys.readouterr().err
    assert not master.requests


def test_one_job_that_cannot_be_updated_does_not_keep_the_others_as_they_are(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    running_job(master)
    assert call("update", "9", "1", "--priority", "5") == 3
    captured = capsys.readouterr()
    assert captured.out == "job 1 is running, priority 5\n"
    assert "there is no jobs/9" in captured.err


def test_of_an_array_it_says_how_many_were_refused_and_why(call: Call, master: CannedMaster, capsys: Output) -> None:
    master.arrays["arrays/7"] = array_pb2.Array(name="arrays/7", size=6)
    assert call("update", "arrays/7", "--memory", "8G") == 0
    assert capsys.readouterr().out == "array 7: 2 jobs updated, memory 8G\n"
    why = "jobs/{0} has started: cancel it and submit it again"
    master.refused_updates = [
        job_service_pb2.RefusedUpdate(job=f"jobs/{n}", reason="UPDATE_REFUSED", message=why.format(n)) for n in range(4)
    ]
    assert call("update", "arrays/7", "--memory", "8G") == 4
    captured = capsys.readouterr()
    assert captured.out == "array 7: 2 jobs updated, memory 8G\n"
    assert captured.err.splitlines() == [
        "ganger: 4 jobs of array 7 refused:",
        *[f"  UPDATE_REFUSED: {why.format(n)}" for n in range(3)],
        "  and 1 more",
    ]
    assert call("update", "arrays/7", "--memory", "8G", "--json") == 4
    (answer,) = json.loads(capsys.readouterr().out)
    assert (answer["updated"], len(answer["refused"])) == (2, 4)


ENDS = "jobs/1 has run for 15m, longer than the new time limit of 1m: the update would end it at once; confirm that"


def test_an_update_that_ends_a_job_is_refused_where_no_person_can_confirm_it(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    running_job(master)
    master.ending = UpdateEndsJob(ENDS)
    assert call("update", "1", "--time", "1m") == 4
    assert "the update would end it at once" in capsys.readouterr().err
    assert call("update", "1", "--time", "1m", "--yes") == 0
    assert master.requests[-1].may_end


@pytest.mark.parametrize(("answer", "code"), [(True, 0), (False, 4)])
def test_an_update_that_ends_a_job_asks_first(
    call: Call,
    master: CannedMaster,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
    answer: bool,
    code: int,
) -> None:
    running_job(master)
    master.ending = UpdateEndsJob(ENDS)
    asked: list[str] = []

    def confirm(question: str, err: bool) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", confirm)
    assert call("update", "1", "--time", "1m") == code
    assert asked == [ENDS.partition(";")[0] + ". End it?"]
    assert [request.may_end for request in master.requests] == ([True] if answer else [])


def test_a_resize_by_roles_waits_until_the_job_runs_with_the_new_tasks(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    job = running_job(master)
    job.spec.roles.clear()
    for name in ("ps", "worker"):
        job.spec.roles.add(name=name, tasks=1, tasks_min=1, tasks_max=4)
    phases = [job_pb2.Gang.PHASE_STOPPING, job_pb2.Gang.PHASE_STARTING, job_pb2.Gang.PHASE_RUNNING]

    def go_on() -> None:
        if phases:
            job.gang.phase = phases.pop(0)
            job.spec.roles[0].tasks = 1 if phases[1:] else 3

    master.changing = go_on
    master.looked_at = lambda: go_on() if resizes() else None

    def resizes() -> list[job_service_pb2.ResizeJobRequest]:
        return [one for one in master.requests if isinstance(one, job_service_pb2.ResizeJobRequest)]

    assert call("resize", "1", "ps=3", "--wait") == 0
    (request,) = resizes()
    assert (request.gpus, dict(request.tasks)) == (0, {"ps": 3})
    assert not phases
    assert capsys.readouterr().out == "job 1 is running on n1[0-1,3]\n"


def test_a_resize_by_roles_that_was_called_off_fails_with_the_reason(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    job = running_job(master)
    job.spec.roles[0].name = "worker"
    job.trouble = "STORAGE_FULL: no room"
    assert call("resize", "1", f"worker={job.spec.roles[0].tasks + 1}", "--wait") == 4
    assert "job 1 is running and was not resized: STORAGE_FULL: no room" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [("many",), ("worker=0",), ("worker",), ("=2",), ("ps=1", "ps=2"), ("2", "ps=1")])
def test_sizes_that_are_none_are_refused_before_any_call(
    call: Call, master: CannedMaster, sizes: tuple[str, ...]
) -> None:
    assert call("resize", "1", *sizes) == 2
    assert master.requests == []
