"""A parked job keeps its arena and the host memory that its processes use, not all that it claims."""

from __future__ import annotations

from core.drive import GIB, SERVER, Drive, job_of
from ganger.cluster.claims import resumed_in_place
from ganger.cluster.refusals import Reason
from ganger.job_state import JobState
from ganger_master.core.answers import Approved, Rejected
from ganger_master.core.commands import CancelJob, ProposePlan, ResumeJob, SuspendJob
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.plan_changes import ResumeChange, SuspendChange
from ganger_master.core.state_image import restored
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

NODE = SERVER.memory_bytes
OFFLOAD = SuspendLevel.OFFLOAD


def free(drive: Drive) -> int:
    return drive.state.view.row("n1").free_memory_bytes


def arena(drive: Drive, number: int) -> int:
    return sum(claim.arena_bytes for claim in drive.state.gangs[drive.job(number).epoch].claims)


def running(drive: Drive, memory: int) -> int:
    number = drive.submit(job_of(1, memory))
    drive.start(number)
    drive.seen(number, drive.job(number).epoch, ObservedPhase.RUNNING)
    return number


def offloaded(drive: Drive, memory: int, kept: int) -> int:
    """A job that claims so much and keeps so much."""
    number = running(drive, memory)
    drive.step(SuspendJob(number, OFFLOAD))
    rests(drive, number, kept)
    return number


def rests(drive: Drive, number: int, kept: int) -> None:
    gang = drive.state.gangs[drive.job(number).epoch]
    said = drive.report(gang, ObservedPhase.PARKED, 40)
    drive.observe("n1", *drive.others("n1", gang.epoch), replace(said, kept_memory_bytes=kept))


def test_a_job_that_rests_on_its_only_gpu_leaves_the_next_the_memory_that_it_does_not_use() -> None:
    drive = Drive()
    first = offloaded(drive, NODE * 3 // 4, 2 * GIB)
    assert free(drive) == NODE - 2 * GIB - arena(drive, first)
    drive.start(drive.submit(job_of(1, NODE * 3 // 4)))


def test_unmeasured_memory_and_more_than_is_claimed_is_kept_as_claimed() -> None:
    for kept in (0, NODE):
        drive = Drive()
        number = offloaded(drive, NODE // 2, kept)
        assert free(drive) == NODE - NODE // 2 - arena(drive, number)


def test_the_kept_memory_stands_while_a_gang_rests_despite_later_reports_and_a_restart() -> None:
    drive = Drive()
    number = offloaded(drive, NODE // 2, 2 * GIB)
    left = free(drive)
    for kept in (8 * GIB, 0, GIB):
        rests(drive, number, kept)
        assert free(drive) == left
    elements = list(drive.state.take_changes().puts.values())
    drive.state = restored(drive.state.settings, elements, drive.now)
    assert drive.state.rows["n1"].free_memory_bytes == left


def test_a_resume_waits_only_until_its_memory_is_free() -> None:
    drive = Drive()
    other = running(drive, GIB)
    first = running(drive, NODE * 3 // 4)
    drive.step(CancelJob(other))
    drive.seen_without("n1", other)
    drive.step(SuspendJob(first, OFFLOAD))
    rests(drive, first, 2 * GIB)
    # On the device that became free, so that it is memory alone that is lacking.
    second = running(drive, NODE // 2)
    drive.step(ResumeJob(first))
    gang = drive.state.gangs[drive.job(first).epoch]
    assert resumed_in_place(drive.state.view, drive.job(first).shape, gang.parked_claims) is None
    answer = drive.request(first, gang.claims)
    assert isinstance(answer, Rejected)
    assert answer.refusals[0].reason is Reason.MEMORY
    drive.step(CancelJob(second))
    drive.seen_without("n1", second)
    assert resumed_in_place(drive.state.view, drive.job(first).shape, gang.parked_claims)
    assert isinstance(drive.request(first, gang.claims), Approved)
    assert drive.job(first).state is JobState.HOLDING
    assert free(drive) == NODE - NODE * 3 // 4 - arena(drive, first)


def test_a_plan_resumes_only_what_finds_its_memory() -> None:
    drive = Drive()
    first = running(drive, NODE * 3 // 4)
    plan = [SuspendChange(first, drive.job(first).revision, level=OFFLOAD)]
    drive.step(ProposePlan(tuple(plan)))
    rests(drive, first, 2 * GIB)
    second = running(drive, NODE // 2)
    back = ResumeChange(first, drive.job(first).revision)
    for has_room in (False, True):
        drive.step(ProposePlan((replace(back, revision=drive.job(first).revision),)))
        gang = drive.state.gangs[drive.job(first).epoch]
        assert (gang.park_level is SuspendLevel.NONE) is has_room
        drive.step(CancelJob(second))
        drive.seen_without("n1", second)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "offload", "resume", "end"]), st.integers(0, 7), st.integers(1, 48)),
        max_size=25,
    )
)
def test_memory_is_never_given_twice_under_any_sequence_of_suspends_resumes_and_ends(
    deeds: list[tuple[str, int, int]],
) -> None:
    """`Drive` checks after each step that what is held fits into the node."""
    drive = Drive()
    kept: dict[int, int] = {}
    for deed, which, gibibytes in deeds:
        alive = [number for number, job in drive.state.jobs.items() if not job.state.is_finished]
        number = alive[which % len(alive)] if alive else 0
        if deed == "begin":
            number = drive.submit(job_of(1, gibibytes * GIB))
            answer = drive.request(number, *drive.places(number))
            if isinstance(answer, Approved):
                drive.seen(number, drive.job(number).epoch, ObservedPhase.RUNNING)
        elif not number or not drive.job(number).epoch:
            continue
        elif deed == "offload" and drive.job(number).state is JobState.HOLDING:
            drive.step(SuspendJob(number, OFFLOAD))
            kept[number] = gibibytes * GIB // 4
            rests(drive, number, kept[number])
        elif deed == "resume" and drive.job(number).state is JobState.SUSPENDED:
            drive.step(ResumeJob(number))
            gang = drive.state.gangs[drive.job(number).epoch]
            if isinstance(drive.request(number, gang.claims), Approved):
                drive.seen(number, gang.epoch, ObservedPhase.RUNNING)
        elif deed == "end":
            drive.step(CancelJob(number))
            drive.seen_without("n1", number)
    held = sum(
        claim.arena_bytes + (min(kept[gang.job], claim.memory_bytes) if not claim.device_mask else claim.memory_bytes)
        for gang in drive.state.gangs.values()
        for claim in [piece.held for piece in gang.pieces if piece.held is not None]
    )
    assert free(drive) == NODE - held
