"""Resizes of elastic jobs: what the two worlds hold, and what becomes of the job when one of them fails."""

from __future__ import annotations

import pytest
from core.drive import ALL_LEVELS, GIB, Drive, job_of
from core.elastic_worlds import SMALL, World, elastic
from ganger.cluster.placement import resized
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Claim
from ganger.job_state import JobState
from ganger_master.core.answers import JobAnswer, PlanAnswer, Refused
from ganger_master.core.commands import ProposePlan, ResizeJob
from ganger_master.core.elastic import judge_resize
from ganger_master.core.gang_model import Gang, GangIntent, GangPhase, GangRole, ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.job_rules import rules
from ganger_master.core.plan_changes import ResizeChange, StartChange
from ganger_master.core.settings import CoreSettings
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace


def free(drive: Drive, node: str = "n1") -> int:
    return drive.state.view.free[drive.state.view.slots[node]].bit_count()


def test_a_job_grows_while_it_runs_and_holds_no_device_twice() -> None:
    drive = World()
    number = drive.running(elastic(1, 1, 4))
    source = drive.job(number).epoch
    memory = drive.state.view.memory[0]
    assert drive.step(ResizeJob(number, 4)) == JobAnswer(number)
    destination = drive.job(number).next_epoch
    assert drive.state.gangs[source].intent is GangIntent.RUN
    assert drive.state.gangs[source].phase is GangPhase.RESIZING
    assert drive.held(number) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert (free(drive), drive.job(number).gpus) == (0, 1)
    # Of memory as much as three more tasks need, and their arenas.
    assert memory - drive.state.view.memory[0] == 3 * (GIB + SMALL + SMALL // 10)
    (wanted,) = [one.desired for one in drive.state.desired.of("n1").wanted if one.desired.epoch == destination]
    assert (wanted.intent, wanted.claim.device_mask, wanted.restore.alone) == (GangIntent.PREPARE, 0b1111, False)
    drive.seen(number, destination, ObservedPhase.PREPARED)
    assert drive.state.gangs[source].intent is GangIntent.HAND_OVER
    drive.seen(number, source, ObservedPhase.PARKED, 40)
    drive.seen(number, destination, ObservedPhase.READY, 40)
    assert (drive.job(number).epoch, drive.job(number).gpus) == (destination, 4)
    assert drive.held(number) == {0: 1, 1: 1, 2: 1, 3: 1}
    drive.runs(number)
    drive.gone(number, source)
    assert drive.held(number) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert [event.kind for event in drive.history if event.kind.startswith("resize")] == [
        "resize_begun",
        "resize_committed",
    ]


def test_a_job_that_shrinks_rests_at_once_and_what_it_gives_back_is_free_as_soon_as_it_rests() -> None:
    drive = World()
    number = drive.running(elastic(4, 1, 4))
    source = drive.job(number).epoch
    drive.step(ResizeJob(number, 1))
    destination = drive.job(number).next_epoch
    gang = drive.state.gangs[source]
    assert (gang.intent, gang.park_level) == (GangIntent.PARK, SuspendLevel.OFFLOAD)
    assert (drive.held(number), free(drive)) == ({0: 1, 1: 1, 2: 1, 3: 1}, 0)
    drive.seen(number, source, ObservedPhase.PARKED, 40)
    assert free(drive) == 3
    assert sum(drive.held(number).values()) == 1
    drive.seen(number, destination, ObservedPhase.READY, 40)
    assert drive.job(number).epoch == destination
    drive.runs(number)
    drive.gone(number, source)
    assert (free(drive), drive.job(number).gpus, drive.job(number).state) == (3, 1, JobState.HOLDING)


def test_a_new_world_waits_for_the_devices_of_the_old_one_where_there_is_no_room_for_both() -> None:
    drive = World()
    number = drive.running(elastic(1, 1, 4, device_bytes=GIB // 2))
    source = drive.job(number).epoch
    drive.step(ResizeJob(number, 2))
    gang = drive.state.gangs[drive.job(number).next_epoch]
    assert gang.restore.alone
    assert drive.state.gangs[source].park_level is SuspendLevel.OFFLOAD


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_new_world_that_fails_before_the_commit_leaves_the_old_one_running(gpus: int) -> None:
    drive = World()
    number = drive.running(elastic(2, 1, 4))
    source = drive.job(number).epoch
    drive.step(ResizeJob(number, gpus))
    destination = drive.job(number).next_epoch
    drive.fails(number, destination)
    job, gang = drive.job(number), drive.state.gangs[source]
    assert (job.epoch, job.next_epoch, job.state, job.gpus) == (source, 0, JobState.HOLDING, 2)
    assert (gang.intent, gang.stop_sequence) == (GangIntent.RUN, 0)
    drive.runs(number)
    assert (free(drive), job.failures) == (2, 0)


def test_a_shrink_that_fails_once_the_old_world_rests_lets_the_job_wait_and_rise_with_any_size() -> None:
    drive = World()
    number = drive.running(elastic(4, 1, 4))
    source = drive.job(number).epoch
    drive.step(ResizeJob(number, 2))
    destination = drive.job(number).next_epoch
    drive.seen(number, source, ObservedPhase.PARKED, 40)
    drive.fails(number, destination)
    job = drive.job(number)
    assert (job.state, job.epoch, job.next_epoch, free(drive)) == (JobState.PENDING, source, 0, 4)
    shape = job.spec.shape(job.arena_bytes_per_device, 0, 3)
    claims = resized(drive.state.view, shape, drive.state.gangs[source].claims)
    assert claims is not None
    answer = drive.step(ProposePlan((StartChange(number, job.revision, claims),)))
    assert isinstance(answer, PlanAnswer)
    assert answer.verdicts[0].approved, answer
    risen = drive.job(number).next_epoch
    assert drive.state.gangs[risen].restore.parked_epoch == source
    drive.seen(number, risen, ObservedPhase.READY, 40)
    drive.runs(number)
    assert (drive.job(number).epoch, drive.job(number).gpus) == (risen, 3)


def test_a_new_world_that_fails_after_the_commit_is_followed_by_one_in_the_place_of_the_old() -> None:
    drive = World()
    number = drive.running(replace(elastic(1, 1, 4), max_failures=1))
    source = drive.job(number).epoch
    drive.step(ResizeJob(number, 4))
    destination = drive.job(number).next_epoch
    drive.seen(number, destination, ObservedPhase.PREPARED)
    drive.seen(number, source, ObservedPhase.PARKED, 40)
    drive.seen(number, destination, ObservedPhase.READY, 40)
    drive.fails(number, destination)
    job = drive.job(number)
    # The parked copy has its own device back before another job could get it, and runs again as a newer epoch.
    assert (job.epoch, job.gpus) == (source, 1)
    assert job.next_epoch > destination
    assert drive.held(number)[0] == 1
    assert free(drive) == 3


def test_of_two_new_worlds_that_were_given_up_one_holds_what_the_lost_old_one_did() -> None:
    """The first is still leaving a node that is silent when the second begins there; then that node restarts."""
    drive = World(2)
    number = drive.running(elastic(3, 1, 8))
    assert drive.state.gangs[drive.job(number).epoch].nodes == ("n1",)
    for attempt in (1, 2):
        drive.step(ResizeJob(number, 6))
        new = drive.job(number).next_epoch
        assert drive.state.gangs[new].nodes == ("n1", "n2")
        if attempt == 1:
            drive.part_fails(new, "n2")
            assert not drive.job(number).next_epoch
    drive.restarts("n1")
    assert drive.held(number) == {0: 1, 1: 1, 2: 1, 3: 1}
    drive.observe("n1")
    drive.observe("n2")
    assert (drive.held(number), free(drive), free(drive, "n2")) == ({}, 4, 4)


def test_a_refused_resize_gives_its_reason() -> None:
    drive = World()
    fixed = drive.running(job_of(1))
    number = drive.running(elastic(2, 1, 3))

    def why(gpus: int, which: int = number) -> str:
        answer = drive.step(ResizeJob(which, gpus))
        assert isinstance(answer, Refused)
        return answer.message

    assert "submitted with one number of GPUs" in why(2, fixed)
    assert "accepts 1 to 3 GPUs, not 4" in why(4)
    assert "has 2 GPUs" in why(2)
    drive.running(job_of(1))
    assert "no room for 3 GPUs" in why(3)
    drive.capabilities = replace(ALL_LEVELS, resize=True, resize_divides=8)
    drive.runs(number)
    assert "do not divide its global batch (8 samples)" in why(3)
    drive.capabilities = replace(ALL_LEVELS, missing={"RESIZE": "attach it"})
    drive.runs(number)
    assert "attach it" in why(1)


def test_a_plan_s_change_of_size_is_judged_beside_its_other_changes() -> None:
    drive = World()
    grows, waits = drive.running(elastic(1, 1, 4)), drive.submit(job_of(2))
    job = drive.job(grows)
    claims = resized(drive.state.view, job.spec.shape(job.arena_bytes_per_device, 0, 3), drive.state.gangs[1].claims)
    assert claims is not None
    start = drive.places(waits)[0]
    changes = (
        ResizeChange(grows, job.revision, claims),
        StartChange(waits, drive.job(waits).revision, start),
    )
    answer = drive.step(ProposePlan(changes))
    assert isinstance(answer, PlanAnswer)
    assert [verdict.approved for verdict in answer.verdicts] == [True, False]
    assert answer.verdicts[1].refusals[0].reason is Reason.GPUS


def test_tasks_of_a_new_world_cannot_have_the_memory_that_arenas_of_the_old_one_are_in() -> None:
    drive = World()
    number = drive.running(elastic(2, 1, 4))
    job, view = drive.job(number), drive.state.view
    gang = drive.state.gangs[job.epoch]
    (held,) = gang.claims
    assert held.arena_bytes
    claims = resized(view, job.spec.shape(job.arena_bytes_per_device, 0, 1), gang.claims)
    assert claims is not None
    given_back = held.arena_bytes - claims[0].arena_bytes
    whole = replace(claims[0], memory_bytes=held.memory_bytes + given_back)
    room = view.memory[view.slots["n1"]]
    assert not judge_resize(drive.state, job, gang, (whole,))
    view.take(Claim("n1", 0, (0, 0), room))
    (refusal,) = judge_resize(drive.state, job, gang, (whole,))
    assert (refusal.reason, refusal.figures) == (Reason.MEMORY, {"needed_bytes": given_back, "free_bytes": 0})
    assert not judge_resize(drive.state, job, gang, claims)


def test_a_user_s_share_bounds_how_far_a_job_grows() -> None:
    drive = World(settings=CoreSettings(quota_devices={"": 2}))
    number = drive.running(elastic(1, 1, 4))
    answer = drive.step(ResizeJob(number, 3))
    assert isinstance(answer, Refused)
    assert "the quota of user '' is 2" in answer.message
    assert drive.step(ResizeJob(number, 2)) == JobAnswer(number)


def test_what_a_job_is_about_to_have_counts_towards_its_user_s_share() -> None:
    drive = World(2, settings=CoreSettings(quota_devices={"": 4}))
    number, other = drive.running(elastic(1, 1, 4)), drive.submit(job_of(2))
    assert rules(drive.state, drive.job(other)) == ()
    assert drive.step(ResizeJob(number, 3)) == JobAnswer(number)
    (refusal,) = rules(drive.state, drive.job(other))
    assert refusal.figures == {"needed": 2, "held": 3, "limit": 4}
    drive.seen(number, drive.job(number).next_epoch, ObservedPhase.ENDED)
    assert not drive.job(number).next_epoch, "it was given up"
    assert rules(drive.state, drive.job(other)) == ()


def test_a_plan_cannot_exceed_a_user_s_share_by_growth_and_a_start() -> None:
    drive = World(2, settings=CoreSettings(quota_devices={"": 4}))
    grows, waits = drive.running(elastic(1, 1, 4)), drive.submit(job_of(2))
    job = drive.job(grows)
    claims = resized(drive.state.view, job.spec.shape(job.arena_bytes_per_device, 0, 3), drive.state.gangs[1].claims)
    assert claims is not None
    (start,) = [places for places in drive.places(waits) if places[0].node == "n2"]
    changes = (
        ResizeChange(grows, job.revision, claims),
        StartChange(waits, drive.job(waits).revision, start),
    )
    answer = drive.step(ProposePlan(changes))
    assert isinstance(answer, PlanAnswer)
    assert [verdict.approved for verdict in answer.verdicts] == [True, False]
    assert answer.verdicts[1].refusals[0].reason is Reason.QUOTA


_SEEN = ["prepared", "parked", "ready", "runs", "fails", "gone", "part fails", "restarts"]


@given(
    some.lists(
        some.tuples(some.integers(0, 2), some.sampled_from(["resize", *_SEEN * 2]), some.integers(1, 6)),
        max_size=40,
    ),
    some.sampled_from([SMALL, GIB // 2]),
)
def test_whatever_happens_to_two_worlds_no_device_is_held_twice_and_one_world_is_the_job(
    acts: list[tuple[int, str, int]], device_bytes: int
) -> None:
    """`Drive.step` looks at all invariants after every event."""
    drive = World(2)
    jobs = [
        drive.running(replace(spec, max_failures=99))
        for spec in (elastic(1, 1, 6, device_bytes), elastic(2, 2, 4, device_bytes, 2), elastic(2, 1, 4, device_bytes))
    ]
    for which, act, size in acts:
        number = jobs[which]
        job = drive.job(number)
        gangs = drive.state.gangs.of_job(number)
        if act == "resize":
            drive.step(ResizeJob(number, size))
        elif gangs:
            gang = gangs[size % len(gangs)]
            _report(drive, number, gang, act)
        waiting = job.is_waiting
        if waiting and not job.epoch:
            place = drive.places(number)
            if place:
                drive.request(number, *place)


def _report(drive: World, number: int, gang: Gang, act: str) -> None:
    """What daemons could truly say of a gang now."""
    is_new = gang.role is GangRole.DESTINATION
    if gang.is_gone:
        return
    if act == "fails":
        drive.fails(number, gang.epoch)
    elif act == "gone" and gang.intent is GangIntent.STOP:
        drive.gone(number, gang.epoch)
    elif act == "part fails":
        drive.part_fails(gang.epoch, next(piece.claim.node for piece in gang.pieces if not piece.gone))
    elif act == "restarts":
        drive.restarts(gang.nodes[0])
    elif act == "prepared" and is_new:
        drive.seen(number, gang.epoch, ObservedPhase.PREPARED)
    elif act == "parked" and gang.intent in (GangIntent.PARK, GangIntent.HAND_OVER):
        drive.seen(number, gang.epoch, ObservedPhase.PARKED, 40)
    elif act == "ready" and is_new:
        source = drive.state.gangs[gang.restore.parked_epoch]
        if source.pieces[0].stop_step:
            drive.seen(number, gang.epoch, ObservedPhase.READY, source.pieces[0].stop_step)
    elif act == "runs" and gang.intent is GangIntent.RUN:
        drive.seen(number, gang.epoch, ObservedPhase.RUNNING)
