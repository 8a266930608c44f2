"""Where the planner ranks, a plan's start is a lease that suggests its place, which the job's scheduler requests."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim
from ganger_master.core import machine
from ganger_master.core.answers import Approved, ChangeAnswer, PlanAnswer, Rejected
from ganger_master.core.commands import ProposePlan, Tick
from ganger_master.core.explain import reported_blockers
from ganger_master.core.gang_model import Gang
from ganger_master.core.plan_changes import StartChange
from ganger_master.core.queue import GrantedLease
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace

POLICIES = ("ganger", "gandiva", "las2d", "tetris", "optimus", "synergy")
OWN = replace(job_of(1), scheduler="mine:Last")


def place(drive: Drive, number: int, node: str) -> tuple[Claim, ...]:
    """The first place of the job on that node."""
    return next(claims for claims in drive.places(number) if claims[0].node == node)


def propose(drive: Drive, starts: dict[int, tuple[Claim, ...]]) -> list[ChangeAnswer]:
    changes = [StartChange(number, drive.job(number).revision, claims) for number, claims in starts.items()]
    answer = drive.step(ProposePlan(tuple(changes)))
    assert isinstance(answer, PlanAnswer)
    return list(answer.verdicts)


def offer(drive: Drive, number: int) -> GrantedLease:
    """The lease that a plan's start on n1 comes to."""
    (verdict,) = propose(drive, {number: place(drive, number, "n1")})
    assert verdict.approved
    return drive.state.leases[drive.state.leases.turn_of[number]]


def gang_of(drive: Drive, number: int) -> Gang:
    return drive.state.gangs[drive.job(number).epoch]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_users_scheduler_places_its_job_elsewhere_than_the_plan_under_every_policy(policy: str) -> None:
    drive = Drive(2, CoreSettings(policy=policy))
    number = drive.submit(OWN)
    assert not drive.state.leases, "no plan starts it yet"
    suggested = place(drive, number, "n1")
    assert offer(drive, number).suggested == suggested
    assert isinstance(drive.request(number, place(drive, number, "n2")), Approved)
    assert gang_of(drive, number).nodes == ("n2",)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_without_a_scheduler_of_its_own_starts_by_lease_under_every_policy(policy: str) -> None:
    drive = Drive(2, CoreSettings(policy=policy))
    number = drive.submit(job_of(1))
    claims = place(drive, number, "n1")
    plan = ProposePlan((StartChange(number, drive.job(number).revision, claims),))
    (turn,) = machine.step(drive.state, plan, drive.now).effects.turns
    lease = drive.state.leases[turn]
    assert (lease.number, lease.scheduler, lease.suggested) == (number, "", claims)
    assert not drive.job(number).epoch, "only its scheduler's request starts it"
    drive.request(number, claims)
    assert gang_of(drive, number).nodes == ("n1",)
    assert not drive.state.leases


def test_starts_that_are_approved_as_one_need_no_lease() -> None:
    drive = Drive(2, CoreSettings(policy="ganger"))
    places = {drive.submit(job_of(1)): "n1", drive.submit(job_of(1)): "n2"}
    changes = [StartChange(one, 1, place(drive, one, node), together=1) for one, node in places.items()]
    step = machine.step(drive.state, ProposePlan(tuple(changes)), drive.now)
    assert not step.effects.turns
    assert {one: gang_of(drive, one).nodes for one in places} == {one: (node,) for one, node in places.items()}


def test_the_suggested_place_may_have_other_cores_than_the_job_requests_and_no_other_place_may() -> None:
    drive = Drive(2, CoreSettings(policy="synergy"))
    number = drive.submit(OWN)
    (claim,) = place(drive, number, "n1")
    tuned = replace(claim, millicores=tuple([2 * cores for cores in claim.millicores]))
    (verdict,) = propose(drive, {number: (tuned,)})
    assert verdict.approved
    answer = drive.request(number, (replace(tuned, node="n2"),))
    assert isinstance(answer, Rejected)
    assert answer.refusals[0].reason is Reason.CLAIM_MISMATCH
    propose(drive, {number: (tuned,)})
    assert isinstance(drive.request(number, (tuned,)), Approved)
    assert gang_of(drive, number).claims == (tuned,)


def test_a_job_starts_only_with_a_lease_and_one_that_passes_gets_the_next_lease_some_seconds_later() -> None:
    drive = Drive(2, CoreSettings(policy="ganger"))
    number = drive.submit(OWN)
    answer = drive.request(number, place(drive, number, "n1"), turn=0)
    assert isinstance(answer, Rejected)
    assert answer.refusals[0].reason is Reason.OUT_OF_TURN
    lease = offer(drive, number)
    assert offer(drive, number) == lease, "a plan is repeated while the scheduler decides"
    drive.request(number)
    (verdict,) = propose(drive, {number: place(drive, number, "n1")})
    assert "its scheduler has passed" in verdict.refusals[0].message
    (reason,) = reported_blockers(drive.state, drive.job(number), drive.now)
    assert reason.message.startswith("its scheduler passed its last lease without a reason")
    other = drive.submit(job_of(1))
    propose(drive, {other: place(drive, number, "n1")})
    assert gang_of(drive, other).nodes == ("n1",), "a job that passes holds up no other job"
    drive.now += CoreSettings().turn_again_s
    offer(drive, number)


def test_after_three_lost_leases_the_default_scheduler_starts_the_job() -> None:
    drive = Drive(2, CoreSettings(policy="ganger"))
    number = drive.submit(OWN)
    for _ in range(CoreSettings().lost_turns_allowed):
        drive.now = offer(drive, number).expires + 0.1
        expired = machine.step(drive.state, Tick(), drive.now)
        assert number in expired.effects.jobs, "the planner is to plan anew for it"
    propose(drive, {number: place(drive, number, "n1")})
    assert gang_of(drive, number).nodes == ("n1",)


def test_one_plan_does_not_offer_the_same_devices_twice() -> None:
    drive = Drive(2, CoreSettings(policy="ganger"))
    first, second = drive.submit(OWN), drive.submit(OWN)
    same = place(drive, first, "n1")
    verdicts = propose(drive, {first: same, second: same})
    assert [verdict.approved for verdict in verdicts] == [True, False]


def test_offers_of_one_plan_come_in_its_order() -> None:
    drive = Drive(2, CoreSettings(policy="ganger"))
    first, second = drive.submit(OWN), drive.submit(OWN)
    propose(drive, {second: place(drive, second, "n2"), first: place(drive, first, "n1")})
    assert [lease.number for lease in drive.state.leases.values()] == [second, first]
