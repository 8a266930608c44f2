"""Orders to jobs that have ended are refused in words that say how they ended, and what they cannot be."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger_master.core.answers import Refused
from ganger_master.core.commands import (
    CancelJob,
    Command,
    MoveJob,
    ResizeJob,
    ResumeJob,
    RetuneJob,
    SuspendJob,
    UpdateJob,
)
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_spec import Update
from msgspec.structs import replace

ORDERS: list[tuple[Command, str]] = [
    (SuspendJob(1), "suspended"),
    (ResumeJob(1), "resumed"),
    (MoveJob(1), "moved"),
    (ResizeJob(1, 2), "resized"),
    (RetuneJob(1, 2_000), "given other cores"),
    (RetuneJob(1, repin=True), "given other cores"),
    (UpdateJob(1, Update(priority=3)), "changed"),
]


def refusal(drive: Drive, order: Command) -> tuple[str, str]:
    answer = drive.step(order)
    assert isinstance(answer, Refused)
    return answer.reason, answer.message


@pytest.mark.parametrize(("kind", "end"), [(OutcomeKind.DONE, "has succeeded"), (OutcomeKind.FAILED, "has failed")])
@pytest.mark.parametrize(("order", "told"), [*ORDERS, (CancelJob(1), "cancelled")])
def test_a_job_that_has_ended_takes_no_orders(kind: OutcomeKind, end: str, order: Command, told: str) -> None:
    drive = Drive()
    assert drive.submit(job_of(1)) == 1
    gang = drive.state.gangs[drive.start(1)]
    drive.runs(1)
    drive.observe("n1", replace(drive.report(gang, ObservedPhase.ENDED), outcome=Outcome(kind, 1)))
    assert refusal(drive, order) == ("JOB_FINISHED", f"job 1 {end}; it cannot be {told}")


@pytest.mark.parametrize(("order", "told"), ORDERS)
def test_a_job_that_was_cancelled_takes_no_orders(order: Command, told: str) -> None:
    drive = Drive()
    drive.submit(job_of(1))
    drive.step(CancelJob(1))
    assert refusal(drive, order) == ("JOB_FINISHED", f"job 1 was cancelled; it cannot be {told}")


@pytest.mark.parametrize("order", [MoveJob(1), RetuneJob(1, 2_000)])
def test_a_pending_job_is_not_running_yet(order: Command) -> None:
    drive = Drive()
    drive.submit(job_of(1))
    assert refusal(drive, order) == ("NOT_RUNNING", "jobs/1 is not running: it is pending")
