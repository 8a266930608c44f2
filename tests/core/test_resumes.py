"""A job that is resumed before it is parked runs on, or waits beside its parked parts."""

from __future__ import annotations

from core.drive import Drive, job_of
from core.test_moves import handed_over
from ganger.job_state import JobState
from ganger_master.core.commands import ResumeJob, SuspendJob
from ganger_master.core.gang_model import GangIntent, GangPhase, ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import SuspendLevel
from msgspec.structs import replace


def ended(drive: Drive, epoch: int, node: str, kind: OutcomeKind) -> None:
    report = drive.report(drive.state.gangs[epoch], ObservedPhase.ENDED)
    drive.observe(node, replace(report, outcome=Outcome(kind)))


def test_a_job_that_was_done_before_it_could_stop_succeeds_though_it_is_resumed_before_all_parts_have_said_so() -> None:
    drive = Drive(2)
    number = drive.submit(job_of(8))
    epoch = drive.start(number)
    drive.runs(number)
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    ended(drive, epoch, "n1", OutcomeKind.DONE)
    drive.step(ResumeJob(number))
    assert (drive.job(number).state, drive.state.gangs[epoch].intent) == (JobState.HOLDING, GangIntent.RUN)
    ended(drive, epoch, "n2", OutcomeKind.DONE)
    assert drive.job(number).state is JobState.SUCCEEDED


def test_a_copy_that_was_moved_away_from_rests_where_it_stands_when_its_suspend_is_taken_back() -> None:
    drive, number, destination = handed_over(40)
    copy = drive.job(number).epoch
    drive.seen(number, destination, ObservedPhase.READY, 40)
    # the node it moved to dies; it goes back, where what is to take over from the copy is gone at once
    ended(drive, destination, drive.state.gangs[destination].nodes[0], OutcomeKind.UNKNOWN)
    drive.seen(number, copy, ObservedPhase.PARKED, 40)
    assert (drive.job(number).state, drive.job(number).epoch) == (JobState.PENDING, copy)
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    assert drive.state.gangs[copy].phase is GangPhase.STOPPING
    drive.step(ResumeJob(number))
    assert (drive.job(number).state, drive.state.gangs[copy].phase) == (JobState.PENDING, GangPhase.PARKED)
    assert drive.places(number)
