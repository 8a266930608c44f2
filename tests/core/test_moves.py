"""A move is committed exactly where the source stopped, or not at all."""

from __future__ import annotations

import pytest
from core.drive import GIB, Drive, job_of
from ganger.protocol.gang_orders import Mechanism
from ganger_master.core.answers import Approved, JobAnswer, Refused, Rejected
from ganger_master.core.commands import MoveJob, ResumeJob, SuspendJob
from ganger_master.core.gang_model import GangIntent, GangPhase, ObservedPhase, Outcome, OutcomeKind
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_spec import JobSpec
from msgspec.structs import replace


def handed_over(step: int, spec: JobSpec | None = None) -> tuple[Drive, int, int]:
    """A move whose source rests at a step; the job's number and the destination's epoch."""
    drive = Drive(2)
    number = drive.submit(spec or job_of(2))
    source = drive.start(number)
    drive.runs(number)
    assert drive.step(MoveJob(number)) == JobAnswer(number)
    destination = drive.job(number).next_epoch
    drive.seen(number, destination, ObservedPhase.PREPARED)
    assert drive.state.gangs[source].intent is GangIntent.HAND_OVER
    drive.seen(number, source, ObservedPhase.PARKED, step)
    return drive, number, destination


def test_a_move_is_committed_where_the_source_stopped() -> None:
    drive, number, destination = handed_over(40)
    drive.seen(number, destination, ObservedPhase.READY, 40)
    assert drive.job(number).epoch == destination
    assert drive.state.gangs[destination].intent is GangIntent.RUN


@pytest.mark.parametrize("step", [39, 41])
def test_a_destination_with_the_state_of_another_step_is_given_up_and_the_source_goes_on(step: int) -> None:
    drive, number, destination = handed_over(40)
    source = drive.job(number).epoch
    drive.seen(number, destination, ObservedPhase.READY, step)
    assert drive.job(number).epoch == source
    assert drive.job(number).next_epoch == 0
    assert drive.state.gangs[source].intent is GangIntent.RUN
    assert drive.state.gangs[destination].intent is GangIntent.STOP


def test_a_destination_without_a_reported_step_is_waited_for() -> None:
    drive, number, destination = handed_over(40)
    drive.seen(number, destination, ObservedPhase.READY)
    assert drive.job(number).next_epoch == destination
    drive.seen(number, destination, ObservedPhase.READY, 40)
    assert drive.job(number).epoch == destination


def test_the_ready_destination_waits_for_a_source_that_still_runs() -> None:
    drive = Drive(2)
    number = drive.submit(job_of(2))
    source = drive.start(number)
    drive.runs(number)
    drive.step(MoveJob(number))
    destination = drive.job(number).next_epoch
    drive.seen(number, destination, ObservedPhase.READY, 40)
    assert drive.job(number).epoch == source
    assert drive.state.gangs[source].phase is GangPhase.MOVING


def test_a_move_back_is_refused_with_the_reason_until_the_old_gang_has_left() -> None:
    drive, number, destination = handed_over(40, job_of(4))
    source = drive.job(number).epoch
    (home,), (away,) = drive.state.gangs[source].nodes, drive.state.gangs[destination].nodes
    drive.seen(number, destination, ObservedPhase.READY, 40)
    drive.seen(number, destination, ObservedPhase.RUNNING)
    for nodes in ((), (home,)):
        answer = drive.step(MoveJob(number, nodes))
        assert isinstance(answer, Refused)
        assert answer.reason == "MOVE_REFUSED"
        assert f"what jobs/{number} was moved from is still leaving nodes/{home}: move it again" in answer.message
    refused = drive.step(MoveJob(number, (away,)))
    assert isinstance(refused, Refused)
    assert "leaving" not in refused.message, "there it is the job itself that is in the way"
    drive.seen(number, source, ObservedPhase.ENDED)
    assert drive.step(MoveJob(number, (home,))) == JobAnswer(number)


def test_a_job_goes_on_to_a_free_place_while_what_it_came_from_is_still_leaving() -> None:
    drive = Drive(3)
    number = drive.submit(job_of(4))
    source = drive.start(number)
    drive.runs(number)
    drive.step(MoveJob(number))
    destination = drive.job(number).next_epoch
    drive.seen(number, destination, ObservedPhase.PREPARED)
    drive.seen(number, source, ObservedPhase.PARKED, 40)
    drive.seen(number, destination, ObservedPhase.READY, 40)
    drive.seen(number, destination, ObservedPhase.RUNNING)
    assert drive.state.gangs[source].intent is GangIntent.STOP
    assert drive.step(MoveJob(number)) == JobAnswer(number)
    third = drive.state.gangs[drive.job(number).next_epoch]
    assert not set(third.nodes) & {*drive.state.gangs[source].nodes, *drive.state.gangs[destination].nodes}


@pytest.mark.parametrize(("gib", "fits"), [(10, True), (20, False)])
def test_a_copy_that_was_moved_away_from_counts_beside_the_gang_that_starts_from_it_again(gib: int, fits: bool) -> None:
    drive, number, destination = handed_over(40, job_of(2, memory=gib * GIB))
    copy = drive.job(number).epoch
    drive.seen(number, destination, ObservedPhase.READY, 40)
    # its user wants it to rest, and the node it has just moved to dies: what is left is the copy it came from
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    outcome = Outcome(OutcomeKind.UNKNOWN)
    gone = drive.report(drive.state.gangs[destination], ObservedPhase.ENDED)
    node = drive.state.gangs[destination].nodes[0]
    drive.observe(node, replace(gone, outcome=outcome))
    drive.seen(number, copy, ObservedPhase.PARKED, 40)
    assert drive.job(number).suspended_level is SuspendLevel.OFFLOAD
    drive.step(ResumeJob(number))
    # the copy may never run: even in its own place the job is a new gang, which needs memory of its own
    answer = drive.request(number, drive.state.gangs[copy].claims)
    assert isinstance(answer, Approved if fits else Rejected), answer


def test_a_move_of_a_suspended_job_is_refused_with_the_advice_to_resume_it_first() -> None:
    drive = Drive(2)
    number = drive.submit(job_of(2))
    drive.start(number)
    drive.runs(number)
    drive.step(SuspendJob(number))
    answer = drive.step(MoveJob(number))
    assert isinstance(answer, Refused)
    assert (answer.reason, answer.message.endswith("; resume it first")) == ("NOT_RUNNING", True)


def test_a_move_of_a_job_that_starts_again_is_refused_because_it_has_not_reached_a_boundary() -> None:
    drive = Drive(2)
    number = drive.submit(job_of(2))
    drive.start(number)
    answer = drive.step(MoveJob(number))
    assert isinstance(answer, Refused)
    assert answer.reason == "NOT_RUNNING"
    assert "has not reached its first boundary yet: it is starting; try again once it runs" in answer.message


@pytest.mark.parametrize(
    ("capabilities", "why"),
    [
        ({"image": "criu 4.2", "processor": "x86_64 avx avx2"}, "its processor lacks avx512f"),
        ({"image": "none: no CRIU found"}, "no CRIU found"),
        ({"image": "criu 4.2", "processor": "x86_64 amx avx avx2 avx512f"}, ""),
        ({}, ""),
    ],
)
def test_an_image_is_moved_only_to_a_node_that_is_not_known_to_lack_what_it_needs(
    capabilities: dict[str, str], why: str
) -> None:
    drive = Drive(2)
    number = drive.submit(job_of(2))
    source = drive.start(number)
    drive.runs(number)
    job, state = drive.job(number), drive.state
    state.put_job(replace(job, capabilities=replace(job.capabilities, mechanism=Mechanism.IMAGE)))
    here = state.gangs[source].claims[0].node
    for name, node in list(state.nodes.items()):
        own = {"image": "criu 4.2", "processor": "x86_64 avx avx2 avx512f"}
        state.put_node(replace(node, capabilities=own if name == here else capabilities))
    answer = drive.step(MoveJob(number))
    if why:
        assert isinstance(answer, Refused)
        assert why in answer.message
    else:
        assert answer == JobAnswer(number)
