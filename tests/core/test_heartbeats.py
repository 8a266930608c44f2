"""Nodes whose daemons do not call take no gangs until they do."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from core.test_lost_commits import Store
from ganger.cluster.refusals import Reason
from ganger.job_state import JobState
from ganger_master.core.answers import Rejected
from ganger_master.core.commands import Answer, DeclareLost, Tick
from ganger_master.core.explain import explain
from ganger_master.core.node_model import NodeState
from ganger_master.core.settings import CoreSettings
from ganger_master.core.state_image import restored

# Longer than that of a daemon with nothing to tell, far from lost.
SILENCE = 100.0


def pass_time(drive: Drive, seconds: float, *calling: str) -> None:
    """The nodes named call every few seconds meanwhile."""
    end = drive.now + seconds
    while drive.now < end:
        drive.now = min(end, drive.now + 10.0)
        if drive.state.wake_at is not None and drive.now >= drive.state.wake_at:
            drive.step(Tick())
        for node in calling:
            call(drive, node)


def call(drive: Drive, node: str) -> None:
    drive.step(Answer(node, drive.sessions[node], 0))


def state_of(drive: Drive, node: str) -> NodeState:
    return drive.state.nodes[node].state


def test_a_silent_node_takes_no_gangs_and_as_soon_as_it_calls_it_does() -> None:
    drive = Drive(nodes=2)
    pass_time(drive, SILENCE, "n1")
    assert (state_of(drive, "n1"), state_of(drive, "n2")) == (NodeState.READY, NodeState.SILENT)
    drive.start(drive.submit(job_of(4)))
    assert not drive.on("n2")
    waiting = drive.submit(job_of(4))
    assert drive.places(waiting) == ()
    call(drive, "n2")
    assert state_of(drive, "n2") is NodeState.READY
    drive.start(waiting)
    told = [(entry.kind, entry.message) for entry in drive.history if entry.subject == "nodes/n2"]
    assert told[-2:] == [("node_silent", "it has not called for 90 s"), ("node_ready", "it calls again")]


def test_a_request_from_an_older_view_is_rejected_on_a_node_that_turned_silent() -> None:
    drive = Drive()
    number = drive.submit(job_of(4))
    seen = drive.places(number)
    pass_time(drive, SILENCE)
    answer = drive.request(number, *seen)
    assert isinstance(answer, Rejected)
    assert [refusal.reason for refusal in answer.refusals] == [Reason.NODE_UNAVAILABLE]
    assert [row.available for row in answer.rows] == [False]


def test_why_names_the_silent_node_of_a_job_that_could_only_be_there() -> None:
    drive = Drive()
    pass_time(drive, SILENCE)
    (blocker,) = explain(drive.state, drive.submit(job_of(4)), drive.now).blockers
    assert blocker.detail == "nodes/n1 is silent (its daemon does not call)"


def test_gangs_on_a_silent_node_stay_until_it_is_lost() -> None:
    drive = Drive(nodes=2)
    number = drive.submit(job_of(4))
    drive.start(number)
    drive.runs(number)
    (node,) = drive.state.gangs[drive.job(number).epoch].nodes
    (other,) = {"n1", "n2"} - {node}
    pass_time(drive, 600.0, other)
    assert state_of(drive, node) is NodeState.SILENT
    assert drive.job(number).state is JobState.HOLDING
    pass_time(drive, 50.0, other)
    assert state_of(drive, node) is NodeState.LOST
    assert drive.job(number).state is JobState.PENDING


@pytest.mark.parametrize("lost_after", [None, 60.0, 600.0])
def test_a_daemon_that_calls_as_rarely_as_it_may_is_never_silent(lost_after: float | None) -> None:
    settings = CoreSettings(lost_after_s=lost_after)
    drive = Drive(settings=settings)
    poll = min(settings.poll_s, (lost_after or 1e9) / 4)
    for _ in range(20):
        pass_time(drive, poll)
        assert drive.state.nodes["n1"].takes_gangs
        call(drive, "n1")
    pass_time(drive, poll + 40.0)
    assert not drive.state.nodes["n1"].takes_gangs


def test_no_node_turns_silent_while_the_master_stood_still_and_silent_nodes_stay_silent() -> None:
    drive = Drive(nodes=2)
    pass_time(drive, SILENCE, "n1")
    drive.now += 3_600.0
    drive.step(Tick(stood_still=True))
    assert (state_of(drive, "n1"), state_of(drive, "n2")) == (NodeState.READY, NodeState.SILENT)
    pass_time(drive, 80.0)
    assert state_of(drive, "n1") is NodeState.READY
    pass_time(drive, 20.0)
    assert state_of(drive, "n1") is NodeState.SILENT


def test_a_silent_node_is_unknown_after_a_restart_and_ready_once_it_has_reported() -> None:
    drive = Drive()
    store = Store(drive)
    pass_time(drive, SILENCE)
    store.keep()
    drive.state = restored(drive.state.settings, store.elements, drive.now)
    assert state_of(drive, "n1") is NodeState.UNKNOWN
    drive.join("n1")
    assert state_of(drive, "n1") is NodeState.READY


def test_a_silence_that_could_not_be_stored_is_not_to_be_stored_again() -> None:
    drive = Drive()
    store = Store(drive)
    pass_time(drive, SILENCE)
    store.lose()
    assert state_of(drive, "n1") is NodeState.SILENT
    assert not any(kind == "node" for kind, _ in drive.state.take_changes().puts)
    call(drive, "n1")
    store.lose()
    assert state_of(drive, "n1") is NodeState.READY


def test_all_nodes_are_looked_through_only_when_one_can_have_turned_silent() -> None:
    drive = Drive(nodes=2)
    looked = []
    for _ in range(60):
        pass_time(drive, 10.0, "n1", "n2")
        looked.append(drive.state.nodes.next_silence_check)
    assert len(set(looked)) <= 600 / 60


# Seconds at which nodes were answered for the last time, those that call again, and the nodes that the clock declares
# lost by 1,000 s: silent after 90 s, lost after 630 s.
@pytest.mark.parametrize(
    ("last", "back", "lost"),
    [
        # A single node is lost by the clock.
        ({"n1": 0.0}, {}, {"n1"}),
        # All fell silent within one heartbeat window.
        ({"n1": 0.0, "n2": 80.0, "n3": 40.0}, {}, set()),
        # One node fell silent before the others.
        ({"n1": 0.0, "n2": 200.0, "n3": 240.0}, {}, {"n1"}),
        # One after another.
        ({"n1": 0.0, "n2": 200.0}, {}, {"n1", "n2"}),
        # One calls again: the clock of the other starts from there.
        ({"n1": 0.0, "n2": 0.0}, {"n1": 360.0}, {"n2"}),
        ({"n1": 0.0, "n2": 0.0}, {"n1": 380.0}, set()),
        # Two of three are left, which is half or more.
        ({"n1": 0.0, "n2": 0.0, "n3": 0.0}, {"n1": 360.0}, set()),
        # Half of the nodes fell silent at once, the others call.
        ({"n1": 0.0, "n2": 50.0, "n3": 1_000.0, "n4": 1_000.0}, {}, set()),
        # The same, one after the other.
        ({"n1": 0.0, "n2": 200.0, "n3": 1_000.0, "n4": 1_000.0}, {}, {"n1", "n2"}),
        # A minority: a rack that is dead.
        ({"n1": 0.0, "n2": 50.0, "n3": 1_000.0, "n4": 1_000.0, "n5": 1_000.0}, {}, {"n1", "n2"}),
        # One of them comes back late: the clock of the other starts again.
        ({"n1": 0.0, "n2": 0.0, "n3": 1_000.0, "n4": 1_000.0}, {"n1": 700.0}, set()),
        # The other node calls all the time.
        ({"n1": 0.0, "n2": 1_000.0}, {}, {"n1"}),
    ],
)
def test_nodes_that_fell_silent_at_once_are_not_lost_by_the_clock_as_soon_as_others(
    last: dict[str, float], back: dict[str, float], lost: set[str]
) -> None:
    drive = Drive(nodes=len(last))
    start = drive.now
    while drive.now < start + 1_000.0:
        seconds = drive.now - start
        calling = [node for node in last if seconds < last[node] or seconds >= back.get(node, 1e9)]
        pass_time(drive, 10.0, *calling)
    assert {node for node in last if state_of(drive, node) is NodeState.LOST} == lost


@pytest.mark.parametrize(("seconds", "lost"), [(1_250.0, False), (1_290.0, True)])
def test_half_of_the_nodes_are_lost_after_twice_the_time_while_the_others_call(seconds: float, lost: bool) -> None:
    drive = Drive(nodes=4)
    pass_time(drive, seconds, "n3", "n4")
    assert {state_of(drive, node) is NodeState.LOST for node in ("n1", "n2")} == {lost}
    assert {state_of(drive, node) for node in ("n3", "n4")} == {NodeState.READY}


def test_an_operator_declares_one_of_the_nodes_lost_that_all_fell_silent_at_once() -> None:
    drive = Drive(nodes=2)
    numbers = [drive.submit(job_of(4)) for _ in range(2)]
    for number in numbers:
        drive.start(number)
        drive.runs(number)
    pass_time(drive, 700.0)
    (why,) = explain(drive.state, numbers[0], drive.now).blockers
    assert "all nodes fell silent at once: the master may be cut off" in why.detail
    drive.step(DeclareLost("n1"))
    pass_time(drive, 1_000.0)
    assert (state_of(drive, "n1"), state_of(drive, "n2")) == (NodeState.LOST, NodeState.SILENT)


def test_a_new_session_starts_the_clock_of_the_others_that_fell_silent_with_it() -> None:
    drive = Drive(nodes=2)
    pass_time(drive, 1_000.0)
    drive.join("n1")
    pass_time(drive, 600.0, "n1")
    assert state_of(drive, "n2") is NodeState.SILENT
    pass_time(drive, 50.0, "n1")
    assert state_of(drive, "n2") is NodeState.LOST
