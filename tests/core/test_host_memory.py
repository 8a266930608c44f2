"""Host memory of a job by its measured working set: what it requests at its next start, and what happens if that was
too little."""

from __future__ import annotations

from typing import Any

import pytest
from core.drive import GIB, SERVER, Drive, job_of
from ganger.cluster.fit import share_of_memory
from ganger.cluster.resources import Role, TaskShape
from ganger_master.core.commands import ProposePlan
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import WHOLE_SHARE
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.plan_changes import StartChange
from ganger_master.planner.cores_curves import explain_memory
from ganger_master.planner.device_groups import thin
from msgspec import structs

MIB = 1 << 20
SHARE = share_of_memory(SERVER, 1)
KILLED = Outcome(OutcomeKind.OUT_OF_MEMORY, message="the kernel killed rank 0 for its memory limit")


def unnamed(gpus: int = 1) -> JobSpec:
    return structs.replace(job_of(gpus, memory=0), max_failures=0)


def reported(drive: Drive, number: int, phase: ObservedPhase, **changes: Any) -> None:
    """Report the job's gang, the only one of the cluster."""
    gang = drive.state.gangs[drive.job(number).epoch]
    drive.observe("n1", structs.replace(drive.report(gang, phase), **changes))


def observed(drive: Drive, number: int, working_set: int, phase: ObservedPhase = ObservedPhase.RUNNING) -> None:
    reported(drive, number, phase, working_set_bytes=working_set)


def ended(drive: Drive, number: int, outcome: Outcome) -> None:
    reported(drive, number, ObservedPhase.ENDED, outcome=outcome)


def held(drive: Drive, number: int) -> int:
    return drive.state.gangs[drive.job(number).epoch].claims[0].memory_bytes


@pytest.mark.parametrize(
    ("used", "needed"),
    [(0, 0), (1, GIB + 64 * MIB), (64 * MIB, GIB + 128 * MIB), (GIB, 2 * GIB + GIB // 4), (4 * GIB, 6 * GIB)],
)
def test_a_need_is_the_working_set_with_a_margin(used: int, needed: int) -> None:
    drive = Drive()
    number = drive.submit(unnamed())
    assert structs.replace(drive.job(number), working_set_bytes=used).task_memory_bytes == needed


def test_a_job_requests_what_it_was_measured_to_use_at_its_next_start_only() -> None:
    drive = Drive()
    number = drive.submit(unnamed(2))
    drive.start(number)
    for size in (2 * GIB, 6 * GIB, 3 * GIB):
        observed(drive, number, size)
    assert drive.job(number).working_set_bytes == 3 * GIB, "of one of two tasks, and the largest"
    assert held(drive, number) == 2 * SHARE, "a running job keeps what it has"
    assert "3G at most" in explain_memory(drive.state, number)
    ended(drive, number, Outcome(OutcomeKind.YIELDED))
    drive.start(number)
    assert held(drive, number) == 2 * (3 * GIB + 3 * GIB // 4 + GIB)


@pytest.mark.parametrize(
    ("spec", "phase", "measured", "why"),
    [
        (unnamed(), ObservedPhase.STARTING, 0, "it was not measured yet"),
        (unnamed(), ObservedPhase.RUNNING, GIB, "2.2G for each task if that is less: it has used 1G at most"),
        (job_of(1), ObservedPhase.RUNNING, GIB, "its user asked for 4G for each task"),
        (
            structs.replace(unnamed(), roles=(*unnamed().roles, Role("reader", 1, TaskShape(0)))),
            ObservedPhase.RUNNING,
            0,
            "memory of several roles is not measured by task",
        ),
    ],
)
def test_what_counts_is_a_running_job_of_one_role(spec: JobSpec, phase: ObservedPhase, measured: int, why: str) -> None:
    drive = Drive()
    number = drive.submit(spec)
    drive.start(number)
    before = drive.job(number).shape
    observed(drive, number, GIB, phase)
    assert drive.job(number).working_set_bytes == measured
    assert why in explain_memory(drive.state, number)
    assert drive.job(number).shape.roles == before.roles


def test_a_job_that_runs_out_of_half_a_share_gets_the_share_and_pays_nothing() -> None:
    drive = Drive()
    number = drive.submit(unnamed())
    (claim,) = drive.places(number)[0]
    half = structs.replace(claim, memory_bytes=SHARE // 2)
    drive.step(ProposePlan((StartChange(number, drive.job(number).revision, (half,)),)))
    assert held(drive, number) == SHARE // 2
    ended(drive, number, KILLED)
    assert (drive.job(number).failures, drive.job(number).working_set_bytes) == (0, WHOLE_SHARE)
    shape = drive.job(number).shape
    assert thin(shape, SHARE // 4) == shape, "a place among several gives it no less"
    drive.start(number)
    assert held(drive, number) == SHARE
    ended(drive, number, KILLED)
    assert drive.job(number).state.is_finished, "now its own budget pays"


def test_a_job_that_runs_out_of_less_than_its_share_gets_the_share_and_pays_nothing() -> None:
    drive = Drive()
    number = drive.submit(unnamed())
    drive.start(number)
    observed(drive, number, GIB)
    ended(drive, number, Outcome(OutcomeKind.YIELDED))
    drive.start(number)
    assert held(drive, number) < SHARE
    ended(drive, number, KILLED)
    assert (drive.job(number).failures, drive.job(number).working_set_bytes) == (0, WHOLE_SHARE)
    assert "ran out of memory with less" in explain_memory(drive.state, number)
    drive.start(number)
    assert held(drive, number) == SHARE
    observed(drive, number, GIB)
    assert drive.job(number).working_set_bytes == WHOLE_SHARE
    ended(drive, number, KILLED)
    assert drive.job(number).state.is_finished, "now its own budget pays"
