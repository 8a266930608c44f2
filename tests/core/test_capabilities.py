"""A job's capabilities are those that its ranks reported last; a rank without a report changes nothing."""

from __future__ import annotations

from core.drive import ALL_LEVELS, Drive, job_of
from ganger_master.core.answers import Refused
from ganger_master.core.commands import MoveJob
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import Capabilities
from msgspec.structs import replace

OPAQUE = Capabilities(pause=True, missing={"OFFLOAD": "no agent"}, known=True)


def restarted() -> tuple[Drive, int]:
    """Start its second attempt, which has not reported yet."""
    drive = Drive(2)
    number = drive.submit(job_of(2))
    gang = drive.state.gangs[drive.start(number)]
    node = gang.nodes[0]
    drive.runs(number)
    drive.observe(node, replace(drive.report(gang, ObservedPhase.ENDED), outcome=Outcome(OutcomeKind.UNKNOWN)))
    drive.observe(node)
    drive.start(number)
    return drive, number


def says(drive: Drive, number: int, capabilities: Capabilities, *, presumed: bool) -> None:
    gang = drive.state.gangs[drive.job(number).epoch]
    report = drive.report(gang, ObservedPhase.RUNNING)
    drive.observe(gang.nodes[0], replace(report, capabilities=capabilities, presumed=presumed))


def test_reported_capabilities_stand_until_a_new_attempt_reports_so_it_can_be_moved() -> None:
    drive, number = restarted()
    says(drive, number, OPAQUE, presumed=True)
    assert drive.job(number).capabilities == ALL_LEVELS
    assert not isinstance(drive.step(MoveJob(number)), Refused)


def test_a_new_report_of_capabilities_replaces_them() -> None:
    drive, number = restarted()
    says(drive, number, OPAQUE, presumed=True)
    says(drive, number, OPAQUE, presumed=False)
    assert drive.job(number).capabilities == OPAQUE


def test_presumed_capabilities_of_a_job_without_a_report_are_marked_until_it_reports() -> None:
    drive = Drive(2)
    number = drive.submit(job_of(2))
    drive.start(number)
    says(drive, number, OPAQUE, presumed=True)
    assert drive.job(number).capabilities == replace(OPAQUE, presumed=True)
    says(drive, number, ALL_LEVELS, presumed=False)
    assert drive.job(number).capabilities == ALL_LEVELS


def test_a_job_that_cannot_be_restored_elsewhere_is_not_moved_and_the_reason_is_given() -> None:
    drive = Drive(2)
    number = drive.submit(job_of(2))
    drive.start(number)
    drive.runs(number)
    stays = Capabilities(pause=True, offload=True, missing={"MOVE": "its log says why"}, known=True)
    says(drive, number, stays, presumed=False)
    refusal = drive.step(MoveJob(number))
    assert isinstance(refusal, Refused)
    assert "its log says why" in refusal.message
