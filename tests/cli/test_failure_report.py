"""The report on a job that failed, and on one that was never launched."""

from __future__ import annotations

import pytest
from ganger.v1 import job_pb2
from ganger.wire import times
from kit.canned import Call, CannedMaster, running_job

Output = pytest.CaptureFixture[str]


def failed_job(master: CannedMaster, lines: int = 30) -> job_pb2.Job:
    """A job that was moved from n1 to n2 and failed there, by its rank 1."""
    job = running_job(master)
    job.ClearField("gang")
    job.state = job_pb2.Job.STATE_FAILED
    job.start_time.CopyFrom(times.timestamp(1_010))
    job.end_time.CopyFrom(times.timestamp(1_020))
    job.failure.CopyFrom(
        job_pb2.Failure(reason="EXIT", message="rank 1 exited with code 3", exit_code=3, rank=1, epoch=2)
    )
    master.logs = {0: b"fine\n", 1: b"".join(b"line %d \x1b[31m\n" % number for number in range(lines))}
    for number, (epoch, nodes) in enumerate([("1", "n1"), ("2", "n2 n3"), ("3", "n9")], 1):
        master.events.append(
            job_pb2.Event(
                sequence=number, subject="jobs/1", kind="gang_approved", figures={"epoch": epoch, "nodes": nodes}
            )
        )
    master.events.append(job_pb2.Event(sequence=9, subject="jobs/1", kind="job_failed", message="rank 1 exited"))
    master.explanation.job.CopyFrom(job)
    return job


@pytest.mark.parametrize("command", ["show", "why", "history"])
def test_a_failed_job_is_printed_with_where_it_ran_and_how_its_log_ends(
    call: Call, master: CannedMaster, capsys: Output, command: str
) -> None:
    failed_job(master)
    assert call(command, "1") == 0
    shown = capsys.readouterr().out
    (where,) = [line for line in shown.splitlines() if line.startswith("ran on")]
    assert where.endswith("n2, n3")
    told = [line for line in shown.splitlines() if "line " in line]
    assert [line.split("line ")[1].split()[0] for line in told] == [str(number) for number in range(20, 30)]
    assert "log of rank 1" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("command", ["show", "why"])
def test_the_report_of_a_failed_job_states_that_nothing_was_written(
    call: Call, master: CannedMaster, capsys: Output, command: str
) -> None:
    failed_job(master, lines=0)
    assert call(command, "1") == 0
    assert "nothing was written" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["show", "why"])
def test_the_report_states_that_a_job_failed_without_a_place(
    call: Call, master: CannedMaster, capsys: Output, command: str
) -> None:
    job = failed_job(master)
    job.ClearField("start_time")
    master.explanation.job.CopyFrom(job)
    master.events.clear()
    assert call(command, "1") == 0
    shown = capsys.readouterr().out
    assert "no node: it was never given a place" in shown
    assert "log of rank" not in shown


def test_logs_of_a_job_without_a_log_print_why_and_the_command_that_waits_for_it(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    job = running_job(master)
    job.ClearField("gang")
    job.state = job_pb2.Job.STATE_PENDING
    master.explanation.job.CopyFrom(job)
    master.explanation.blockers.add(reason="GPUS", message="not enough free devices")
    master.logs = {0: b"", 1: b""}
    for arguments in (("logs", "1"), ("logs", "1", "--all")):
        assert call(*arguments) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        why = "job 1 is pending because GPUS: not enough free devices"
        hint = "`ganger logs -f 1` prints it from its first line on"
        assert captured.err == f"ganger: there is no log yet: {why}; {hint}\n"
    job.start_time.CopyFrom(times.timestamp(1_010))
    job.state = job_pb2.Job.STATE_SUCCEEDED
    master.explanation.job.CopyFrom(job)
    assert call("logs", "1") == 0
    assert capsys.readouterr().err == "ganger: job 1 has succeeded and has written nothing\n"
    master.logs[0] = b"x\n"
    assert call("logs", "1") == 0
    assert capsys.readouterr() == ("x\n", "")


def test_logs_of_a_job_whose_launch_failed_report_that_it_was_never_launched(
    call: Call, master: CannedMaster, capsys: Output
) -> None:
    job = failed_job(master)
    master.logs = {0: b"", 1: b""}
    job.ClearField("start_time")
    job.failure.CopyFrom(job_pb2.Failure(reason="LAUNCH_FAILED", message="cannot execute 'train.py'"))
    master.explanation.job.CopyFrom(job)
    assert call("logs", "1") == 0
    why = "job 1 has failed: LAUNCH_FAILED: cannot execute 'train.py'"
    assert capsys.readouterr().err == f"ganger: there is no log: the job was never launched; {why}\n"
    job.ClearField("end_time")
    job.ClearField("failure")
    job.state = job_pb2.Job.STATE_PENDING
    master.explanation.job.CopyFrom(job)
    assert call("logs", "1") == 0
    assert "there is no log yet: job 1 is pending" in capsys.readouterr().err
