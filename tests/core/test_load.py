"""Light load spreads gangs, heavy load packs them, and the mode does not flutter in between."""

from __future__ import annotations

from itertools import pairwise

from core.drive import SERVER, Drive, job_of
from ganger.cluster.view import LoadMode
from ganger_master.core.answers import SessionAnswer
from ganger_master.core.commands import CancelJob, CordonNode, DeclareLost, OpenSession
from ganger_master.core.gang_model import ObservedPhase
from ganger_master.core.state import State
from ganger_master.core.state_image import restored


def test_a_load_that_rises_and_falls_again_flips_the_mode_exactly_twice() -> None:
    drive = Drive(5)
    modes = [drive.state.view.mode]
    numbers = []
    for _ in range(18):
        numbers.append(drive.submit(job_of(1)))
        drive.start(numbers[-1])
        modes.append(drive.state.view.mode)
    while len(numbers) > 4:
        number = numbers.pop()
        node = drive.state.gangs[drive.job(number).epoch].nodes[0]
        drive.step(CancelJob(number))
        drive.seen_without(node, number)
        modes.append(drive.state.view.mode)
    flips = [after for before, after in pairwise(modes) if before is not after]
    assert flips == [LoadMode.PACK, LoadMode.SPREAD]
    assert modes[0] is LoadMode.SPREAD
    told = [event for event in drive.history if event.kind == "mode_changed"]
    assert [(event.subject, event.cause, event.figures) for event in told] == [
        ("cluster", "load", {"mode": "PACK", "held": "14", "of": "20"}),
        ("cluster", "load", {"mode": "SPREAD", "held": "7", "of": "20"}),
    ]


def test_a_restarted_master_keeps_the_mode_until_all_nodes_have_reported() -> None:
    drive = Drive(2)
    for _ in range(6):
        drive.start(drive.submit(job_of(1)))
    number = 6
    node = drive.state.gangs[drive.job(number).epoch].nodes[0]
    drive.step(CancelJob(number))
    drive.seen_without(node, number)
    # 5 of 8: neither heavy nor light.
    assert drive.state.view.mode is LoadMode.PACK
    drive.state = restarted(drive)
    assert drive.state.view.mode is LoadMode.PACK
    drive.history.clear()
    for node in ("n1", "n2"):
        answer = drive.step(OpenSession(node, f"machine-{node}", SERVER))
        assert isinstance(answer, SessionAnswer)
        drive.sessions[node] = answer.session
        assert drive.state.view.mode is LoadMode.PACK
    for node in ("n1", "n2"):
        running = [drive.report(gang, ObservedPhase.RUNNING) for gang in drive.on(node)]
        drive.observe(node, *running, version=0)
        assert drive.state.view.mode is LoadMode.PACK
    assert not [event for event in drive.history if event.kind == "mode_changed"]


def test_a_node_that_is_lost_after_a_restart_is_waited_for_no_longer() -> None:
    drive = Drive(2)
    for _ in range(6):
        drive.start(drive.submit(job_of(1)))
    drive.state = restarted(drive)
    drive.step(OpenSession("n1", "machine-n1", SERVER))
    drive.sessions["n1"] = drive.state.nodes["n1"].session
    drive.observe("n1", version=0)
    for number in list(drive.state.jobs.live):
        drive.step(CancelJob(number))
    drive.observe("n1")
    assert drive.state.view.mode is LoadMode.PACK
    drive.now += 60.0
    drive.step(DeclareLost("n2"))
    assert drive.state.view.mode is LoadMode.SPREAD


def test_a_node_that_takes_no_gangs_may_be_the_last_to_report_after_a_restart() -> None:
    drive = Drive(2)
    numbers = [drive.submit(job_of(1)) for _ in range(6)]
    for number in numbers:
        drive.start(number)
    drive.step(CordonNode("n2", "repair"))
    drive.state = restarted(drive)
    for number in numbers:
        drive.step(CancelJob(number))
    drive.step(OpenSession("n1", "machine-n1", SERVER))
    drive.sessions["n1"] = drive.state.nodes["n1"].session
    drive.observe("n1", version=0)
    drive.observe("n1")
    assert (drive.state.nodes.free_devices, drive.state.view.mode) == (drive.state.nodes.devices, LoadMode.PACK)
    drive.step(OpenSession("n2", "machine-n2", SERVER))
    drive.sessions["n2"] = drive.state.nodes["n2"].session
    drive.observe("n2", version=0)
    assert drive.state.view.mode is LoadMode.SPREAD


def restarted(drive: Drive) -> State:
    """Return the state of a restarted master."""
    state = drive.state
    elements = [
        *state.nodes.configuration_sets.values(), *state.nodes.values(), *state.jobs.values(), *state.gangs.values(),
        state.counters,
    ]  # fmt: skip
    return restored(state.settings, elements, drive.now)


def test_load_is_counted_over_nodes_that_take_gangs() -> None:
    drive = Drive(2)
    drive.start(drive.submit(job_of(3)))
    assert drive.state.view.mode is LoadMode.SPREAD
    held = drive.state.gangs[drive.job(1).epoch].nodes[0]
    drive.step(CordonNode("n1" if held == "n2" else "n2", "repair"))
    assert drive.state.view.mode is LoadMode.PACK
