"""A move is committed exactly where the source stopped, or not at all."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger_master.core.answers import JobAnswer
from ganger_master.core.commands import MoveJob
from ganger_master.core.model import GangPhase, Intent, ObservedPhase


def handed_over(step: int) -> tuple[Drive, int, int]:
    """A move whose source rests at a step; the job's number and the destination's epoch."""
    drive = Drive(2)
    number = drive.submit(job_of(2))
    source = drive.start(number)
    drive.runs(number)
    assert drive.step(MoveJob(number)) == JobAnswer(number)
    destination = drive.job(number).next_epoch
    drive.seen(number, destination, ObservedPhase.PREPARED)
    assert drive.state.gangs[source].intent is Intent.HAND_OVER
    drive.seen(number, source, ObservedPhase.PARKED, step)
    return drive, number, destination


def test_a_move_is_committed_where_the_source_stopped() -> None:
    drive, number, destination = handed_over(40)
    drive.seen(number, destination, ObservedPhase.READY, 40)
    assert drive.job(number).epoch == destination
    assert drive.state.gangs[destination].intent is Intent.RUN


@pytest.mark.parametrize("step", [39, 41])
def test_a_destination_with_the_state_of_another_step_is_given_up_and_the_source_goes_on(step: int) -> None:
    drive, number, destination = handed_over(40)
    source = drive.job(number).epoch
    drive.seen(number, destination, ObservedPhase.READY, step)
    assert drive.job(number).epoch == source
    assert drive.job(number).next_epoch == 0
    assert drive.state.gangs[source].intent is Intent.RUN
    assert drive.state.gangs[destination].intent is Intent.STOP


def test_a_destination_that_cannot_say_its_step_yet_is_waited_for() -> None:
    drive, number, destination = handed_over(40)
    drive.seen(number, destination, ObservedPhase.READY)
    assert drive.job(number).next_epoch == destination
    drive.seen(number, destination, ObservedPhase.READY, 40)
    assert drive.job(number).epoch == destination


def test_the_ready_destination_waits_for_a_source_that_still_runs() -> None:
    drive = Drive(2)
    number = drive.submit(job_of(2))
    source = drive.start(number)
    drive.runs(number)
    drive.step(MoveJob(number))
    destination = drive.job(number).next_epoch
    drive.seen(number, destination, ObservedPhase.READY, 40)
    assert drive.job(number).epoch == source
    assert drive.state.gangs[source].phase is GangPhase.MOVING
