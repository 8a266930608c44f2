"""Placement leases: which jobs get, keep and lose one, and when a job gets another."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, Locality, LocalityLevel
from ganger.job_state import JobState
from ganger_master.core import placement_leases
from ganger_master.core.answers import Rejected
from ganger_master.core.commands import CancelJob, ClaimTurns, CordonNode, RequestGang, Tick, UncordonNode
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.machine import next_wake
from ganger_master.core.placement_leases import ASIDE, WINDOW
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace

NONSENSE = (Claim("n1", 0b1, (0, 0), 1, 0, (1,)),)


def test_a_scheduler_with_only_invalid_claims_loses_its_leases_to_the_default_one() -> None:
    drive = Drive()
    number = drive.submit(replace(job_of(2), scheduler="mine:Scheduler"))
    drive.step(ClaimTurns("mine:Scheduler", (number,)))
    for lost in range(1, CoreSettings().lost_turns_allowed + 1):
        turn = drive.state.leases.turn_of[number]
        assert drive.state.leases[turn].scheduler == "mine:Scheduler"
        assert isinstance(drive.request(number, NONSENSE), Rejected)
        assert drive.state.leases.lost_turns[number] == lost
        assert drive.state.leases.turn_of.get(number) != turn
    assert drive.state.leases[drive.state.leases.turn_of[number]].scheduler == ""
    drive.start(number)


def test_after_an_invalid_request_of_the_default_scheduler_the_job_waits_for_a_change() -> None:
    drive = Drive()
    number = drive.submit(job_of(2))
    drive.request(number, NONSENSE)
    assert number not in drive.state.leases.turn_of


def test_a_request_without_a_lease_does_not_change_the_lease() -> None:
    drive = Drive()
    number = drive.submit(job_of(2))
    turn = drive.state.leases[drive.state.leases.turn_of[number]]
    assert isinstance(drive.request(number, NONSENSE, turn=0), Rejected)
    assert isinstance(drive.request(number, turn=0), Rejected)
    assert drive.state.leases[drive.state.leases.turn_of[number]] == turn
    assert number not in drive.state.leases.lost_turns
    assert number not in drive.state.queue.passed


def test_a_job_whose_scheduler_passed_on_an_older_view_gets_one_more_lease_at_once() -> None:
    drive = Drive()
    holder = drive.submit(job_of(4))
    drive.start(holder)
    number = drive.submit(job_of(2))
    seen = drive.state.view.version
    drive.step(CancelJob(holder))
    drive.observe("n1")
    assert drive.state.view.version > seen
    first = drive.state.leases.turn_of[number]
    drive.request(number, view_version=seen)
    again = drive.state.leases.turn_of[number]
    assert again > first
    drive.request(number, view_version=seen)
    assert number not in drive.state.leases.turn_of


def test_leases_that_no_host_received_begin_anew_for_the_first_host() -> None:
    drive = Drive()
    number = drive.submit(job_of(2))
    unheard = drive.state.leases[drive.state.leases.turn_of[number]]
    drive.now += 0.9 * CoreSettings().turn_lease_s
    drive.step(ClaimTurns("default-1", alone=True))
    given = drive.state.leases[drive.state.leases.turn_of[number]]
    assert given.turn != unheard.turn
    assert given.expires - drive.now == CoreSettings().turn_lease_s
    assert drive.state.leases.lost_turns == {}
    drive.step(ClaimTurns("default-2"))
    assert drive.state.leases[drive.state.leases.turn_of[number]] == given


def test_a_strict_queue_gives_several_leases_at_once_only_with_room_for_all() -> None:
    drive = Drive(2)
    first, second, third = drive.submit(job_of(2)), drive.submit(job_of(2)), drive.submit(job_of(1))
    assert sorted(turn.number for turn in drive.state.leases.values()) == [first, second]
    drive.start(first)
    drive.start(second)
    assert [turn.number for turn in drive.state.leases.values()] == [third]


def test_a_strict_queue_gives_no_lease_before_the_refused_job_has_requested_again() -> None:
    drive = Drive(12)
    large = [drive.submit(job_of(3)) for _ in range(12)]
    for number in large:
        drive.start(number)
    small = drive.submit(job_of(1))
    drive.start(small)
    (gang,) = drive.state.gangs.of_job(small)
    head = drive.submit(replace(job_of(4), locality=Locality(LocalityLevel.NODE)))
    behind = drive.submit(job_of(1))
    assert sorted(turn.number for turn in drive.state.leases.values()) == [head, behind]
    passes(drive, head)
    refused = drive.request(behind, *drive.places(behind))
    assert isinstance(refused, Rejected)
    assert refused.refusals[0].reason is Reason.PROTECTED
    drive.step(CancelJob(small))
    drive.seen_without(gang.nodes[0], small)
    assert drive.state.nodes.free_devices == 12
    assert not drive.state.leases, "it needs four devices of one node, and no node has as many"
    (beside,) = [number for number in large if drive.state.gangs.of_job(number)[0].nodes == gang.nodes]
    drive.step(CancelJob(beside))
    drive.seen_without(gang.nodes[0], beside)
    assert [turn.number for turn in drive.state.leases.values()] == [head]
    drive.submit(job_of(1))
    assert [turn.number for turn in drive.state.leases.values()] == [head]
    drive.step(CancelJob(head))
    assert behind in {turn.number for turn in drive.state.leases.values()}


def test_a_scheduler_that_answers_now_and_then_keeps_its_leases() -> None:
    drive = Drive(1)
    drive.start(drive.submit(job_of(1)))
    number = with_own_scheduler(drive, 4)
    for _ in range(4):
        drive.now += CoreSettings().turn_lease_s + 0.1
        drive.step(Tick())
        assert drive.state.leases.lost_turns[number] == 1
        passes(drive, number)
        drive.now += CoreSettings().turn_again_s
        drive.step(Tick())
    assert drive.state.leases[drive.state.leases.turn_of[number]].scheduler == "mine:Scheduler"


def test_a_lease_ends_with_the_stream_that_had_it() -> None:
    drive = Drive(1)
    number = drive.submit(replace(job_of(1), scheduler="mine:Scheduler"))
    drive.step(ClaimTurns("run-1", (number,)))
    turn = drive.state.leases[drive.state.leases.turn_of[number]]
    assert turn.scheduler == "run-1"
    drive.step(ClaimTurns("run-1", connected=False))
    assert turn.turn not in drive.state.leases
    assert drive.state.leases[drive.state.leases.turn_of[number]].scheduler == "mine:Scheduler"


def passes(drive: Drive, number: int) -> None:
    """Report missing devices as the job's scheduler, whatever is free."""
    turn = drive.state.leases.turn_of[number]
    drive.step(RequestGang(number, drive.job(number).revision, (), turn, blockers=(Refusal(Reason.GPUS),)))


def with_own_scheduler(drive: Drive, gpus: int) -> int:
    number = drive.submit(replace(job_of(gpus), scheduler="mine:Scheduler"))
    drive.step(ClaimTurns("mine:Scheduler", (number,)))
    return number


def test_a_scheduler_that_passes_although_there_is_a_place_blocks_no_other_job() -> None:
    drive = Drive(1)
    first = with_own_scheduler(drive, 1)
    passes(drive, first)
    drive.start(drive.submit(job_of(1)))
    # Nor later, when there is none: it had its choice.
    drive.start(drive.submit(job_of(2)))
    drive.now += CoreSettings().turn_again_s
    drive.step(Tick())
    passes(drive, first)
    drive.start(drive.submit(job_of(1)))


def test_a_users_scheduler_with_an_older_view_gets_another_lease_and_keeps_its_place() -> None:
    drive = Drive(1)
    holder = drive.submit(job_of(4))
    drive.start(holder)
    number = with_own_scheduler(drive, 2)
    seen = drive.state.view.version
    drive.step(CancelJob(holder))
    drive.observe("n1")
    drive.request(number, blockers=True, view_version=seen)
    assert number in drive.state.leases.turn_of
    assert not drive.state.queue.declined


def test_a_place_is_kept_for_a_users_scheduler_that_can_find_none() -> None:
    drive = Drive(1)
    drive.start(drive.submit(job_of(1)))
    passes(drive, with_own_scheduler(drive, 4))
    behind = drive.submit(job_of(1))
    answer = drive.request(behind, *drive.places(behind))
    assert isinstance(answer, Rejected)
    assert answer.refusals[0].reason is Reason.PROTECTED


def test_a_job_that_waits_for_its_locality_wish_blocks_no_other_job_until_its_patience_ends() -> None:
    drive = Drive(1)
    # Three devices never lie at one socket.
    picky = drive.submit(replace(job_of(3), locality=Locality(wish=LocalityLevel.SOCKET, patience_s=60.0)))
    drive.request(picky, blockers=True)
    assert "patience_left_seconds" in drive.state.blockers_of(picky)[0].figures
    drive.start(drive.submit(job_of(2)))
    drive.now += 61.0
    answer_turns(drive, 0.3)
    behind = drive.submit(job_of(1))
    answer = drive.request(behind, *drive.places(behind))
    assert isinstance(answer, Rejected)
    assert answer.refusals[0].job == f"jobs/{picky}"


def test_a_place_is_kept_for_a_users_scheduler_after_it_waited_for_a_locality_wish() -> None:
    drive = Drive(1)
    locality = Locality(wish=LocalityLevel.SOCKET, patience_s=60.0)
    picky = drive.submit(replace(job_of(3), scheduler="mine:Scheduler", locality=locality))
    drive.step(ClaimTurns("mine:Scheduler", (picky,)))
    passes(drive, picky)
    drive.start(drive.submit(job_of(2)))
    drive.now += 61.0
    drive.step(Tick())
    passes(drive, picky)
    behind = drive.submit(job_of(1))
    answer = drive.request(behind, *drive.places(behind))
    assert isinstance(answer, Rejected)
    assert answer.refusals[0].job == f"jobs/{picky}"


def test_a_scheduler_that_comes_and_goes_without_an_answer_loses_its_job_to_the_default_one() -> None:
    drive = Drive(1)
    number = with_own_scheduler(drive, 1)
    for _ in range(6):
        drive.now += CoreSettings().turn_lease_s + 0.1
        drive.step(Tick())
        drive.step(ClaimTurns("mine:Scheduler", (number,), connected=False))
        drive.step(ClaimTurns("mine:Scheduler", (number,)))
    assert drive.state.leases[drive.state.leases.turn_of[number]].scheduler == ""
    # A scheduler that comes back later gets a lease again.
    drive.now += 10.0
    drive.step(ClaimTurns("mine:Scheduler", (number,)))
    drive.step(Tick())
    assert drive.state.leases[drive.state.leases.turn_of[number]].scheduler == "mine:Scheduler"


def test_a_lease_that_ran_out_is_taken_back_though_a_batch_ended_between_its_end_and_the_alarm() -> None:
    """The wake-up that the end of a batch requests replaces the one before."""
    drive = Drive(1)
    first = drive.submit(job_of(1))
    turn = drive.state.leases.turn_of[first]
    drive.now = drive.state.leases[turn].expires + 0.01
    drive.observe("n1")
    wake = next_wake(drive.state, drive.now)
    assert wake is not None
    assert wake <= drive.now, "not for what happens later, as long as this one blocks all behind it"
    drive.step(Tick())
    assert drive.state.leases.turn_of[first] != turn
    drive.start(first)


def test_a_lease_begins_when_it_is_sent_however_long_the_commit_took() -> None:
    drive = Drive(1)
    number = drive.submit(job_of(1))
    turn = drive.state.leases[drive.state.leases.turn_of[number]]
    drive.now = turn.expires + 5.0
    drive.step(Tick(newest_sent=turn.turn - 1))
    assert drive.state.leases.lost_turns == {}
    begun = drive.state.leases[turn.turn]
    assert begun.expires == drive.now + CoreSettings().turn_lease_s
    drive.step(Tick(newest_sent=turn.turn))
    assert drive.state.leases == {turn.turn: begun}, "told once, it is told for good"
    drive.now = begun.expires - 0.1
    drive.start(number)


def test_a_lease_that_was_sent_and_not_used_is_taken_back() -> None:
    drive = Drive(1)
    number = drive.submit(job_of(1))
    turn = drive.state.leases[drive.state.leases.turn_of[number]]
    drive.now = turn.expires
    drive.step(Tick(newest_sent=turn.turn))
    assert drive.state.leases.lost_turns == {number: 1}
    assert drive.state.leases.turn_of[number] != turn.turn


def test_the_first_job_gets_a_lease_once_its_devices_are_free_although_jobs_behind_request_them() -> None:
    drive = Drive(2, CoreSettings(policy="backfill"))
    running = [drive.submit(job_of(4)), drive.submit(job_of(4))]
    for number in running:
        drive.start(number)
        drive.runs(number)
    large, small = drive.submit(job_of(8)), drive.submit(job_of(4))
    drive.request(large, blockers=True)
    drive.request(small, blockers=True)
    leaves(drive, running[0])
    assert set(drive.state.leases.turn_of) == {small}
    leaves(drive, running[1])
    assert set(drive.state.leases.turn_of) == {small, large}
    drive.start(large)


def leaves(drive: Drive, number: int) -> None:
    epoch = drive.job(number).epoch
    drive.step(CancelJob(number))
    drive.seen(number, epoch, ObservedPhase.ENDED)


def answer_turns(drive: Drive, seconds: float) -> None:
    """As the default scheduler does, for so long."""
    end = drive.now + seconds
    while drive.now < end:
        drive.step(Tick())
        turns = sorted(drive.state.leases)
        if turns:
            number = drive.state.leases[turns[0]].number
            drive.request(number, *drive.places(number), blockers=True)
        else:
            drive.now += 0.1


@pytest.mark.parametrize("policy", ["fifo", "backfill"])
def test_jobs_that_wait_for_no_other_job_are_passed_over_however_many_they_are(policy: str) -> None:
    drive = Drive(1, CoreSettings(policy=policy))
    drive.step(CordonNode("n1", "not yet"))
    alice = [drive.submit(job_of(1), "alice") for _ in range(WINDOW + 1)]
    drive.set_quotas(alice=0)
    drive.step(UncordonNode("n1"))
    bob = drive.submit(job_of(1), "bob")
    answer_turns(drive, 3.0)
    assert drive.job(bob).state is JobState.HOLDING
    assert drive.state.blockers_of(alice[0])[0].reason is Reason.QUOTA


def test_very_many_jobs_that_wait_for_no_other_job_are_considered_in_rotation() -> None:
    drive = Drive(1, CoreSettings(policy="backfill", turns_at_once=4))
    alice = [drive.submit(job_of(1), "alice") for _ in range(4 * ASIDE)]
    drive.set_quotas(alice=0)
    over_quota = (Refusal(Reason.QUOTA),)
    for number in alice:
        drive.state.note_refusals(number, over_quota)
    bob = drive.submit(job_of(1), "bob")
    looked_at: set[int] = set()
    for _ in range(5):
        drive.now += 1.0
        drive.step(Tick())
        numbers = list(placement_leases._window(drive.state))
        assert len(numbers) <= 2 * ASIDE + 1
        assert numbers == sorted(numbers)
        assert numbers[:ASIDE] == alice[:ASIDE], "the first ones always"
        assert numbers[-1] == bob, "they do not count towards the window"
        looked_at.update(numbers)
    assert looked_at == {*alice, bob}
    wake = placement_leases.next_time(drive.state, drive.now)
    assert wake is not None
    assert wake <= drive.now + 1.0


@pytest.mark.parametrize(("quota", "is_asked"), [(1, False), (2, True), (3, True)])
def test_a_job_gets_another_lease_only_if_its_quota_leaves_what_it_needs_at_least(quota: int, is_asked: bool) -> None:
    drive = Drive(1, CoreSettings(policy="backfill", quota_devices={"alice": 3}))
    for user in ("alice", "bob"):
        other = drive.submit(job_of(1), user)
        answer_turns(drive, 0.2)
        drive.runs(other)
    elastic = drive.submit(replace(job_of(3), gpus_min=1, gpus_max=3), "alice")
    drive.set_quotas(alice=quota)
    answer_turns(drive, 0.2)
    assert elastic in drive.state.queue.aside
    drive.step(CancelJob(other))
    drive.seen_without("n1", other)
    drive.now += 5.0
    drive.step(Tick())
    assert (elastic in drive.state.leases.turn_of) == is_asked


def test_a_job_that_waits_for_no_other_job_gets_a_lease_a_second_after_the_view_has_changed() -> None:
    drive = Drive(1, CoreSettings(quota_devices={"alice": 1}))
    first, second = drive.submit(job_of(1), "alice"), drive.submit(job_of(1), "alice")
    answer_turns(drive, 0.2)
    assert drive.state.blockers_of(second)[0].reason is Reason.QUOTA
    drive.step(CancelJob(first))
    drive.observe("n1")
    answer_turns(drive, 1.5)
    assert drive.job(second).state is JobState.HOLDING
