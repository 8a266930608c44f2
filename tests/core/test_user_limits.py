"""Limits of each user on pending jobs and bytes of specs, and the limit on bytes of finished jobs."""

from __future__ import annotations

from core.drive import Drive, job_of
from ganger_master.core.answers import Answer, ArrayAnswer, JobAnswer, Refused
from ganger_master.core.commands import CancelJob, SubmitArray, SubmitJob, Tick
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored
from ganger_master.core.state_indexes import spec_bytes
from msgspec.structs import replace

FEW = CoreSettings(pending_jobs_per_user=3, spec_bytes_per_user=100_000)


def submit(drive: Drive, user: str, spec: JobSpec | None = None, *, limited: bool = True) -> Answer:
    uid = f"uid-{drive.state.counters.next_job}"
    return drive.step(SubmitJob(spec or job_of(1), uid, user, limited=limited))


def submit_array(drive: Drive, user: str, members: int) -> Answer:
    uids = tuple(f"uid-{user}-{number}" for number in range(members))
    given = tuple((index, {"lr": "0.1"}) for index in range(members))
    return drive.step(SubmitArray(job_of(1), given, uids, 0, None, user, "", limited=True))


def of_user(answer: Answer) -> str:
    """The message of a refusal for too much of one user."""
    assert isinstance(answer, Refused), answer
    assert answer.reason == "USER_LIMIT"
    return answer.message


def test_a_user_with_too_many_pending_jobs_is_refused_with_the_numbers_and_no_other_is() -> None:
    drive = Drive(settings=FEW)
    for _ in range(3):
        assert isinstance(submit(drive, "ann"), JobAnswer)
    said = of_user(submit(drive, "ann"))
    assert "has 3 pending jobs" in said
    assert "a user may have 3 (pending_jobs_per_user)" in said
    assert isinstance(submit(drive, "bob"), JobAnswer)
    assert isinstance(submit(drive, "ann", limited=False), JobAnswer), "an operator has no limit"


def test_jobs_that_start_or_end_make_room_for_others_of_their_user() -> None:
    drive = Drive(settings=FEW)
    numbers = [answer.number for answer in (submit(drive, "ann") for _ in range(3)) if isinstance(answer, JobAnswer)]
    drive.start(numbers[0])
    assert isinstance(submit(drive, "ann"), JobAnswer)
    of_user(submit(drive, "ann"))
    drive.step(CancelJob(numbers[1], "", "ann"))
    assert isinstance(submit(drive, "ann"), JobAnswer)


def test_all_members_of_an_array_count() -> None:
    drive = Drive(settings=FEW)
    assert "this submission has 4" in of_user(submit_array(drive, "ann", 4))
    assert isinstance(submit_array(drive, "ann", 3), ArrayAnswer)
    of_user(submit(drive, "ann"))


def test_the_bytes_of_what_a_user_submitted_are_bounded_until_the_jobs_have_ended() -> None:
    drive = Drive(settings=FEW)
    large = replace(job_of(1), environment={"A": "\N{GRINNING FACE}" * 15_000})
    first = submit(drive, "ann", large)
    assert isinstance(first, JobAnswer)
    said = of_user(submit(drive, "ann", large))
    assert f"take {spec_bytes(large)} bytes" in said
    assert "a user may have 100000 (spec_bytes_per_user)" in said
    drive.step(CancelJob(first.number, "", "ann"))
    assert isinstance(submit(drive, "ann", large), JobAnswer)


def test_what_users_have_is_the_same_after_a_restart() -> None:
    drive = Drive(settings=FEW)
    submit_array(drive, "ann", 3)
    submit(drive, "bob")
    elements = [*drive.state.nodes.values(), *drive.state.nodes.configuration_sets.values(), *drive.state.jobs.values()]
    again = restored(FEW, [drive.state.counters, *elements], drive.now)
    assert again.jobs.holdings.pending == drive.state.jobs.holdings.pending == {"ann": 3, "bob": 1}
    assert again.jobs.holdings.live_bytes == drive.state.jobs.holdings.live_bytes


def test_finished_jobs_are_forgotten_early_where_their_specs_take_too_much() -> None:
    drive = Drive(settings=CoreSettings(finished_bytes_limit=100_000))
    large = replace(job_of(1), environment={"A": "x" * 40_000})
    numbers = [
        answer.number for answer in (submit(drive, "ann", large) for _ in range(4)) if isinstance(answer, JobAnswer)
    ]
    for number in numbers:
        drive.step(CancelJob(number, "", "ann"))
    drive.step(Tick())
    assert list(drive.state.jobs.finished) == numbers[2:]
    assert drive.state.jobs.holdings.finished_bytes == 2 * spec_bytes(large)
