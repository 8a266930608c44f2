"""A drained node: each job on it reports why it is still there."""

from __future__ import annotations

from typing import Any

import pytest
from core.drive import ALL_LEVELS, Drive, job_of
from ganger.cluster.refusals import Reason
from ganger_master.core import approval
from ganger_master.core.availability import held_up
from ganger_master.core.commands import CancelJob, DrainNode, ProposePlan, SuspendJob
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import GangPhase, ObservedPhase
from ganger_master.core.job_model import Capabilities, SuspendLevel
from ganger_master.core.plan_changes import StartChange
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace

MEMORY_ONLY = Capabilities(pause=True, offload=True, known=True)
NOTHING = Capabilities(known=True, missing={"MOVE": "its state cannot be captured"})


def on_n1(drive: Drive, capabilities: Capabilities = MEMORY_ONLY) -> int:
    """A job of four that runs there, and can so much."""
    number = drive.submit(job_of(4))
    epoch = drive.start(number)
    gang = drive.state.gangs[epoch]
    assert gang.nodes == ("n1",)
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.RUNNING), capabilities=capabilities))
    return number


def told(drive: Drive, number: int) -> list[tuple[Reason, str]]:
    return [(one.reason, one.message) for one in explain(drive.state, number, drive.now).blockers]


def leaves(what: str) -> str:
    return f"its node n1 is drained (new fan): {what}"


def test_a_job_without_room_elsewhere_reports_what_it_lacks_there() -> None:
    drive = Drive(2)
    number = on_n1(drive)
    drive.start(drive.submit(job_of(1)))
    assert told(drive, number) == []
    drive.step(DrainNode("n1", "new fan"))
    (reason, text), (lacking, how) = told(drive, number)
    assert (reason, text) == (
        Reason.NODE_UNAVAILABLE,
        leaves("it goes once there is room elsewhere, and runs on until then"),
    )
    assert lacking is Reason.GPUS
    assert how.startswith("not enough free devices")


def test_a_place_elsewhere_is_looked_for_when_there_is_room_or_time_has_passed_and_not_at_every_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[float] = []
    look = approval.find_place

    def counted(*arguments: Any, **more: Any) -> Any:
        looks.append(drive.now)
        return look(*arguments, **more)

    drive = Drive(2)
    number = on_n1(drive)
    other = drive.submit(job_of(1))
    drive.start(other)
    drive.step(DrainNode("n1", "new fan"))
    monkeypatch.setattr(approval, "find_place", counted)
    for _ in range(50):
        drive.runs(other)
    assert looks == []
    drive.now += 5.0
    drive.runs(other)
    drive.runs(other)
    assert len(looks) == 1
    assert not drive.job(number).next_epoch
    drive.step(CancelJob(other))
    drive.observe("n2")
    assert drive.job(number).next_epoch, "there is room"


def test_a_job_for_which_the_planner_finds_no_room_is_saved_to_storage_in_the_end() -> None:
    drive = Drive(1, CoreSettings(policy="gandiva"))
    number = drive.submit(job_of(4))
    start = StartChange(number, drive.job(number).revision, drive.places(number)[0])
    drive.step(ProposePlan((start,)))
    drive.runs(number)
    drive.step(DrainNode("n1", "new fan"))
    assert drive.state.gangs[drive.job(number).epoch].phase is GangPhase.RUNNING
    said = leaves("it goes once another node takes jobs, and is saved on storage if no job can make room")
    assert told(drive, number)[0] == (Reason.NODE_UNAVAILABLE, said)


def test_a_job_that_is_moving_away_has_no_blockers() -> None:
    drive = Drive(2)
    number = on_n1(drive)
    drive.step(DrainNode("n1", "new fan"))
    assert drive.job(number).next_epoch
    assert told(drive, number) == []
    # A job that is being saved has none either.
    alone = Drive(1)
    number = on_n1(alone, ALL_LEVELS)
    alone.step(DrainNode("n1", "new fan"))
    assert alone.state.gangs[alone.job(number).epoch].phase is GangPhase.STOPPING
    assert told(alone, number) == []


def test_without_another_node_that_takes_jobs_that_is_the_only_blocker() -> None:
    drive = Drive(2)
    number = on_n1(drive)
    drive.step(DrainNode("n2", "new fan"))
    drive.step(DrainNode("n1", "new fan"))
    text = "it goes once another node takes jobs, and runs on until then"
    assert told(drive, number) == [(Reason.NODE_UNAVAILABLE, leaves(text))]


def test_a_job_that_can_be_neither_moved_nor_saved_is_reported_to_stay() -> None:
    drive = Drive(2)
    number = on_n1(drive, NOTHING)
    drive.step(DrainNode("n1", "new fan"))
    text = "it stays until it ends, for it can neither be moved nor saved"
    assert told(drive, number) == [(Reason.NODE_UNAVAILABLE, leaves(text))]


def test_the_report_on_a_job_without_capabilities_yet_says_that_this_may_change() -> None:
    drive = Drive(2)
    number = drive.submit(job_of(4))
    gang = drive.state.gangs[drive.start(number)]
    silent = replace(drive.report(gang, ObservedPhase.RUNNING), capabilities=NOTHING, presumed=True)
    drive.observe("n1", silent)
    drive.step(DrainNode("n1", "new fan"))
    text = "it stays until it ends, unless its agent speaks up, which it has not so far"
    assert told(drive, number) == [(Reason.NODE_UNAVAILABLE, leaves(text))]


def test_a_job_that_has_not_stepped_leaves_once_it_does() -> None:
    drive = Drive(2)
    number = drive.submit(job_of(4))
    drive.start(number)
    drive.step(DrainNode("n1", "new fan"))
    assert told(drive, number) == [(Reason.NODE_UNAVAILABLE, leaves("it goes once it steps"))]
    drive.runs(number)
    assert drive.job(number).next_epoch


def test_a_checkpoint_that_failed_is_what_it_waits_for() -> None:
    drive = Drive(1)
    number = on_n1(drive, ALL_LEVELS)
    drive.step(DrainNode("n1", "new fan"))
    gang = drive.state.gangs[drive.job(number).epoch]
    refused = replace(drive.report(gang, ObservedPhase.PARKED, 7), level=SuspendLevel.PAUSE, trouble="no space left")
    drive.observe("n1", refused)
    ((_, text),) = told(drive, number)
    assert text == leaves("saving it failed (no space left), and is tried again after a minute")


def test_a_suspended_job_in_host_memory_that_cannot_be_saved_waits_for_its_user_to_resume_or_end_it() -> None:
    drive = Drive(2)
    number = on_n1(drive)
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    epoch = drive.job(number).epoch
    gang = drive.state.gangs[epoch]
    rests = replace(drive.report(gang, ObservedPhase.PARKED, 7), capabilities=MEMORY_ONLY)
    drive.observe("n1", replace(rests, level=SuspendLevel.OFFLOAD))
    drive.step(DrainNode("n1", "new fan"))
    (one,) = held_up(drive.state, drive.job(number), drive.now)
    assert one.message == leaves("it rests there and cannot be saved: resume it, or end it")
