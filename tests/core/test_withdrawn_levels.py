"""A level that failed once is not offered again by any attempt: the next failure would end the job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.drive import ALL_LEVELS, Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.answers import JobAnswer, Refused
from ganger_master.core.commands import MoveJob, SuspendJob
from ganger_master.core.gang_model import GangIntent, ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import Capabilities, JobRecord, SuspendLevel
from msgspec import json
from msgspec.structs import replace

LOST = "rank 0 could not restore its state"
UNREADABLE = "STATE_UNREADABLE: rank 0: this script cannot be run again to its position: it goes on from a.pt by itself"


def moving() -> tuple[Drive, int, int, int]:
    drive = Drive(2)
    number = drive.submit(job_of(2))
    source = drive.start(number)
    drive.runs(number)
    assert drive.step(MoveJob(number)) == JobAnswer(number)
    destination = drive.job(number).next_epoch
    drive.seen(number, destination, ObservedPhase.PREPARED)
    return drive, number, source, destination


def _its_program_ends(drive: Drive, destination: int, outcome: Outcome) -> None:
    gang = drive.state.gangs[destination]
    drive.observe("n2", replace(drive.report(gang, ObservedPhase.ENDED), outcome=outcome))


def _it_says_why(drive: Drive, destination: int, trouble: str) -> None:
    gang = drive.state.gangs[destination]
    drive.observe("n2", replace(drive.report(gang, ObservedPhase.STARTING), trouble=trouble))


FAILURES: dict[str, Callable[[Drive, int], None]] = {
    "the replay lost its way": lambda drive, gang: _its_program_ends(
        drive, gang, Outcome(OutcomeKind.FAILED, 77, message=LOST)
    ),
    "the script failed in the replay": lambda drive, gang: _its_program_ends(
        drive, gang, Outcome(OutcomeKind.FAILED, 1, message="rank 0 exited with code 1")
    ),
    "the state cannot be read": lambda drive, gang: _it_says_why(drive, gang, UNREADABLE),
}
PASSING: dict[str, Callable[[Drive, int], None]] = {
    "its node could not launch it": lambda drive, gang: _its_program_ends(
        drive, gang, Outcome(OutcomeKind.LAUNCH_FAILED, message="no room in /dev/shm")
    ),
    "nothing was recorded": lambda drive, gang: _its_program_ends(drive, gang, Outcome(OutcomeKind.UNKNOWN)),
    "its stream broke": lambda drive, gang: _it_says_why(drive, gang, "nodes/n1 does not answer"),
}


def refused(drive: Drive, number: int, level: SuspendLevel) -> str:
    answer = drive.step(SuspendJob(number, level))
    assert isinstance(answer, Refused)
    assert answer.reason == "LEVEL_UNAVAILABLE"
    return answer.message


@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_move_that_failed_at_its_state_neither_move_nor_checkpoint_is_offered(failure: str) -> None:
    drive, number, source, destination = moving()
    FAILURES[failure](drive, destination)
    assert (drive.job(number).epoch, drive.job(number).next_epoch) == (source, 0)
    assert drive.state.gangs[source].intent is GangIntent.RUN
    drive.runs(number)
    offered = drive.job(number).capabilities
    assert (offered.pause, offered.offload, offered.checkpoint, offered.resize) == (True, True, False, False)
    assert not drive.job(number).capabilities.can_hand_over
    assert "a move failed at it once" in refused(drive, number, SuspendLevel.CHECKPOINT)
    answer = drive.step(MoveJob(number))
    assert isinstance(answer, Refused)
    assert "a move failed at it once" in answer.message


@pytest.mark.parametrize("failure", PASSING)
def test_after_a_move_that_failed_for_another_reason_all_is_offered_as_before(failure: str) -> None:
    drive, number, _, destination = moving()
    PASSING[failure](drive, destination)
    drive.runs(number)
    assert drive.job(number).next_epoch == 0
    assert drive.job(number).capabilities == ALL_LEVELS


def test_what_was_withdrawn_stays_so_over_attempts_and_over_a_master_s_restart() -> None:
    drive, number, _, destination = moving()
    FAILURES["the replay lost its way"](drive, destination)
    drive.runs(number)
    assert json.decode(json.encode(drive.job(number)), type=JobRecord) == drive.job(number)
    gang = drive.state.gangs[drive.job(number).epoch]
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.ENDED), outcome=Outcome(OutcomeKind.UNKNOWN)))
    drive.observe("n1")
    assert drive.job(number).state is JobState.PENDING
    drive.start(number)
    drive.runs(number)
    assert not drive.job(number).capabilities.checkpoint


def test_a_level_at_which_the_state_could_not_be_saved_is_withdrawn_and_a_full_disk_withdraws_nothing() -> None:
    for trouble, offered in (
        ("STATE_UNSAVEABLE: rank 0: sharded tensors are not supported yet", False),
        ("STORAGE_FULL: rank 0: no space left", True),
    ):
        drive = Drive(1)
        number = drive.submit(job_of(2))
        epoch = drive.start(number)
        drive.runs(number)
        drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
        gang = drive.state.gangs[epoch]
        report = replace(drive.report(gang, ObservedPhase.PARKED, 7), level=SuspendLevel.PAUSE, trouble=trouble)
        drive.observe("n1", report)
        drive.runs(number)
        assert drive.job(number).capabilities.checkpoint is offered
        assert drive.job(number).capabilities.offload
        if not offered:
            assert "it failed once" in refused(drive, number, SuspendLevel.CHECKPOINT)


def test_a_source_whose_state_could_not_be_captured_is_not_moved_again() -> None:
    drive, number, source, _ = moving()
    gang = drive.state.gangs[source]
    trouble = "STATE_UNSAVEABLE: rank 0: sharded tensors are not supported yet"
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.STOPPING), trouble=trouble))
    drive.runs(number)
    assert not drive.job(number).capabilities.can_hand_over


def test_nothing_is_withdrawn_of_what_was_never_offered() -> None:
    assert Capabilities(pause=True, known=True).without({}) == Capabilities(pause=True, known=True)
