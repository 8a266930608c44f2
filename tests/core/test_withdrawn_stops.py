"""A job whose stop is withdrawn takes back nothing that another job has got, whether it was parked or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.drive import Drive, job_of
from ganger.cluster.refusals import Reason
from ganger.job_state import JobState
from ganger_master.core.answers import ChangeAnswer, JobAnswer, PlanAnswer
from ganger_master.core.commands import ProposePlan, ResumeJob, SuspendJob
from ganger_master.core.gang_model import GangIntent, GangPhase, ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.plan_changes import PlanChange, ResumeChange, SuspendChange
from msgspec.structs import replace

FULL = "STORAGE_FULL: rank 0: /storage/u/checkpoints/7-1.tmp: no space left on device"


def planned(drive: Drive, kind: Callable[..., PlanChange], number: int, *level: SuspendLevel) -> ChangeAnswer:
    answer = drive.step(ProposePlan((kind(number, drive.job(number).revision, *level),)))
    assert isinstance(answer, PlanAnswer)
    return answer.verdicts[0]


def two_parts() -> tuple[Drive, int, int]:
    """A job that runs on all devices of two nodes."""
    drive = Drive(2)
    number = drive.submit(job_of(8))
    epoch = drive.start(number)
    drive.runs(number)
    return drive, number, epoch


def masks(drive: Drive, epoch: int) -> list[int]:
    return [piece.held.device_mask if piece.held is not None else 0 for piece in drive.state.gangs[epoch].pieces]


def resting_short_of_a_checkpoint(drive: Drive, number: int, epoch: int) -> int:
    """Park a job in host memory, then at CHECKPOINT, for which storage has no room: one part reports that, the other
    part has not reported. Start another job on devices that it had; return that job's number."""
    drive.seen(number, epoch, ObservedPhase.PARKED, 7)
    other = drive.submit(replace(job_of(4), gpu_memory_bytes=0))
    drive.start(other)
    drive.runs(other)
    if drive.job(number).state is JobState.SUSPENDED:
        drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    else:
        assert planned(drive, SuspendChange, number, SuspendLevel.CHECKPOINT).approved
    gang = drive.state.gangs[epoch]
    drive.observe("n2", *drive.others("n2", epoch), drive.report(gang, ObservedPhase.STOPPING, 7))
    short = replace(drive.report(gang, ObservedPhase.PARKED, 7), level=SuspendLevel.OFFLOAD, trouble=FULL)
    drive.observe("n1", *drive.others("n1", epoch), short)
    gang = drive.state.gangs[epoch]
    assert (gang.phase, gang.park_level, gang.rested_level) == (
        GangPhase.STOPPING,
        SuspendLevel.OFFLOAD,
        SuspendLevel.OFFLOAD,
    )
    return other


def test_a_part_that_ended_while_its_gang_was_to_stop_takes_no_devices_back_when_the_plan_is_undone() -> None:
    drive, number, epoch = two_parts()
    assert planned(drive, SuspendChange, number, SuspendLevel.OFFLOAD).approved
    ended = replace(drive.report(drive.state.gangs[epoch], ObservedPhase.ENDED), outcome=Outcome(OutcomeKind.DONE))
    drive.observe("n1", ended)
    other = drive.submit(job_of(4))
    took_over = drive.start(other)
    assert planned(drive, ResumeChange, number).approved
    assert masks(drive, epoch) == [0, 0b1111]
    assert masks(drive, took_over) == [0b1111]
    assert drive.state.gangs[epoch].intent is GangIntent.RUN


def test_a_job_whose_checkpoint_had_no_room_resumes_by_plan_only_where_its_devices_are_free() -> None:
    drive, number, epoch = two_parts()
    assert planned(drive, SuspendChange, number, SuspendLevel.OFFLOAD).approved
    other = resting_short_of_a_checkpoint(drive, number, epoch)
    verdict = planned(drive, ResumeChange, number)
    assert not verdict.approved
    assert verdict.refusals[0].reason is Reason.GPUS
    drive.seen(other, drive.job(other).epoch, ObservedPhase.ENDED)
    assert planned(drive, ResumeChange, number).approved
    assert masks(drive, epoch) == [0b1111, 0b1111]


def test_a_resumed_job_whose_checkpoint_had_no_room_waits_for_devices() -> None:
    drive, number, epoch = two_parts()
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    resting_short_of_a_checkpoint(drive, number, epoch)
    assert drive.step(ResumeJob(number)) == JobAnswer(number)
    gang = drive.state.gangs[epoch]
    assert drive.job(number).state is JobState.PENDING
    assert (gang.phase, gang.rested_level) == (GangPhase.PARKED, SuspendLevel.OFFLOAD)
    assert masks(drive, epoch) == [0, 0]


@pytest.mark.parametrize("by_plan", [True, False])
def test_a_job_that_was_not_parked_yet_runs_on_with_all_it_holds(by_plan: bool) -> None:
    drive, number, epoch = two_parts()
    if by_plan:
        assert planned(drive, SuspendChange, number, SuspendLevel.OFFLOAD).approved
        assert planned(drive, ResumeChange, number).approved
    else:
        drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
        drive.step(ResumeJob(number))
    assert masks(drive, epoch) == [0b1111, 0b1111]
    assert drive.state.gangs[epoch].intent is GangIntent.RUN
