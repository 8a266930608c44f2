"""A suspend whose level is not available is given up and reported: the job stays parked or runs on."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.job_state import JobState
from ganger_master.core.answers import JobAnswer, Refused
from ganger_master.core.commands import CordonNode, DrainNode, ResumeJob, SuspendJob
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import GangIntent, GangPhase, ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from msgspec.structs import replace

FULL = "STORAGE_FULL: rank 0: /storage/u/checkpoints/7-1.tmp: no space left on device"


def running(nodes: int = 1) -> tuple[Drive, int, int]:
    drive = Drive(nodes)
    number = drive.submit(job_of(2))
    epoch = drive.start(number)
    drive.runs(number)
    return drive, number, epoch


def refuse(drive: Drive, epoch: int, level: SuspendLevel = SuspendLevel.PAUSE) -> None:
    gang = drive.state.gangs[epoch]
    report = replace(drive.report(gang, ObservedPhase.PARKED, 7), level=level, trouble=FULL)
    drive.observe(gang.nodes[0], report)


def history(drive: Drive) -> list[str]:
    return [entry.kind for entry in drive.history]


def test_a_running_job_runs_on_and_says_why_it_was_not_suspended() -> None:
    drive, number, epoch = running()
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    assert drive.job(number).state is JobState.SUSPENDED
    refuse(drive, epoch)
    job, gang = drive.job(number), drive.state.gangs[epoch]
    assert (job.state, gang.intent, gang.phase) == (JobState.HOLDING, GangIntent.RUN, GangPhase.STARTING)
    assert job.trouble == FULL
    assert FULL in explain(drive.state, number, drive.now).assumption
    assert "suspend_refused" in history(drive)
    drive.runs(number)
    assert drive.state.gangs[epoch].phase is GangPhase.RUNNING
    # A second suspend, once there is room, is a stop like any other.
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    assert drive.job(number).trouble == ""
    drive.seen(number, epoch, ObservedPhase.PARKED, 9)
    assert drive.job(number).ending is JobState.SUSPENDED


@pytest.mark.parametrize("level", [SuspendLevel.PAUSE, SuspendLevel.OFFLOAD])
def test_a_job_that_rests_keeps_resting_where_it_does_and_can_be_resumed_at_once(level: SuspendLevel) -> None:
    drive, number, epoch = running()
    drive.step(SuspendJob(number, level))
    drive.seen(number, epoch, ObservedPhase.PARKED, 7)
    assert drive.job(number).suspended_level is level
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    refuse(drive, epoch, level)
    job = drive.job(number)
    assert (job.state, job.suspended_level, job.trouble) == (JobState.SUSPENDED, level, FULL)
    assert drive.state.gangs[epoch].stop_step == 7
    assert drive.step(ResumeJob(number)) == JobAnswer(number)
    assert drive.job(number).state in (JobState.HOLDING, JobState.PENDING)


def test_what_a_part_says_of_an_older_order_refuses_nothing() -> None:
    drive, number, epoch = running()
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    gang = drive.state.gangs[epoch]
    stale = replace(drive.report(gang, ObservedPhase.PARKED, 7), level=SuspendLevel.PAUSE, trouble=FULL)
    drive.observe(gang.nodes[0], replace(stale, master_sequence=gang.master_sequence - 1))
    assert drive.job(number).state is JobState.SUSPENDED
    answer = drive.step(ResumeJob(number))
    assert isinstance(answer, Refused)
    assert answer.reason == "JOB_BUSY"


def test_a_drain_does_not_stop_a_job_again_and_again_whose_checkpoint_finds_no_room() -> None:
    drive, number, epoch = running()
    drive.step(DrainNode("n1", "repair"))
    assert drive.state.gangs[epoch].park_level is SuspendLevel.CHECKPOINT
    refuse(drive, epoch)
    drive.runs(number)
    assert drive.state.gangs[epoch].intent is GangIntent.RUN
    drive.now += 61.0
    drive.runs(number)
    assert drive.state.gangs[epoch].intent is GangIntent.PARK
    assert not isinstance(drive.step(CordonNode("n1", "repair")), Refused)
