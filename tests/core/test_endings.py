"""Records of a job that has ended or rests: when it began, and how far it got."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.commands import CancelJob, SuspendJob
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import JobProgress, SuspendLevel
from msgspec.structs import replace


@pytest.mark.parametrize(
    ("kind", "exit_code", "begins"),
    [
        (OutcomeKind.DONE, 0, True),
        (OutcomeKind.FAILED, 3, True),
        # A command that cannot be executed never ran.
        (OutcomeKind.LAUNCH_FAILED, 127, False),
    ],
)
def test_an_attempt_that_ended_before_a_reported_step_began_when_it_got_its_gang(
    kind: OutcomeKind, exit_code: int, begins: bool
) -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    epoch = drive.start(number)
    approved = drive.state.gangs[epoch].create_time
    ended = drive.report(drive.state.gangs[epoch], ObservedPhase.ENDED)
    drive.observe("n1", replace(ended, outcome=Outcome(kind, exit_code)))
    job = drive.job(number)
    assert job.state.is_finished
    assert job.start_time == (approved if begins else 0.0)


def test_a_job_that_was_cancelled_in_the_queue_never_began() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    drive.step(CancelJob(number))
    assert (drive.job(number).state, drive.job(number).start_time) == (JobState.CANCELLED, 0.0)


def test_how_far_an_attempt_got_is_kept_with_its_job_and_a_repeated_report_changes_nothing() -> None:
    drive = Drive(nodes=2)
    number = drive.submit(job_of(8))
    drive.start(number)
    drive.runs(number)
    epoch = drive.job(number).epoch
    behind, ahead = JobProgress(epoch, 499, loss=0.5), JobProgress(epoch, 500, 4_000, 0.25)
    ended = replace(drive.report(drive.state.gangs[epoch], ObservedPhase.ENDED), outcome=Outcome(OutcomeKind.DONE))
    drive.observe("n1", replace(ended, progress=ahead))
    known = drive.job(number)
    assert known.progress == replace(ahead, time=drive.now)
    drive.observe("n1", replace(ended, progress=ahead))
    assert drive.job(number) is known
    drive.observe("n2", replace(ended, progress=behind))
    assert drive.job(number).state is JobState.SUCCEEDED
    assert drive.job(number).progress == known.progress


def test_a_later_attempt_that_got_less_far_counts() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    for step in (50, 20):
        epoch = drive.start(number)
        drive.runs(number)
        ended = drive.report(drive.state.gangs[epoch], ObservedPhase.ENDED)
        drive.observe("n1", replace(ended, outcome=Outcome(OutcomeKind.UNKNOWN), progress=JobProgress(epoch, step)))
        drive.observe("n1")
        kept = drive.job(number).progress
        assert kept is not None
        assert (kept.epoch, kept.step) == (epoch, step)


def test_how_far_a_job_got_is_recorded_where_it_rests_and_never_goes_back() -> None:
    drive = Drive(1)
    number = drive.submit(job_of(1))
    epoch = drive.start(number)
    drive.runs(number)
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    rests = drive.report(drive.state.gangs[epoch], ObservedPhase.PARKED, 1_468)
    drive.observe("n1", replace(rests, progress=JobProgress(epoch, 1_468)))
    assert drive.job(number).progress == JobProgress(epoch, 1_468, time=drive.now)
    drive.observe("n1", replace(rests, progress=JobProgress(epoch, 1_222)))
    assert drive.job(number).progress.step == 1_468
