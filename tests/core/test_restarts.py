"""A job whose attempts fail one after the other is retried after growing delays."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from core.test_removed_nodes import restarted
from ganger.cluster.refusals import Reason
from ganger.job_state import JobState
from ganger_master.core.commands import Answer, CancelJob, DeclareLost, ResumeJob, SuspendJob, Tick
from ganger_master.core.ending import delay_after
from ganger_master.core.explain import explain
from ganger_master.core.gang_model import ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.machine import next_wake
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import image_of, state_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

EXIT = Outcome(OutcomeKind.FAILED, exit_code=1, message="rank 0 ended with exit code 1")


def failing(failures: int = 0, allowed: int = 9, ran: float = 0.0) -> tuple[Drive, int]:
    """A job on a node of its own, which has failed so often, each time soon; `ran`: but for the last."""
    drive = Drive(settings=CoreSettings(lost_after_s=None))
    number = drive.submit(replace(job_of(1), max_failures=allowed))
    for _ in range(failures - 1):
        fail(drive, number)
        tick_until_tried(drive, number)
    if failures:
        fail(drive, number, ran)
    return drive, number


def fail(drive: Drive, number: int, ran: float = 0.0) -> None:
    epoch = drive.start(number)
    drive.runs(number)
    drive.now += ran
    report = drive.report(drive.state.gangs[epoch], ObservedPhase.ENDED)
    drive.observe("n1", replace(report, outcome=EXIT))


def tick_until_tried(drive: Drive, number: int) -> float:
    """Return the seconds until a place is sought for the job."""
    began = drive.now
    while not drive.job(number).is_waiting:
        wake = next_wake(drive.state, drive.now)
        assert wake is not None
        drive.now = max(drive.now, wake)
        drive.step(Tick())
    # Its node was there all the while.
    drive.step(Answer("n1", drive.sessions["n1"], 0))
    return drive.now - began


def test_the_first_failure_costs_no_time_and_each_further_one_twice_the_last() -> None:
    drive, number = failing()
    waited = []
    for _ in range(9):
        fail(drive, number)
        assert drive.job(number).state is JobState.PENDING
        waited.append(round(tick_until_tried(drive, number)))
    assert waited == [0, 10, 20, 40, 80, 160, 300, 300, 300]
    fail(drive, number)
    assert drive.job(number).state is JobState.FAILED


def test_each_start_of_a_job_receives_the_number_of_its_attempt() -> None:
    drive, number = failing()
    attempts = []
    for _ in range(3):
        epoch = drive.start(number)
        attempts += [gang.attempt for gang in drive.state.desired.of("n1").gangs if gang.epoch == epoch]
        drive.runs(number)
        report = drive.report(drive.state.gangs[epoch], ObservedPhase.ENDED)
        drive.observe("n1", replace(report, outcome=EXIT))
        tick_until_tried(drive, number)
    assert attempts == [1, 2, 3]


def test_a_job_without_retries_fails_at_once() -> None:
    drive, number = failing(failures=1, allowed=0)
    assert drive.job(number).state is JobState.FAILED


def test_an_attempt_that_ran_for_long_begins_anew() -> None:
    drive, number = failing(failures=4, ran=600.0)
    assert drive.job(number).is_waiting
    fail(drive, number)
    assert round(tick_until_tried(drive, number)) == 10


def test_why_says_how_often_it_failed_and_when_it_is_tried_again() -> None:
    drive, number = failing(failures=3)
    drive.now += 5.0
    found = explain(drive.state, number, drive.now)
    (blocker,) = found.blockers
    assert blocker.reason is Reason.FAILING
    assert blocker.message == (
        "its last 3 attempts failed (rank 0 ended with exit code 1), so it is tried again 20 s after the last"
    )
    assert found.assumption == "unknown, because it is tried again in 15 s, and then has to find a place"
    tick_until_tried(drive, number)
    assert all(one.reason is not Reason.FAILING for one in explain(drive.state, number, drive.now).blockers)


def test_suspending_and_resuming_a_job_ends_its_backoff() -> None:
    drive, number = failing(failures=5)
    drive.step(SuspendJob(number))
    assert drive.job(number).state is JobState.SUSPENDED
    assert not drive.state.jobs.backing_off
    drive.step(ResumeJob(number))
    assert drive.job(number).is_waiting


def test_a_cancelled_job_in_backoff_ends() -> None:
    drive, number = failing(failures=5)
    drive.step(CancelJob(number))
    assert drive.job(number).state is JobState.CANCELLED
    assert not drive.state.jobs.backing_off


def test_it_is_tried_at_the_same_time_by_a_master_that_was_restarted() -> None:
    drive, number = failing(failures=4)
    again_at = drive.job(number).again_at
    restarted(drive)
    assert not drive.job(number).is_waiting
    tick_until_tried(drive, number)
    assert again_at <= drive.now < again_at + 1.0


def test_an_image_of_the_state_keeps_when_it_is_tried() -> None:
    drive, number = failing(failures=4)
    drive.state.take_changes()
    drive.state = state_of(image_of(drive.state))
    assert list(drive.state.jobs.backing_off) == [number]
    assert round(tick_until_tried(drive, number)) == 40


def test_a_clock_that_is_set_back_prolongs_no_backoff() -> None:
    drive, number = failing(failures=4)
    drive.now -= 3_600.0
    drive.step(Tick())
    assert drive.job(number).is_waiting


def test_a_clock_that_is_seen_to_be_set_leaves_it_as_long_to_wait() -> None:
    drive, number = failing(failures=4)
    left = drive.job(number).again_at - drive.now
    drive.now -= 3_600.0
    drive.step(Tick(set_by=-3_600.0))
    assert drive.job(number).again_at - drive.now == pytest.approx(left, abs=0.1)


def test_a_lost_node_is_no_failure_of_the_job() -> None:
    drive, number = failing(failures=3)
    tick_until_tried(drive, number)
    drive.start(number)
    drive.runs(number)
    drive.now += drive.state.settings.session_alive_s
    drive.step(DeclareLost("n1"))
    job = drive.job(number)
    assert (job.state, job.failed_in_row) == (JobState.PENDING, 3)
    assert job.is_waiting


@given(st.integers(0, 1_000), st.floats(0.1, 100.0), st.floats(0.0, 1e4))
def test_delays_never_fall_and_have_an_end(failed: int, delay: float, most: float) -> None:
    settings = CoreSettings(restart_delay_s=delay, restart_delay_most_s=most)
    now, later = delay_after(settings, failed), delay_after(settings, failed + 1)
    assert 0.0 <= now <= later <= most


def test_without_a_delay_no_job_waits() -> None:
    assert delay_after(CoreSettings(restart_delay_s=0.0), 7) == 0.0
