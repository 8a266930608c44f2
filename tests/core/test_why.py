"""`why`, where nodes are closed to a job, and while it waits for its wish."""

from __future__ import annotations

import pytest
from core.drive import SERVER, Drive, job_of
from ganger.cluster.refusals import Reason
from ganger.cluster.resources import Locality, LocalityLevel
from ganger.job_state import JobState
from ganger_master.core.answers import SessionAnswer
from ganger_master.core.commands import (
    CancelJob,
    Command,
    CordonNode,
    DeclareLost,
    DrainNode,
    Observe,
    OpenSession,
    ResumeJob,
    SuspendJob,
)
from ganger_master.core.explain import explain, reported_blockers
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.job_model import SuspendLevel
from ganger_master.core.settings import CoreSettings
from msgspec.structs import replace


def closed_node(drive: Drive, name: str) -> None:
    """Its daemon runs everything as alice."""
    command = OpenSession(name, f"machine-{name}", SERVER, capabilities={"switch_user": "no", "user": "alice"})
    answer = drive.step(command)
    assert isinstance(answer, SessionAnswer)
    drive.sessions[name] = answer.session
    drive.step(Observe(name, answer.session, 1, 0, (), storage_proved=True))


def why(drive: Drive, number: int) -> list[Reason]:
    return [blocker.reason for blocker in explain(drive.state, number, drive.now).blockers]


def test_nodes_closed_to_a_job_are_what_it_lacks_only_if_there_is_room_on_them() -> None:
    drive = Drive(1)
    drive.start(drive.submit(job_of(4), "bob"))
    closed_node(drive, "n2")
    waiting = drive.submit(job_of(4), "bob")
    assert why(drive, waiting)[0] is Reason.CANNOT_SWITCH_USER
    drive.start(drive.submit(replace(job_of(1), priority=1), "alice"))
    blockers = explain(drive.state, waiting, drive.now).blockers
    assert [blocker.reason for blocker in blockers] == [Reason.GPUS]
    # What is free there is nothing to the job.
    assert blockers[0].figures["free"] == 0


def test_a_wish_is_named_while_the_patience_lasts_and_never_after() -> None:
    drive = Drive(1)
    drive.start(drive.submit(job_of(2)))
    picky = drive.submit(replace(job_of(3), locality=Locality(wish=LocalityLevel.SOCKET, patience_s=60.0)))
    assert why(drive, picky)[0] is Reason.LOCALITY
    drive.now += 61.0
    assert why(drive, picky) == [Reason.GPUS]


def test_the_explanation_of_a_job_on_a_silent_node_says_that_its_state_is_unknown_and_when_it_goes_on() -> None:
    drive = Drive(1)
    number = drive.submit(job_of(4))
    drive.start(number)
    drive.runs(number)
    drive.state.note_answer("n1", drive.now)
    drive.now += 80.0
    assert explain(drive.state, number, drive.now).blockers == (), "it may just be its turn to call"
    drive.now += 20.0
    (blocker,) = explain(drive.state, number, drive.now).blockers
    assert blocker.reason is Reason.NODE_SILENT
    assert blocker.message.startswith("nodes/n1 has not called for 100 s: the job's state is the one last reported")
    lost_after = drive.state.lost_after
    assert f"elsewhere once its silence has lasted {lost_after:.0f} s, or when an operator" in blocker.message
    drive.step(DeclareLost("n1"))
    assert all(one.detail != blocker.detail for one in explain(drive.state, number, drive.now).blockers)


def test_closed_nodes_are_named_with_their_condition_as_the_only_blocker() -> None:
    drive = Drive(0)
    number = drive.submit(job_of(1))
    assert explain(drive.state, number, drive.now).assumption == "unknown, because no node has joined yet"
    for name in ("n1", "n2", "n3", "n4", "n5"):
        drive.join(name)
        drive.step(CordonNode(name, f"new fan for {name}"))
    found = explain(drive.state, number, drive.now)
    (blocker,) = found.blockers
    assert blocker.detail == (
        "nodes/n1 is cordoned (new fan for n1); nodes/n2 is cordoned (new fan for n2); "
        "nodes/n3 is cordoned (new fan for n3); 2 more"
    )
    assert blocker.figures == {"nodes": 5, "available": 0}
    assert found.assumption == f"unknown, because {blocker.message}"


@pytest.mark.parametrize(
    ("order", "fate"),
    [
        (None, "it goes on elsewhere once its silence has lasted 630 s, or when an operator says so"),
        (SuspendJob(1), "it rests, and starts from the beginning, once its silence"),
        (CancelJob(1), "it ends once its silence"),
    ],
)
def test_the_fate_of_a_job_on_a_silent_node_follows_its_last_order(order: Command | None, fate: str) -> None:
    drive = Drive(1)
    number = drive.submit(job_of(4))
    drive.start(number)
    drive.runs(number)
    drive.state.note_answer("n1", drive.now)
    drive.now += 100.0
    if order is not None:
        drive.step(order)
    (blocker,) = explain(drive.state, number, drive.now).blockers
    assert fate in blocker.message
    # And so it comes.
    drive.step(DeclareLost("n1"))
    states = {None: JobState.PENDING, SuspendJob(1): JobState.SUSPENDED, CancelJob(1): JobState.CANCELLED}
    assert drive.job(number).state is states[order]


def test_under_a_planner_the_first_blocker_states_how_many_devices_are_wanted_and_free() -> None:
    drive = Drive(2, CoreSettings(policy="las"))
    number = drive.submit(job_of(6))
    drive.state.queue.ranks[number] = 1
    assert [one.reason for one in reported_blockers(drive.state, drive.job(number), drive.now)] == [Reason.RANKED]
    drive.step(DrainNode("n1", "new fan"))
    lacks, ranked = reported_blockers(drive.state, drive.job(number), drive.now)
    assert (lacks.reason, lacks.figures) == (Reason.GPUS, {"needed": 6, "free": 4, "draining": 4})
    assert ranked.reason is Reason.RANKED
    reasons = why(drive, number)
    assert reasons.count(Reason.GPUS) == 1, "each cause once"
    assert reasons[-1] is Reason.RANKED


@pytest.mark.parametrize(
    ("policy", "gpus", "explained", "reported"),
    [
        ("las", 2, [Reason.RANKED], [Reason.RANKED]),
        ("ganger", 6, [Reason.RANKED, Reason.NODE_UNAVAILABLE], [Reason.RANKED, Reason.GPUS]),
        # Each job's scheduler places it under these.
        ("fifo", 2, [], []),
        ("fifo-backfill", 6, [Reason.NODE_UNAVAILABLE], []),
    ],
)
def test_without_a_planner_that_is_the_first_blocker_of_jobs_that_need_one(
    policy: str, gpus: int, explained: list[Reason], reported: list[Reason]
) -> None:
    drive = Drive(2, CoreSettings(policy=policy))
    number = drive.submit(job_of(gpus))
    drive.step(DrainNode("n1", "new fan"))
    remedy = "start one with `ganger planner run`, or restart the master without --no-planner"
    for reasons, blockers in (
        (explained, explain(drive.state, number, drive.now, has_planner=False).blockers),
        (reported, reported_blockers(drive.state, drive.job(number), drive.now, has_planner=False)),
    ):
        assert [one.reason for one in blockers] == reasons
        if Reason.RANKED in reasons:
            assert blockers[0].detail == f"policy {policy} needs a planner, and none is connected: {remedy}"


def test_why_names_the_nodes_that_have_not_acknowledged_an_order() -> None:
    drive = Drive(1)
    number = drive.submit(job_of(4))
    drive.start(number)

    def told() -> str:
        return explain(drive.state, number, drive.now).assumption

    assert told() == "it was ordered to start; nodes/n1 has not acknowledged the order yet"
    drive.runs(number)
    assert told() == "it has its gang, which is RUNNING"
    drive.step(SuspendJob(number, SuspendLevel.OFFLOAD))
    assert told() == "it was ordered to rest; nodes/n1 has not reported that it does"
    drive.seen(number, drive.job(number).epoch, ObservedPhase.PARKED, 7)
    assert told() == (
        f"it stays suspended until `ganger resume {number}`; `ganger history {number}` prints why it was suspended"
    )
    drive.step(ResumeJob(number))
    drive.start(number)
    drive.runs(number)
    drive.step(CancelJob(number))
    assert told() == "it was ordered to end; nodes/n1 has not reported that it does"
