"""A request out of turn ranks behind all jobs: it gets only what is kept for no job."""

from __future__ import annotations

from core.drive import Drive, job_of
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Locality, LocalityLevel
from ganger_master.core.answers import Approved, Rejected
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace


def blocked_large(policy: str) -> tuple[Drive, int]:
    """Two nodes; a job of 6 devices waits because one of 3 runs, long enough to be kept a place. A job behind it."""
    drive = Drive(2, CoreSettings(policy=policy))
    drive.start(drive.submit(job_of(3)))
    large = drive.submit(replace(job_of(6), priority=5))
    drive.request(large, blockers=True)
    drive.now += CoreSettings().keep_place_after_s + 1
    return drive, drive.submit(job_of(1))


def test_a_strict_queue_leaves_nothing_for_requests_out_of_turn_while_a_job_is_blocked() -> None:
    drive, small = blocked_large("fifo")
    answer = drive.request(small, *drive.places(small), turn=0)
    assert isinstance(answer, Rejected)
    assert answer.refusals[0].reason is Reason.PROTECTED


def test_pieces_that_are_kept_for_no_job_may_be_had_out_of_turn_and_others_may_not() -> None:
    drive = Drive(2, CoreSettings(policy="backfill"))
    # Gangs of different sizes live on different nodes: no node is free as a whole.
    drive.start(drive.submit(job_of(1)))
    drive.start(drive.submit(job_of(2)))
    large = drive.submit(replace(job_of(4), locality=Locality(widest=LocalityLevel.NODE), priority=5))
    drive.request(large, blockers=True)
    drive.now += CoreSettings().keep_place_after_s + 1
    approved = 0
    for number in [drive.submit(job_of(1)) for _ in range(6)]:
        answer = drive.request(number, *drive.places(number), turn=0)
        approved += isinstance(answer, Approved)
        assert isinstance(answer, Approved) or answer.refusals[0].reason is Reason.KEPT
    assert approved == 2
    assert sorted(row.free_mask.bit_count() for row in drive.state.rows.values()) == [0, 3]


def test_the_first_in_the_queue_may_not_take_out_of_turn_what_is_kept_for_one_behind_it() -> None:
    drive = Drive(1, CoreSettings(policy="fifo"))
    drive.start(drive.submit(job_of(3)))
    large = drive.submit(job_of(2))
    drive.request(large, blockers=True)
    first = drive.submit(replace(job_of(1), priority=9))
    answer = drive.request(first, *drive.places(first), turn=0)
    assert isinstance(answer, Rejected)
    assert isinstance(drive.request(first, *drive.places(first)), Approved)
