"""Updates of submitted jobs: what may change, when, and what follows at once."""

from __future__ import annotations

from typing import Any

import pytest
from core.drive import GIB, SERVER, Drive, job_of
from core.test_time_slices import Turns
from faultsim.state_invariants import violations
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Locality, LocalityLevel, Role, TaskShape
from ganger.job_state import JobState
from ganger_master.core.answers import JobAnswer, Refused, Rejected, UpdateAnswer
from ganger_master.core.commands import (
    CancelJob,
    RequestGang,
    ResumeJob,
    RetuneJob,
    SubmitArray,
    SubmitJob,
    SuspendJob,
    Tick,
    UpdateArray,
    UpdateJob,
)
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import JobRecord, SuspendLevel
from ganger_master.core.job_spec import Update
from ganger_master.core.machine import next_wake
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import image_of, restored, state_of
from ganger_master.store.tables import Codec
from hypothesis import given
from hypothesis import strategies as st
from kit.memory_store import MemoryStore
from msgspec.structs import replace


def update(drive: Drive, number: int, request_id: str = "", **changes: Any) -> str:
    """The reason of a refusal, or nothing."""
    answer = drive.step(UpdateJob(number, Update(**changes), request_id, "ann"))
    return answer.reason if isinstance(answer, Refused) else ""


def refusal(drive: Drive, number: int, **changes: Any) -> Refused:
    before = drive.job(number)
    answer = drive.step(UpdateJob(number, Update(**changes)))
    assert isinstance(answer, Refused), answer
    assert drive.job(number) is before
    return answer


def waiting(drive: Drive) -> int:
    return drive.submit(job_of(1))


def running(drive: Drive) -> int:
    number = waiting(drive)
    drive.start(number)
    drive.runs(number)
    return number


def starting(drive: Drive) -> int:
    number = waiting(drive)
    drive.start(number)
    return number


def suspended(drive: Drive) -> int:
    number = running(drive)
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, 7)
    return number


def waiting_again(drive: Drive) -> int:
    number = suspended(drive)
    drive.step(ResumeJob(number))
    assert drive.job(number).state is JobState.PENDING
    return number


def suspended_before_its_start(drive: Drive) -> int:
    number = waiting(drive)
    drive.step(SuspendJob(number))
    return number


def cancelled(drive: Drive) -> int:
    number = waiting(drive)
    drive.step(CancelJob(number))
    return number


def ending(drive: Drive) -> int:
    number = running(drive)
    drive.step(CancelJob(number))
    return number


NEVER_STARTED = (waiting, suspended_before_its_start)
STARTED = (starting, running, suspended, waiting_again)
ENDED = (cancelled, ending)
ALWAYS: tuple[dict[str, Any], ...] = ({"display_name": "b"}, {"priority": 5}, {"time_limit_s": 60.0})
WISHES: tuple[dict[str, Any], ...] = (
    {"device_type": "virtual"},
    {"locality": Locality(LocalityLevel.NODE)},
    {"memory_bytes": GIB},
    {"millicores_per_gpu": 1_000},
)


@pytest.mark.parametrize("of", [*NEVER_STARTED, *STARTED, *ENDED])
@pytest.mark.parametrize("change", [*ALWAYS, *WISHES], ids=lambda change: next(iter(change)))
def test_priority_time_and_name_can_be_changed_until_the_end_all_else_until_the_first_start(
    of: Any, change: dict[str, Any]
) -> None:
    drive = Drive(2)
    number = of(drive)
    expected = "JOB_FINISHED" if of in ENDED else "UPDATE_REFUSED" if of in STARTED and change in WISHES else ""
    before = drive.job(number)
    assert update(drive, number, **change) == expected
    assert (drive.job(number).spec == before.spec) == bool(expected)
    assert drive.job(number).revision == before.revision + (not expected)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"display_name": "b"}, "name none -> b"),
        ({"priority": 5}, "priority 0 -> 5"),
        ({"time_limit_s": 7_200.0}, "time limit none -> 2h"),
        ({"device_type": "virtual"}, "GPU type any -> virtual"),
        ({"locality": Locality(LocalityLevel.NODE)}, "locality any -> node"),
        (
            {"locality": Locality(LocalityLevel.NODE, LocalityLevel.SOCKET, 60.0)},
            "locality any -> socket for 1m, then node",
        ),
        ({"memory_bytes": 8 * GIB}, "memory of a task 4G -> 8G"),
        ({"millicores_per_gpu": 0}, "cores of a task 2 -> a share"),
        ({"priority": -3, "display_name": "c"}, "name none -> c, priority 0 -> -3"),
    ],
)
def test_the_history_names_the_user_and_what_changed(change: dict[str, Any], told: str) -> None:
    drive = Drive()
    assert update(drive, waiting(drive), **change) == ""
    entry = drive.history[-1]
    assert (entry.subject, entry.kind, entry.cause, entry.message) == ("jobs/1", "job_updated", "user:ann", told)


def test_what_changes_nothing_leaves_no_trace() -> None:
    drive = Drive()
    number = running(drive)
    before, told = drive.job(number), len(drive.history)
    assert update(drive, number, priority=0, memory_bytes=4 * GIB) == ""
    assert drive.job(number) is before
    assert len(drive.history) == told


def test_all_violations_are_reported_at_once_with_their_place_in_the_request() -> None:
    drive = Drive()
    answer = refusal(
        drive,
        waiting(drive),
        display_name="x" * 64,
        priority=1_001,
        time_limit_s=-1.0,
        device_type="a\n",
        locality=Locality(LocalityLevel.NODE, LocalityLevel.RACK),
        memory_bytes=1 << 51,
        millicores_per_gpu=1 << 30,
    )
    assert answer.reason == "SPEC_INVALID"
    assert {path for path, _ in answer.violations} == {
        "update.display_name",
        "update.priority",
        "update.time_limit",
        "update.device_type",
        "update.locality.wish",
        "update.memory_bytes",
        "update.millicores_per_gpu",
    }


def test_an_update_of_nothing_and_one_of_several_roles_are_wrong() -> None:
    drive = Drive()
    roles = (Role("worker", 1, TaskShape(1)), Role("server", 1, TaskShape(0, 1_000)))
    number = drive.submit(replace(job_of(1), roles=roles))
    assert refusal(drive, number).violations == (("update", "must say what to change"),)
    answer = refusal(drive, number, memory_bytes=GIB, millicores_per_gpu=1_000)
    assert [path for path, _ in answer.violations] == ["update.memory_bytes", "update.millicores_per_gpu"]
    without = drive.submit(replace(job_of(1), roles=(Role("worker", 1, TaskShape(0, 1_000)),)))
    assert refusal(drive, without, millicores_per_gpu=1_000).reason == "SPEC_INVALID"


def test_a_gang_that_could_never_fit_is_refused_with_the_largest_that_would() -> None:
    drive = Drive(1)
    number = drive.submit(job_of(4))
    answer = refusal(drive, number, memory_bytes=40 * GIB)
    assert answer.reason == "GANG_IMPOSSIBLE"
    same = drive.step(SubmitJob(replace(job_of(4), roles=(Role("worker", 4, TaskShape(1, 2_000, 40 * GIB)),)), "uid"))
    assert isinstance(same, Refused)
    assert (answer.message, answer.metadata) == (same.message, same.metadata)
    assert update(drive, number, memory_bytes=8 * GIB) == ""


def test_the_refusal_names_what_stays_and_what_to_do() -> None:
    drive = Drive()
    answer = refusal(drive, running(drive), priority=5, memory_bytes=GIB, device_type="virtual")
    assert answer.message == (
        "jobs/1 has started: its priority, time limit and name can be changed, not its GPU type and its memory of a "
        "task: cancel it and submit it again"
    )


# the queue


def test_a_job_that_waits_stands_at_once_where_its_new_priority_puts_it() -> None:
    drive = Drive(1)
    host = drive.submit(job_of(4))
    drive.start(host)
    first, second = drive.submit(job_of(4)), drive.submit(job_of(4))
    # The first was refused: room is kept for it.
    drive.request(first, blockers=True)
    assert (drive.state.queue_rank(first), drive.state.queue_rank(second)) == (1, 2)
    assert update(drive, second, priority=1) == ""
    assert (drive.state.queue_rank(first), drive.state.queue_rank(second)) == (2, 1)
    assert second in drive.state.leases.turn_of, "and is asked at once"
    assert update(drive, second, priority=-1) == ""
    assert (drive.state.queue_rank(first), drive.state.queue_rank(second)) == (1, 2)


def test_refusals_and_leases_from_before_an_update_are_void() -> None:
    drive = Drive(1)
    number = drive.submit(job_of(4))
    places, turn, revision = drive.places(number), drive.state.leases.turn_of[number], drive.job(number).revision
    drive.request(number, blockers=True)
    drive.state.note_refusals(number, drive.state.blockers_of(number))
    assert update(drive, number, memory_bytes=8 * GIB) == ""
    assert drive.state.blockers_of(number) == ()
    stale = drive.step(RequestGang(number, revision, places, turn))
    assert isinstance(stale, Rejected)
    assert stale.refusals[0].reason is Reason.STALE_REVISION
    drive.start(number)
    assert sum(claim.memory_bytes for claim in drive.state.gangs[drive.job(number).epoch].claims) == 32 * GIB


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from((*ALWAYS, *WISHES)), st.integers(-2, 2))))
def test_the_queue_stays_consistent_under_updates_of_any_jobs_in_any_order(
    changes: list[tuple[int, dict[str, Any], int]],
) -> None:
    drive = Drive(1)
    numbers = [drive.submit(job_of(gpus)) for gpus in (1, 4, 2, 4, 1, 3)]
    drive.start(numbers[0])
    for place, change, priority in changes:
        # Each step looks at what must hold.
        update(drive, numbers[place], **{**change, "priority": priority})
        drive.request(numbers[-place], blockers=True)
    waits = [number for number in numbers if drive.job(number).is_waiting]
    assert list(drive.state.queue.waiting) == sorted(waits, key=lambda one: (-drive.job(one).spec.priority, one))


# time

# However long its daemons do not call.
UNWATCHED = CoreSettings(lost_after_s=None, silent_margin_s=None)


def limited(drive: Drive, seconds: float = 1_000.0) -> int:
    number = drive.submit(replace(job_of(1), time_limit_s=seconds))
    drive.start(number)
    drive.runs(number)
    return number


def passes(drive: Drive, seconds: float) -> None:
    drive.now += seconds
    drive.step(Tick())


def test_a_limit_that_is_raised_while_it_runs_counts_from_where_it_counts() -> None:
    drive = Drive(settings=UNWATCHED)
    number = limited(drive)
    passes(drive, 900.0)
    assert update(drive, number, time_limit_s=2_000.0) == ""
    wake = next_wake(drive.state, drive.now)
    assert wake is not None
    assert wake == pytest.approx(drive.job(number).running_since + 2_000.0)
    passes(drive, 1_000.0)
    assert drive.job(number).ending is None
    passes(drive, 200.0)
    assert drive.job(number).ending is JobState.FAILED


def test_a_limit_below_what_it_has_run_ends_it_as_one_that_it_comes_to() -> None:
    drive = Drive(settings=UNWATCHED)
    number = limited(drive)
    passes(drive, 900.0)
    drive.step(UpdateJob(number, Update(time_limit_s=600.0), may_end=True))
    passes(drive, 0.0)
    job = drive.job(number)
    assert job.ending is JobState.FAILED
    assert job.failure is not None
    assert (job.failure.reason, job.failure.message) == ("TIME_LIMIT", "ran for its time limit of 600 s")


@pytest.mark.parametrize("is_given", [True, False])
def test_a_time_limit_is_given_to_a_job_without_one_and_taken_away(is_given: bool) -> None:
    drive = Drive(settings=UNWATCHED)
    number = running(drive) if is_given else limited(drive)
    assert update(drive, number, time_limit_s=100.0 if is_given else 0.0) == ""
    assert drive.job(number).spec.time_limit_s == (100.0 if is_given else None)
    passes(drive, 5_000.0)
    assert (drive.job(number).ending is JobState.FAILED) == is_given


def test_a_time_sliced_job_keeps_its_priority_and_gets_no_time_limit() -> None:
    drive = Turns()
    host, guest = drive.share()
    for number in (host, guest):
        for change in ({"priority": 5}, {"time_limit_s": 60.0}):
            assert refusal(drive, number, **change).reason == "UPDATE_REFUSED"
        assert update(drive, number, display_name="b") == ""
    drive.step(SuspendJob(guest, SuspendLevel.OFFLOAD))
    drive.seen(guest, drive.job(guest).epoch, ObservedPhase.PARKED, 7)
    assert update(drive, guest, priority=5) == ""


# once, and lasting


def test_a_request_that_is_repeated_changes_nothing_a_second_time() -> None:
    drive = Drive()
    number = waiting(drive)
    assert update(drive, number, "r", priority=5) == ""
    assert update(drive, number, "s", priority=3) == ""
    after = drive.job(number)
    assert update(drive, number, "r", priority=5) == ""
    assert drive.job(number) is after
    assert update(drive, number, "r", priority=6) == "REQUEST_REUSED"
    drive.step(CancelJob(number))
    assert update(drive, number, "s", priority=3) == "", "it was done before the job ended"
    assert update(drive, number, "t", priority=3) == "JOB_FINISHED"


def test_a_submission_that_is_repeated_is_the_same_job_though_it_was_updated() -> None:
    drive = Drive()
    submission = SubmitJob(replace(job_of(2), priority=1), "uid", "ann", "nightly")
    first = drive.step(submission)
    assert isinstance(first, JobAnswer)
    update(drive, first.number, priority=5, memory_bytes=GIB)
    update(drive, first.number, display_name="b", time_limit_s=60.0)
    assert drive.step(submission) == first
    answer = drive.step(replace(submission, spec=drive.job(first.number).spec))
    assert isinstance(answer, Refused)
    assert answer.reason == "REQUEST_REUSED"


def test_a_restarted_master_has_the_updates_and_their_request_ids() -> None:
    drive = Drive()
    number, other = running(drive), drive.submit(job_of(1))
    store, codec = MemoryStore(), Codec()
    batches = [codec.batch(drive.state.take_changes().puts, (), ())]
    update(drive, other, "r", priority=5, locality=Locality(LocalityLevel.NODE, LocalityLevel.SOCKET, 1.0))
    update(drive, number, time_limit_s=100.0)
    batches.append(codec.batch(drive.state.take_changes().puts, (), ()))
    for batch in batches:
        store.commit(batch)
    fresh = restored(drive.state.settings, Codec().elements(store.load()), drive.now)
    assert [fresh.jobs[one] for one in (number, other)] == [drive.job(one) for one in (number, other)]
    assert list(fresh.jobs.running_limited) == [number]
    drive.state = fresh
    assert update(drive, other, "r", priority=5, locality=Locality(LocalityLevel.NODE, LocalityLevel.SOCKET, 1.0)) == ""
    assert drive.job(other).revision == 2


def test_a_recording_that_begins_after_an_update_goes_on_as_the_master_does() -> None:
    drive = Drive(1)
    number = starting(drive)
    other = drive.submit(job_of(4))
    update(drive, number, display_name="b", priority=3)
    update(drive, other, priority=2)
    image = image_of(drive.state)
    again = state_of(image)
    assert violations(again) == []
    assert image_of(again) == image
    for one in (drive.state, again):
        assert [gang.spec and gang.spec.display_name for gang in one.desired.of("n1").gangs] == ["b"]


# arrays


def array(drive: Drive, size: int = 3, at_once: int = 0) -> list[JobRecord]:
    members = tuple((index, {"lr": str(index)}) for index in range(size))
    uids = tuple(f"m{index}" for index in range(size))
    drive.step(SubmitArray(job_of(1), members, uids, at_once, None, "ann", "nightly"))
    return [drive.job(number) for number in range(2, 2 + size)]


def test_an_array_update_changes_every_unfinished_member_and_names_those_that_cannot_change() -> None:
    drive = Drive()
    first, second, third = (job.number for job in array(drive))
    drive.step(CancelJob(first))
    drive.start(second)
    drive.runs(second)
    assert drive.step(UpdateArray(1, Update(priority=5))) == UpdateAnswer(1, 2, ())
    assert [drive.job(one).spec.priority for one in (first, second, third)] == [0, 5, 5]
    answer = drive.step(UpdateArray(1, Update(priority=6, memory_bytes=GIB), "r", "ann"))
    assert isinstance(answer, UpdateAnswer)
    assert (answer.updated, [(one, why.reason) for one, why in answer.refused]) == (1, [(second, "UPDATE_REFUSED")])
    assert [drive.job(one).spec.priority for one in (first, second, third)] == [0, 5, 6], "all of it or nothing"
    assert [entry.kind for entry in drive.history if entry.subject == "arrays/1"][-1] == "array_updated"
    told = drive.history[-1]
    assert (told.message, told.figures) == ("priority 5 -> 6, memory of a task 4G -> 1G", {"members": "1"})


def test_members_that_are_held_are_updated_and_a_repeated_submission_is_the_same_array() -> None:
    drive = Drive()
    array(drive, at_once=1)
    assert drive.step(UpdateArray(1, Update(display_name="b", priority=1))) == UpdateAnswer(1, 3, ())
    assert all(drive.job(number).held == (number > 2) for number in (2, 3, 4))
    number = drive.state.counters.next_job
    array(drive, at_once=1)
    assert drive.state.counters.next_job == number


def test_what_is_wrong_or_impossible_refuses_the_update_of_an_array_as_a_whole() -> None:
    drive = Drive(1)
    first, *_ = array(drive)
    drive.start(first.number)
    for change, reason in (
        (Update(priority=5_000), "SPEC_INVALID"),
        (Update(memory_bytes=SERVER.memory_bytes + 1), "GANG_IMPOSSIBLE"),
    ):
        answer = drive.step(UpdateArray(1, change))
        assert isinstance(answer, Refused)
        assert answer.reason == reason
    assert not any(drive.job(number).updates for number in (2, 3, 4))


def test_an_array_that_has_ended_or_never_was_cannot_be_updated() -> None:
    drive = Drive()
    for number, reason in ((1, "ARRAY_NOT_FOUND"), (1, "JOB_FINISHED")):
        answer = drive.step(UpdateArray(number, Update(priority=1)))
        assert isinstance(answer, Refused)
        assert answer.reason == reason
        for job in array(drive):
            drive.step(CancelJob(job.number))


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_time_below_what_the_job_has_run_is_refused_unless_it_was_confirmed(is_suspended: bool) -> None:
    drive = Drive(settings=UNWATCHED)
    number = running(drive)
    passes(drive, 900.0)
    if is_suspended:
        drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
        drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, 7)
    refused = refusal(drive, number, time_limit_s=600.0)
    assert refused.reason == "UPDATE_ENDS_JOB"
    assert refused.message == (
        f"jobs/{number} has run for 15m, longer than the new time limit of 10m: the update would end it at once; "
        "confirm that (--yes, may_end) or give more"
    )
    assert (refused.metadata["job"], refused.metadata["jobs"], refused.metadata["limit"]) == ("jobs/1", "1", "600")
    assert update(drive, number, time_limit_s=1_200.0) == ""
    drive.step(UpdateJob(number, Update(time_limit_s=600.0), may_end=True))
    assert drive.job(number).spec.time_limit_s == 600.0


def test_an_update_that_would_end_members_of_an_array_is_refused_for_all_unless_it_was_confirmed() -> None:
    drive = Drive(settings=UNWATCHED)
    first, second, third = (job.number for job in array(drive))
    for number in (first, second):
        drive.start(number)
        drive.runs(number)
    passes(drive, 900.0)
    refused = drive.step(UpdateArray(1, Update(time_limit_s=600.0)))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.metadata["jobs"]) == ("UPDATE_ENDS_JOB", "2")
    assert refused.message.startswith("2 of the jobs of arrays/1, jobs/2 first of all, have run for 15m")
    assert [drive.job(one).spec.time_limit_s for one in (first, second, third)] == [None] * 3
    answer = drive.step(UpdateArray(1, Update(time_limit_s=600.0), may_end=True))
    assert answer == UpdateAnswer(1, 3, ())


def named_cores(drive: Drive, number: int) -> list[int]:
    return [role.shape.millicores for role in drive.job(number).spec.roles]


def test_a_job_names_the_cores_that_its_user_gave_it_while_it_ran() -> None:
    drive = Drive()
    number = running(drive)
    submitted = drive.job(number).spec
    assert drive.step(RetuneJob(number, 3_500, user="ann")) == JobAnswer(number)
    assert named_cores(drive, number) == [3_500]
    assert [entry.kind for entry in drive.history[-2:]] == ["job_updated", "cores_changed"]
    assert drive.job(number).submitted_spec == submitted, "a repeated submission is still recognised"
    held = drive.state.gangs[drive.job(number).epoch].claims
    assert drive.step(RetuneJob(number, 0, user="ann")) == JobAnswer(number)
    assert named_cores(drive, number) == [0]
    assert drive.state.gangs[drive.job(number).epoch].claims == held, "the scheduler decides when to change them"


def test_neither_cores_that_do_not_fit_nor_a_repin_change_what_a_job_names() -> None:
    drive = Drive()
    number = running(drive)
    before = named_cores(drive, number)
    assert isinstance(drive.step(RetuneJob(number, 1_000_000)), Refused)
    assert drive.step(RetuneJob(number, repin=True)) == JobAnswer(number)
    assert named_cores(drive, number) == before


def test_the_cores_of_a_job_without_gpus_cannot_be_left_to_the_scheduler() -> None:
    drive = Drive()
    number = drive.submit(replace(job_of(1), roles=(Role("worker", 2, TaskShape(0, 1_000, GIB)),)))
    drive.start(number)
    drive.runs(number)
    assert isinstance(drive.step(RetuneJob(number, 0)), Refused)
    assert drive.step(RetuneJob(number, 500)) == JobAnswer(number)
    assert named_cores(drive, number) == [500]
