"""An operator can make the master forget a node that does not come back, but not one that may be alive."""

from __future__ import annotations

import pytest
from core.drive import Drive, job_of
from faultsim.state_invariants import violations
from ganger.job_state import JobState
from ganger_master.core.answers import Done, Refused
from ganger_master.core.commands import DeclareLost, RemoveNode
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.node_model import NodeState
from ganger_master.core.state_image import restored


def refusal(drive: Drive, node: str) -> str:
    answer = drive.step(RemoveNode(node))
    return answer.reason if isinstance(answer, Refused) else ""


def fall_silent(drive: Drive) -> None:
    drive.now += drive.state.settings.session_alive_s


def restarted(drive: Drive) -> None:
    """Restart the master of the same cluster."""
    state = drive.state
    elements = [
        state.counters,
        *state.nodes.configuration_sets.values(),
        *state.nodes.values(),
        *state.jobs.values(),
        *state.gangs.values(),
    ]
    drive.state = restored(state.settings, elements, drive.now)
    assert violations(drive.state) == []


def test_a_lost_node_and_what_was_lost_with_it_are_forgotten() -> None:
    drive = Drive(nodes=2)
    number = drive.submit(job_of(8))
    epoch = drive.start(number)
    drive.runs(number)
    fall_silent(drive)
    drive.step(DeclareLost("n1"))
    drive.seen(number, epoch, ObservedPhase.ENDED)
    assert epoch in drive.state.gangs, "n1 may still have it"
    drive.state.take_changes()
    assert isinstance(drive.step(RemoveNode("n1")), Done)
    assert set(drive.state.nodes) == {"n2"} == set(drive.state.view.names()) == set(drive.state.gangs.places_on)
    assert epoch not in drive.state.gangs
    assert ("node", "n1") in drive.state.take_changes().removes
    assert drive.history[-1].kind == "node_removed"
    assert drive.job(number).state is JobState.PENDING
    restarted(drive)
    assert set(drive.state.nodes) == {"n2"}


def test_a_gang_that_is_still_being_stopped_elsewhere_outlives_the_removed_node() -> None:
    drive = Drive(nodes=2)
    number = drive.submit(job_of(8))
    epoch = drive.start(number)
    drive.runs(number)
    fall_silent(drive)
    drive.step(DeclareLost("n1"))
    assert isinstance(drive.step(RemoveNode("n1")), Done)
    restarted(drive)
    drive.join("n2")
    gang = drive.state.gangs[epoch]
    drive.observe("n2", drive.report(gang, ObservedPhase.ENDED))
    assert epoch not in drive.state.gangs
    assert set(drive.state.gangs.places_on) == {"n2"}


def test_a_gang_that_still_stops_gets_no_address_of_the_removed_node() -> None:
    drive = Drive(nodes=2)
    number = drive.submit(job_of(8))
    epoch = drive.start(number)
    drive.runs(number)
    drive.observe("n1", drive.report(drive.state.gangs[epoch], ObservedPhase.ENDED))
    drive.observe("n2", drive.report(drive.state.gangs[epoch], ObservedPhase.RUNNING))
    fall_silent(drive)
    assert isinstance(drive.step(RemoveNode("n1")), Done)
    (told,) = drive.state.desired["n2"].gangs
    assert {member.node: member.peer_address for member in told.members} == {"n1": "", "n2": "n2:1"}
    restarted(drive)
    assert drive.state.desired["n2"].gangs == (told,), "as a master tells it that has never heard of the removed one"


def test_a_node_is_not_removed_while_it_answers_or_a_job_has_something_on_it() -> None:
    drive = Drive(nodes=1)
    assert refusal(drive, "n1") == "NODE_ALIVE"
    assert refusal(drive, "n7") == "NODE_NOT_FOUND"
    drive.start(drive.submit(job_of(1)))
    fall_silent(drive)
    assert refusal(drive, "n1") == "NODE_BUSY"
    # After a restart it is unknown whether the job runs there.
    restarted(drive)
    assert drive.state.nodes["n1"].state is NodeState.UNKNOWN
    assert refusal(drive, "n1") == "NODE_BUSY"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_silent_node_with_nothing_on_it_need_not_be_lost_first(is_restarted: bool) -> None:
    drive = Drive(nodes=2)
    fall_silent(drive)
    if is_restarted:
        restarted(drive)
    assert refusal(drive, "n1") == ""
    assert (drive.state.nodes.devices, drive.state.nodes.free_devices) == ((0, 0) if is_restarted else (4, 4))
    assert "n1" not in drive.state.nodes.last_answer


def test_a_removed_node_that_comes_back_is_a_new_one_and_stops_what_it_still_has() -> None:
    drive = Drive(nodes=1)
    number = drive.submit(job_of(1))
    epoch = drive.start(number)
    drive.runs(number)
    found = drive.report(drive.state.gangs[epoch], ObservedPhase.RUNNING)
    fall_silent(drive)
    drive.step(DeclareLost("n1"))
    drive.step(RemoveNode("n1"))
    drive.join("n1")
    drive.observe("n1", found)
    (stray,) = drive.state.nodes["n1"].strays
    assert (stray.epoch, stray.quarantined) == (epoch, False)
    assert drive.state.desired["n1"].gangs[0].intent == "STOP"
