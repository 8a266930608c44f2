"""The jobs of a command: numbers, lists, ranges and filters."""

from __future__ import annotations

import json

import pytest
from ganger.cli.options import split
from ganger.cli.order_wait import obstacle
from ganger.v1 import job_pb2, job_service_pb2
from ganger.wire.errors import JobBusy
from kit.canned import Call, CannedMaster, running_job

Output = pytest.CaptureFixture[str]


@pytest.fixture
def four_jobs(master: CannedMaster) -> CannedMaster:
    """Jobs 1 to 4: ann's "train" twice and bob's "eval" are parked in host memory, 4 (ann's "train") has succeeded."""
    template = running_job(master)
    for number, user, label in ((1, "ann", "train"), (2, "ann", "train"), (3, "bob", "eval"), (4, "ann", "train")):
        job = job_pb2.Job()
        job.CopyFrom(template)
        job.name, job.user, job.spec.display_name = f"jobs/{number}", user, label
        job.gang.phase, job.gang.parked_level = job_pb2.Gang.PHASE_PARKED, job_pb2.SUSPEND_LEVEL_OFFLOAD
        if number == 4:
            job.state = job_pb2.Job.STATE_SUCCEEDED
        master.jobs[job.name] = job
    return master


def ordered(master: CannedMaster, kind: type) -> list[str]:
    return [request.name for request in master.requests if isinstance(request, kind)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("1", "3"), [1, 3]),
        (("1,3",), [1, 3]),
        (("1-3",), [1, 2, 3]),
        (("2-3,1", "2"), [2, 3, 1]),
        (("jobs/3,1",), [3, 1]),
        (("--name", "train"), [1, 2]),
        (("--user", "bob"), [3]),
        (("--user", "ann", "--name", "train"), [1, 2]),
        (("--all",), [1, 2, 3]),
    ],
)
@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (("suspend", "--level", "offload"), job_service_pb2.SuspendJobRequest),
        (("cancel",), job_service_pb2.CancelJobRequest),
    ],
)
def test_numbers_lists_ranges_and_filters_name_the_jobs_of_a_command(
    call: Call,
    four_jobs: CannedMaster,
    command: tuple[str, ...],
    kind: type,
    words: tuple[str, ...],
    expected: list[int],
) -> None:
    assert call(*command, *words) == 0
    assert ordered(four_jobs, kind) == [f"jobs/{number}" for number in expected]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("8_[1-3]", ["8_1", "8_2", "8_3"]),
        ("2,8_[0,2],4-5", ["2", "8_0", "8_2", "4", "5"]),
        ("arrays/8", ["arrays/8"]),
    ],
)
def test_members_may_be_in_brackets_as_in_slurm(text: str, parts: list[str]) -> None:
    assert split(text) == parts


@pytest.mark.parametrize("command", ["suspend", "resume", "move", "cancel", "wait", "show", "logs"])
def test_no_jobs_or_jobs_beside_a_filter_is_wrong_usage(
    call: Call, four_jobs: CannedMaster, capsys: Output, command: str
) -> None:
    assert call(command) == 2
    assert "name the jobs" in capsys.readouterr().err
    assert call(command, "1", "--user", "ann") == 2
    assert "not both" in capsys.readouterr().err
    assert call(command, "3-1") == 2
    assert "'3-1' is no range" in capsys.readouterr().err
    assert call(command, "1-99999999") == 2
    assert call(command, "8_[2-1]") == 2
    assert "'8_[2-1]' is no list of jobs: write for example 8_[1-3,5]" in capsys.readouterr().err
    assert not four_jobs.requests


def test_a_filter_that_finds_no_job_is_reported(call: Call, four_jobs: CannedMaster, capsys: Output) -> None:
    assert call("cancel", "--name", "nothing", "--user", "ann") == 3
    assert "no job with the name 'nothing' and the user 'ann' that has not ended" in capsys.readouterr().err


def test_a_job_that_is_not_there_does_not_hinder_the_others(
    call: Call, four_jobs: CannedMaster, capsys: Output
) -> None:
    assert call("suspend", "1,9,2", "--level", "offload") == 3
    told = capsys.readouterr()
    assert "there is no jobs/9" in told.err
    assert [line.split()[1] for line in told.out.splitlines()] == ["1", "2"]


def test_json_is_an_object_for_one_job_and_a_list_for_several(
    call: Call, four_jobs: CannedMaster, capsys: Output
) -> None:
    for command in (("show",), ("suspend", "--level", "offload")):
        assert call(*command, "1", "--json") == 0
        assert json.loads(capsys.readouterr().out)["name"] == "jobs/1"
        assert call(*command, "1-2", "--json") == 0
        assert [job["name"] for job in json.loads(capsys.readouterr().out)] == ["jobs/1", "jobs/2"]
    assert call("history", "1,2", "--json") == 0
    assert [one["subject"] for one in json.loads(capsys.readouterr().out)] == ["jobs/1", "jobs/2"]


def test_logs_of_several_jobs_have_a_heading_each_and_ended_jobs_are_found_by_name(
    call: Call, four_jobs: CannedMaster, capfd: pytest.CaptureFixture[str]
) -> None:
    four_jobs.logs = {0: b"one\n"}
    assert call("logs", "--name", "train") == 0
    assert capfd.readouterr().out == "==> job 1 <==\none\n==> job 2 <==\none\n==> job 4 <==\none\n"
    assert call("logs", "-f", "1-2") == 2
    assert "--follow takes one job" in capfd.readouterr().err


def test_history_and_logs_head_a_job_with_the_same_words(
    call: Call, four_jobs: CannedMaster, capfd: pytest.CaptureFixture[str]
) -> None:
    four_jobs.logs = {0: b"one\n"}
    headings = {}
    for command in ("history", "logs"):
        assert call(command, "1,2") == 0
        headings[command] = [line for line in capfd.readouterr().out.splitlines() if line.startswith("==>")]
    assert headings["history"] == headings["logs"] == ["==> job 1 <==", "==> job 2 <=="]


def test_a_resume_right_after_a_suspend_waits_until_the_job_has_stopped(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    job = running_job(master)
    job.state, job.gang.phase = job_pb2.Job.STATE_SUSPENDED, job_pb2.Gang.PHASE_STOPPING
    busy = JobBusy("jobs/1 is busy: its checkpoint is being written; try again")
    looks = 0

    def stop_at_the_third_look() -> None:
        nonlocal looks
        looks += 1
        if looks < 3:
            master.failing = busy
        elif looks == 3:
            job.gang.phase = job_pb2.Gang.PHASE_PARKED

    job.blockers.add(reason="GPUS", message="none free")
    master.failing = busy
    master.looked_at = stop_at_the_third_look
    assert call("resume", "1") == 0
    assert len(ordered(master, job_service_pb2.ResumeJobRequest)) == 4
    assert capsys.readouterr().out.endswith("; `ganger why 1` prints what it waits for\n")


def test_suspend_at_pause_reports_that_the_job_keeps_its_gpus(call: Call, master: CannedMaster, capsys: Output) -> None:
    job = running_job(master)
    job.gang.phase, job.gang.parked_level = job_pb2.Gang.PHASE_PARKED, job_pb2.SUSPEND_LEVEL_PAUSE
    job.capabilities.can_pause = job.capabilities.can_offload = True
    assert call("suspend", "1", "--level", "pause") == 0
    assert "and keeps its 3 GPUs: `ganger suspend 1 --level offload` frees them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("phase", "stop_step", "presumed", "told"),
    [
        ("STARTING", 0, True, "its script has not reported yet what it can save"),
        ("STARTING", 0, False, "it has not reached its first boundary yet"),
        ("RUNNING", 0, True, "its script has not reported yet what it can save"),
        ("MOVING", 0, False, "the order waits until that is done"),
        ("STOPPING", 0, False, "step 120 was done 7 s ago, a step takes about 0.14 s"),
        ("STOPPING", 121, False, "is stopped at step 121: its state is being saved"),
    ],
)
def test_a_waiting_order_reports_what_it_waits_for(
    master: CannedMaster, phase: str, stop_step: int, presumed: bool, told: str
) -> None:
    job = running_job(master)
    job.gang.phase, job.gang.stop_step = job_pb2.Gang.Phase.Value(f"PHASE_{phase}"), stop_step
    job.capabilities.is_presumed = presumed
    job.progress.step_time.FromSeconds(1_000)
    assert told in obstacle(job, now=1_007.0)


def test_a_wait_names_the_host_memory_that_an_offload_lacks() -> None:
    job = job_pb2.Job(name="jobs/1", state=job_pb2.Job.STATE_HOLDING)
    job.gang.phase = job_pb2.Gang.PHASE_RUNNING
    job.capabilities.can_offload = True
    job.gang.claims.add(node="nodes/n1")
    assert obstacle(job) == "job 1 is running: no host memory is reserved so far for what it has on its GPUs"
    job.gang.claims[0].arena_bytes = 1
    assert obstacle(job) == "job 1 is running"
