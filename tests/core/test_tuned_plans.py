"""Plans that tune gangs: other cores and memory than requested, but never less memory than needed."""

from __future__ import annotations

from core.drive import GIB, Drive, job_of
from core.test_plans import propose, start
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim
from ganger_master.core.answers import PlanAnswer
from ganger_master.core.commands import KeepPlace, ProposePlan
from ganger_master.core.plan_changes import CoresChange, PlanChange
from msgspec.structs import replace


def placed(drive: Drive, number: int, millicores: int, memory_bytes: int) -> tuple[Claim, ...]:
    """On the first socket."""
    (claim,) = drive.places(number)[0]
    return (replace(claim, millicores=(millicores, 0), memory_bytes=memory_bytes),)


def cores(drive: Drive, number: int, millicores: int, memory_bytes: int) -> PlanChange:
    job = drive.job(number)
    (claim,) = drive.state.gangs[job.epoch].claims
    claims = (replace(claim, millicores=(millicores, 0), memory_bytes=memory_bytes),)
    return CoresChange(number, job.revision, claims)


def test_a_plan_starts_a_gang_with_other_cores_and_more_memory_than_its_job_asks_for() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    claims = placed(drive, number, 7_000, 20 * GIB)
    assert propose(drive, start(drive, number, claims)) == [True]
    assert drive.state.gangs[drive.job(number).epoch].claims == claims


def test_no_plan_starts_a_gang_with_less_memory_than_its_job_names() -> None:
    drive = Drive()
    number = drive.submit(job_of(1, 4 * GIB))
    assert propose(drive, start(drive, number, placed(drive, number, 2_000, 4 * GIB - 1))) == [False]


def test_a_job_that_names_no_memory_may_be_started_with_less_than_a_share() -> None:
    drive = Drive()
    number = drive.submit(job_of(1, 0))
    assert propose(drive, start(drive, number, placed(drive, number, 1_000, GIB))) == [True]


def test_a_gang_without_cores_is_not_started() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    assert propose(drive, start(drive, number, placed(drive, number, 0, 4 * GIB))) == [False]


def test_what_a_peer_gives_back_serves_the_newcomer_behind_it_and_not_the_one_before_it() -> None:
    for is_first, approved in ((True, [True, True]), (False, [False, True])):
        drive = Drive()
        first, second = drive.submit(job_of(1)), drive.submit(job_of(1))
        assert propose(drive, start(drive, first, placed(drive, first, 8_000, 60 * GIB))) == [True]
        drive.runs(first)
        back = cores(drive, first, 2_000, 4 * GIB)
        (held,) = back.claims
        # The rest of the first socket, where the other had left nothing.
        rest = replace(held, device_mask=held.device_mask ^ 0b11, millicores=(6_000, 0), memory_bytes=30 * GIB)
        newcomer = start(drive, second, (rest,))
        assert propose(drive, *((back, newcomer) if is_first else (newcomer, back))) == approved


def test_memory_of_a_gang_that_runs_shrinks_to_what_its_job_asks_for_and_no_further() -> None:
    drive = Drive()
    number = drive.submit(job_of(1, 4 * GIB))
    propose(drive, start(drive, number, placed(drive, number, 2_000, 20 * GIB)))
    drive.runs(number)
    assert propose(drive, cores(drive, number, 2_000, 4 * GIB - 1)) == [False]
    assert propose(drive, cores(drive, number, 2_000, 4 * GIB)) == [True]


def test_memory_of_a_gang_that_was_started_with_less_than_its_share_shrinks_no_further_and_may_grow() -> None:
    drive = Drive()
    number = drive.submit(job_of(1, 0))
    propose(drive, start(drive, number, placed(drive, number, 1_000, GIB)))
    drive.runs(number)
    assert propose(drive, cores(drive, number, 1_000, GIB - 1)) == [False]
    assert propose(drive, cores(drive, number, 1_000, 3 * GIB)) == [True]


def test_a_gang_keeps_and_gives_back_cores_of_a_node_whose_free_ones_are_kept_for_another_job() -> None:
    drive = Drive()
    number, large = drive.submit(job_of(1)), drive.submit(job_of(4))
    propose(drive, start(drive, number, placed(drive, number, 5_000, 20 * GIB)))
    drive.runs(number)
    (held,) = drive.state.gangs[drive.job(number).epoch].claims
    kept = replace(held, device_mask=0b1111, millicores=(8_000, 8_000), memory_bytes=16 * GIB, tasks=(4,))
    drive.step(ProposePlan((), kept_places=(KeepPlace(large, (kept,)),)))
    for millicores, memory_bytes in ((4_000, 20 * GIB), (4_000, 10 * GIB)):
        assert propose(drive, cores(drive, number, millicores, memory_bytes)) == [True]
    answer = drive.step(ProposePlan((cores(drive, number, 4_001, 10 * GIB),)))
    assert isinstance(answer, PlanAnswer)
    assert [refusal.reason for refusal in answer.verdicts[0].refusals] == [Reason.KEPT]
