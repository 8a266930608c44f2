"""Jobs that are scheduled at ends of their epochs: what waits for one, for how long, and what does not."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.protocol.stop_rules import EPOCH_BIT, stops_at_epoch_end
from ganger_master.core.answers import JobAnswer
from ganger_master.core.commands import CancelJob, DrainNode, MoveJob, ProposePlan, ResumeJob, SuspendJob, Tick
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, ObservedPhase
from ganger_master.core.job_model import JobSpec, SuspendLevel
from ganger_master.core.machine import next_wake
from ganger_master.core.plan_changes import SuspendChange
from msgspec.structs import replace


def spec(gpus: int = 4) -> JobSpec:
    return replace(job_of(gpus), is_scheduled_at_epochs=True)


def running(nodes: int = 2) -> tuple[Drive, int]:
    drive = Drive(nodes)
    number = drive.submit(spec())
    drive.start(number)
    drive.runs(number)
    return drive, number


def gang_of(drive: Drive, number: int) -> Gang:
    return drive.state.gangs[drive.job(number).epoch]


def suspended_by_plan(drive: Drive, number: int) -> None:
    change = SuspendChange(number, drive.job(number).revision, level=SuspendLevel.OFFLOAD)
    answer = drive.step(ProposePlan((change,), "planner"))
    assert answer.verdicts[0].approved  # type: ignore[union-attr]


def test_a_plan_waits_for_the_end_of_an_epoch_and_the_order_keeps_its_number_at_a_deeper_level() -> None:
    drive, number = running()
    suspended_by_plan(drive, number)
    gang = gang_of(drive, number)
    assert stops_at_epoch_end(gang.stop_sequence)
    assert gang.stop_sequence == gang.master_sequence | EPOCH_BIT
    drive.seen(number, gang.epoch, ObservedPhase.PARKED, 80)
    assert gang_of(drive, number).phase is GangPhase.PARKED
    drive.step(SuspendJob(number, SuspendLevel.CHECKPOINT))
    assert gang_of(drive, number).stop_sequence == gang.stop_sequence


def test_a_plan_waits_for_an_epoch_no_longer_than_is_set_and_the_history_gives_the_reason() -> None:
    drive, number = running()
    suspended_by_plan(drive, number)
    waiting = gang_of(drive, number)
    drive.now += drive.state.settings.epoch_wait_s - 1
    drive.step(Tick())
    assert gang_of(drive, number) == waiting
    assert next_wake(drive.state, drive.now) == waiting.since + drive.state.settings.epoch_wait_s
    drive.now += 1
    drive.step(Tick())
    gang = gang_of(drive, number)
    assert (gang.stop_sequence, gang.park_level, gang.parked_by_plan) == (
        gang.master_sequence,
        SuspendLevel.OFFLOAD,
        True,
    )
    reasons = [row.message for row in drive.history if row.kind == "epoch_wait_over"]
    assert reasons == ["stops at its next step: no epoch of it has ended within 1h (epoch_wait)"]
    drive.seen(number, gang.epoch, ObservedPhase.PARKED, 80)
    assert gang_of(drive, number).phase is GangPhase.PARKED
    assert not drive.state.gangs.at_epoch_ends


def test_a_job_that_rests_at_the_end_of_its_epoch_is_not_ordered_to_stop_once_more() -> None:
    drive, number = running()
    suspended_by_plan(drive, number)
    drive.seen(number, gang_of(drive, number).epoch, ObservedPhase.PARKED, 80)
    resting = gang_of(drive, number)
    drive.now += drive.state.settings.epoch_wait_s + 1
    drive.step(Tick())
    assert gang_of(drive, number) == resting


def test_a_user_s_suspend_waits_for_no_epoch_and_overtakes_a_plan_that_does() -> None:
    drive, number = running()
    suspended_by_plan(drive, number)
    waited = gang_of(drive, number).stop_sequence
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    gang = gang_of(drive, number)
    assert not stops_at_epoch_end(gang.stop_sequence)
    assert gang.stop_sequence not in (0, waited)
    drive.step(ResumeJob(number))
    assert gang_of(drive, number).stop_sequence == 0


def test_the_end_of_a_job_waits_for_no_epoch() -> None:
    drive, number = running()
    suspended_by_plan(drive, number)
    drive.step(CancelJob(number))
    gang = gang_of(drive, number)
    assert (gang.intent, gang.stop_sequence) == (GangIntent.STOP, 0)


def test_a_user_s_move_waits_for_no_epoch() -> None:
    drive, number = running()
    assert drive.step(MoveJob(number)) == JobAnswer(number)
    drive.seen(number, drive.job(number).next_epoch, ObservedPhase.PREPARED)
    gang = gang_of(drive, number)
    assert gang.intent is GangIntent.HAND_OVER
    assert not stops_at_epoch_end(gang.stop_sequence)


def test_a_drain_waits_for_an_epoch_and_after_the_time_that_is_set_for_none() -> None:
    drive, number = running()
    (node,) = gang_of(drive, number).nodes
    drive.step(DrainNode(node, "new fan"))
    drive.seen(number, drive.job(number).next_epoch, ObservedPhase.PREPARED)
    waiting = gang_of(drive, number)
    assert waiting.intent is GangIntent.HAND_OVER
    assert stops_at_epoch_end(waiting.stop_sequence)
    drive.now += drive.state.settings.epoch_wait_s - 1
    drive.step(Tick())
    assert gang_of(drive, number) == waiting, "longer than a move is given otherwise"
    drive.now += 2
    drive.step(Tick())
    gang = gang_of(drive, number)
    assert gang.intent is GangIntent.HAND_OVER
    assert gang.master_sequence == waiting.master_sequence + 1
    assert gang.stop_sequence == gang.master_sequence
    assert drive.job(number).next_epoch, "the move goes on"


def test_a_drain_s_destination_that_is_late_meets_a_source_that_waits_no_longer() -> None:
    drive, number = running()
    (node,) = gang_of(drive, number).nodes
    drive.step(DrainNode(node, "new fan"))
    drive.now += drive.state.settings.epoch_wait_s + 1
    drive.step(Tick())
    drive.seen(number, drive.job(number).next_epoch, ObservedPhase.PREPARED)
    gang = gang_of(drive, number)
    assert gang.intent is GangIntent.HAND_OVER
    assert not stops_at_epoch_end(gang.stop_sequence)


@pytest.mark.parametrize("at_epochs", [False, True])
def test_a_job_that_is_scheduled_at_epochs_is_not_time_sliced(at_epochs: bool) -> None:
    drive = Drive(1)
    number = drive.submit(replace(job_of(1), is_scheduled_at_epochs=at_epochs))
    assert bool(drive.job(number).no_time_slices) is at_epochs
