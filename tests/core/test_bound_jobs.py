"""A job whose state cannot be carried elsewhere resumes only where it is parked."""

from __future__ import annotations

from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.answers import Approved, PlanAnswer, Rejected
from ganger_master.core.commands import ProposePlan, ResumeJob, SuspendJob
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import Capabilities, SuspendLevel
from ganger_master.core.plan_changes import StartChange
from msgspec.structs import replace

STAYS = Capabilities(pause=True, offload=True, missing={"MOVE": "its batches go through zip"}, known=True)


def resumed() -> tuple[Drive, int]:
    """Return a job that was resumed while another job has its devices."""
    drive = Drive(2)
    number = drive.submit(job_of(4))
    epoch = drive.start(number)
    report = replace(drive.report(drive.state.gangs[epoch], ObservedPhase.RUNNING), capabilities=STAYS)
    drive.observe("n1", report)
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    report = replace(drive.report(drive.state.gangs[epoch], ObservedPhase.PARKED, 5), capabilities=STAYS)
    drive.observe("n1", report)
    other = drive.submit(job_of(4))
    drive.request(other, *[place for place in drive.places(other) if place[0].node == "n1"])
    assert drive.job(other).state is JobState.HOLDING
    drive.step(ResumeJob(number))
    return drive, number


def test_a_request_for_another_place_is_refused_with_the_reason() -> None:
    drive, number = resumed()
    answer = drive.request(number, *drive.places(number))
    assert isinstance(answer, Rejected)
    assert "it can go on only where it rests: its batches go through zip" in answer.refusals[0].message
    assert drive.job(number).state is JobState.PENDING


def test_a_plan_that_would_start_it_elsewhere_is_refused_with_the_reason() -> None:
    drive, number = resumed()
    (place, *_) = drive.places(number)
    answer = drive.step(ProposePlan((StartChange(number, drive.job(number).revision, place),)))
    assert isinstance(answer, PlanAnswer)
    assert "it can go on only where it rests" in answer.verdicts[0].refusals[0].message


def test_it_resumes_where_it_is_parked_once_that_is_free() -> None:
    drive, number = resumed()
    (other,) = [gang.job for gang in drive.on("n1") if gang.job != number]
    drive.seen_without("n1", other)
    gang = drive.state.gangs[drive.job(number).epoch]
    assert isinstance(drive.request(number, gang.claims), Approved)
