"""A trouble that a daemon reports of a running gang is shown to the user, and is in the history once."""

from __future__ import annotations

from core.drive import Drive, job_of
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.rpc.job_messages import job_to_wire
from msgspec.structs import replace

FULL = "STORAGE_FULL: checkpoints are skipped"


def test_skipped_checkpoints_of_a_running_job_show_until_they_are_written_again() -> None:
    drive = Drive()
    number = drive.submit(job_of(2))
    drive.start(number)
    drive.runs(number)
    gang = drive.state.gangs[drive.job(number).epoch]
    running = drive.report(gang, ObservedPhase.RUNNING)

    def shown() -> str:
        job = drive.job(number)
        return str(job_to_wire(job, drive.state.gangs[job.epoch], None).trouble)

    assert shown() == ""
    for text in (FULL, f"{FULL} again"):
        drive.observe("n1", replace(running, trouble=text))
        assert shown() == f"nodes/n1: {text}"
        assert explain(drive.state, number, drive.now).assumption.endswith(f"; nodes/n1: {text}")
    told = [(entry.subject, entry.message) for entry in drive.history if entry.kind == "trouble"]
    assert told == [(f"jobs/{number}", FULL)]
    drive.observe("n1", running)
    assert shown() == ""


def test_a_job_that_waits_for_storage_before_its_first_step_reports_that() -> None:
    drive = Drive()
    number = drive.submit(job_of(2))
    drive.start(number)
    gang = drive.state.gangs[drive.job(number).epoch]
    hung = "STORAGE_HUNG: storage has not answered since 2026-03-02 10:00:00 UTC"
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.STARTING), trouble=hung))
    assert explain(drive.state, number, drive.now).assumption.endswith(f"; nodes/n1: {hung}")
