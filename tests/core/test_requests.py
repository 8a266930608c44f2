"""Gang requests: which are judged at all, and the checks that only the state allows."""

from __future__ import annotations

import pytest
from core.drive import GIB, SERVER, Drive, job_of
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Locality, LocalityLevel, Role, TaskShape
from ganger.job_state import JobState
from ganger_master.core.answers import Answer, Approved, Refused, Rejected, SessionAnswer
from ganger_master.core.commands import (
    CancelJob,
    CordonNode,
    MoveJob,
    Observe,
    OpenSession,
    RequestGang,
    ResumeJob,
    SuspendJob,
)
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.kept_places import kept_places_of
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace


def reason(answer: Answer) -> Reason:
    assert isinstance(answer, Rejected), answer
    return answer.refusals[0].reason


def parked(drive: Drive, gpus: int, memory: int = 4 * GIB) -> int:
    """A job that waits again, its state in host memory where it ran."""
    number = drive.submit(job_of(gpus, memory))
    epoch = drive.start(number)
    drive.runs(number)
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    drive.seen(number, epoch, ObservedPhase.PARKED, 7)
    drive.step(ResumeJob(number))
    assert drive.job(number).state is JobState.PENDING
    return number


def choosy_node(drive: Drive, name: str, user: str) -> None:
    """Its daemon runs everything as this user."""
    capabilities = {"switch_user": "no", "user": user}
    answer = drive.step(OpenSession(name, f"machine-{name}", SERVER, capabilities=capabilities))
    assert isinstance(answer, SessionAnswer)
    drive.sessions[name] = answer.session
    drive.step(Observe(name, answer.session, 1, 0, (), storage_proved=True))


def test_a_request_made_for_an_older_revision_is_refused() -> None:
    drive = Drive()
    number = parked(drive, 1)
    revision = drive.job(number).revision
    places = drive.places(number)
    for given in (revision - 1, revision + 1):
        assert reason(drive.step(RequestGang(number, given, places))) is Reason.STALE_REVISION
    assert isinstance(drive.step(RequestGang(number, revision, places)), Approved)


@pytest.mark.parametrize("is_running", [True, False])
def test_a_job_that_waits_for_no_gang_gets_none(is_running: bool) -> None:
    drive = Drive(2)
    number = drive.submit(job_of(1))
    drive.start(number)
    if not is_running:
        drive.runs(number)
        drive.step(SuspendJob(number, SuspendLevel.PAUSE))
    before = drive.state.rows
    assert reason(drive.request(number, *drive.places(number), turn=0)) is Reason.WRONG_STATE
    assert drive.state.rows == before


def test_a_turn_counts_for_its_own_job_while_it_lasts() -> None:
    drive = Drive(1)
    first, second = drive.submit(job_of(1)), drive.submit(job_of(1))
    turns = drive.state.leases.turn_of
    places = drive.places(first)
    assert reason(drive.request(first, *places, turn=turns[second])) is Reason.OUT_OF_TURN
    assert reason(drive.request(first, *places, turn=turns[second] + 9)) is Reason.OUT_OF_TURN
    drive.now += CoreSettings().turn_lease_s + 0.1
    assert reason(drive.request(first, *places, turn=turns[first])) is Reason.OUT_OF_TURN


def test_a_turn_lasts_for_three_conflicts_and_the_job_then_waits_for_news() -> None:
    drive = Drive(1)
    number = drive.submit(job_of(2))
    stale = drive.places(number)
    drive.start(drive.submit(job_of(4)))
    kept = []
    for _ in range(3):
        answer = drive.request(number, *stale)
        assert isinstance(answer, Rejected)
        kept.append(answer.turn_kept)
    assert kept == [True, True, False]
    assert number not in drive.state.leases.turn_of
    assert drive.state.queue.conflicts[number] == 3


def test_an_empty_candidate_is_no_request() -> None:
    drive = Drive()
    number = drive.submit(job_of(1))
    answer = drive.request(number, *drive.places(number), ())
    assert isinstance(answer, Refused)
    assert answer.reason == "REQUEST_INVALID"


def test_the_candidate_that_was_taken_is_named_by_its_place_in_the_request() -> None:
    drive = Drive(1)
    choosy_node(drive, "n2", "alice")
    number = drive.submit(job_of(4), "bob")
    on = {claims[0].node: claims for claims in drive.places(number)}
    answer = drive.request(number, on["n2"], on["n1"])
    assert isinstance(answer, Approved)
    assert answer.candidate == 1
    assert drive.state.gangs[answer.epoch].nodes == ("n1",)


def test_no_move_leads_to_a_node_that_may_not_run_the_job() -> None:
    drive = Drive(1)
    number = drive.submit(job_of(1), "bob")
    drive.start(number)
    drive.runs(number)
    choosy_node(drive, "n2", "alice")
    assert isinstance(drive.step(MoveJob(number, ("n2",))), Refused)
    assert not drive.job(number).next_epoch


def test_what_a_job_is_parked_on_is_its_own_only_for_just_that_place() -> None:
    drive = Drive(1)
    number = parked(drive, 1, 40 * GIB)
    claim = drive.state.gangs[drive.job(number).epoch].claims[0]
    # Beside the parked copy, which stays until it has moved, there is no room for another.
    other = replace(claim, device_mask=claim.device_mask << 1)
    assert reason(drive.request(number, (other,))) is Reason.MEMORY
    assert isinstance(drive.request(number, (claim,)), Approved)


def test_what_a_parked_job_holds_counts_once_against_its_quota() -> None:
    drive = Drive(1, CoreSettings(quota_devices={"": 2}))
    number = parked(drive, 2)
    answer = drive.request(number, drive.state.gangs[drive.job(number).epoch].claims)
    assert isinstance(answer, Approved)


def shape(gpus: int = 1, cores: int = 2, memory: int = 4) -> tuple[Role, ...]:
    return (Role("worker", gpus, TaskShape(1, cores * 1000, memory * GIB)),)


@pytest.mark.parametrize(
    ("roles", "lacks"),
    [(shape(4), Reason.GPUS), (shape(memory=62), Reason.MEMORY), (shape(cores=15), Reason.CORES)],
)
def test_no_job_passes_the_first_of_a_strict_queue_whatever_pieces_it_lacks(
    roles: tuple[Role, ...], lacks: Reason
) -> None:
    drive = Drive(1)
    drive.start(drive.submit(job_of(2)))
    first = drive.submit(replace(job_of(1), roles=roles))
    drive.request(first, blockers=True)
    assert drive.state.blockers_of(first)[0].reason is lacks
    behind = drive.submit(job_of(1))
    assert reason(drive.request(behind, *drive.places(behind))) is Reason.PROTECTED


def test_no_job_passes_the_first_of_a_strict_queue_while_its_node_is_out_of_service() -> None:
    drive = Drive(2)
    running = drive.submit(job_of(2))
    drive.start(running)
    (other,) = {"n1", "n2"} - set(drive.state.gangs[drive.job(running).epoch].nodes)
    drive.step(CordonNode(other, "repair"))
    first = drive.submit(replace(job_of(3), locality=Locality(widest=LocalityLevel.NODE)))
    drive.request(first, blockers=True)
    assert [one.reason for one in drive.state.blockers_of(first)] == [Reason.GPUS, Reason.NODE_UNAVAILABLE]
    behind = drive.submit(job_of(1))
    assert reason(drive.request(behind, *drive.places(behind))) is Reason.PROTECTED


def test_places_are_kept_for_the_first_few_and_follow_what_becomes_free() -> None:
    drive = Drive(2, CoreSettings(policy="backfill", protected_jobs=1))
    holders = [drive.submit(job_of(3)), drive.submit(job_of(3))]
    for number in holders:
        drive.start(number)
    whole = replace(job_of(4), locality=Locality(widest=LocalityLevel.NODE))
    large = [drive.submit(whole) for _ in range(2)]
    for number in large:
        drive.request(number, blockers=True)
    drive.now += CoreSettings().keep_place_after_s + 1

    def kept() -> list[tuple[str, tuple[str, ...]]]:
        return [(one.job, one.nodes) for one in kept_places_of(drive.state, [drive.job(n) for n in large], drive.now)]

    ((job, (node,)),) = kept()
    assert job == f"jobs/{large[0]}"
    (other,) = {"n1", "n2"} - {node}
    drive.step(CancelJob(next(n for n in holders if drive.state.gangs[drive.job(n).epoch].nodes == (other,))))
    drive.observe(other)
    drive.now += 1.0
    assert kept() == [(job, (other,))]
    drive.step(CancelJob(large[0]))
    assert kept() == [(f"jobs/{large[1]}", (other,))]
