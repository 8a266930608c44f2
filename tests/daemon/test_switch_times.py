"""What a node makes of the switches it has measured, by which quanta are as long as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ganger.agent.v1 import agent_pb2
from ganger.protocol.group_rotation import GroupRotation
from ganger.protocol.slice_rotation import SlicePosition, SliceSwitch
from ganger.wire import times
from ganger_daemon.core.gang_judgement import PartPhase
from ganger_daemon.gang.gang_context import wanted_of
from ganger_daemon.node.slice_rotation import Rotation, order_to_wire

SECOND = 10**9


def seconds_after(switches: list[float]) -> float:
    """Return what a group takes a switch to last after these ones."""
    rotation = GroupRotation(1, "n1", 0.0)
    rotation.launches = False
    for seconds in switches:
        rotation.note_switch(seconds)
    return rotation.switch_s


@pytest.mark.parametrize("switches", [[4.0, 0.1], [0.1, 4.0], [0.1, 4.0, 0.1], [4.0, 0.1, 0.1, 4.0]])
def test_a_switch_that_was_late_makes_no_quantum_long_once_others_were_not(switches: list[float]) -> None:
    assert seconds_after(switches) == 0.1


def test_switches_that_take_long_are_believed() -> None:
    assert seconds_after([]) == 0.0
    assert seconds_after([4.0]) == 4.0
    assert seconds_after([4.0, 4.1, 0.1, 4.2, 3.9]) == 4.0


def gang(epoch: int, phase: PartPhase, first_step: float, last_step: float) -> Any:
    desired = agent_pb2.DesiredGang(epoch=epoch, intent=agent_pb2.INTENT_RUN)
    desired.claim.device_mask = 1
    desired.order.epoch = epoch
    wanted = wanted_of(desired)
    rate = SimpleNamespace(
        first_step_ns=int(first_step * SECOND), last_step_ns=int(last_step * SECOND), iteration_s=0.0
    )
    return SimpleNamespace(
        desired=desired,
        master_desired=desired,
        wanted=wanted,
        phase=phase,
        launched=True,
        stop_wanted=False,
        cannot_park=False,
        node_set=9,
        report=SimpleNamespace(judged=SimpleNamespace(order=wanted), has_stepped=True),
        parts=SimpleNamespace(boundary=SimpleNamespace(peer_agreement=0), step_rate=rate),
        apply_order=lambda desired: None,
    )


def switch_seconds_after_an_order(gangs: list[Any], switched: Any, path: Path) -> float:
    """Return the seconds that the node reports for a switch, after an order to run epoch 7 and a call of `switched`."""
    host: Any = SimpleNamespace(paths=SimpleNamespace(state=path), node="n1", changed=lambda: None)
    rotation = Rotation(host, SimpleNamespace(), lambda: gangs, lambda gang: "")  # type: ignore[arg-type]
    rows = [agent_pb2.Slice(epochs=[7]), agent_pb2.Slice(epochs=[8])]
    rotation.set_desired([agent_pb2.DesiredSlices(node_set=9, version=1, slices=rows, set_epoch=1)])
    rotation.confirm_begun()
    order = order_to_wire(9, SlicePosition(SliceSwitch(1, 1), 1, 0, {8: SliceSwitch(1, 1)}))
    asyncio.run(rotation.receive_order(order))
    switched()
    rotation.follow()
    (said,) = rotation.observed()
    return times.seconds(said.switch_duration)


def test_a_gang_that_rested_long_before_a_switch_does_not_make_it_long(tmp_path: Path) -> None:
    # Both came back from a suspend: epoch 8 rests since second 10, and epoch 7 goes on in second 70.
    goes_on, rests = gang(7, PartPhase.PARKED, 1, 9), gang(8, PartPhase.PARKED, 1, 10)

    def switched() -> None:
        goes_on.phase, goes_on.parts.step_rate.first_step_ns = PartPhase.RUNNING, 70 * SECOND

    assert switch_seconds_after_an_order([goes_on, rests], switched, tmp_path) == 0.0


def test_a_gang_that_ran_before_a_switch_did_not_come_at_it(tmp_path: Path) -> None:
    # Epoch 8 was suspended in second 10, epoch 7 took a second to go on alone, and now both take turns.
    runs, rests = gang(7, PartPhase.RUNNING, 11, 30), gang(8, PartPhase.PARKED, 1, 10)
    assert switch_seconds_after_an_order([runs, rests], lambda: None, tmp_path) == 0.0


def test_a_switch_takes_from_the_last_step_of_the_gang_that_left_to_the_first_of_the_other(tmp_path: Path) -> None:
    comes, leaves = gang(7, PartPhase.PARKED, 1, 9), gang(8, PartPhase.RUNNING, 10, 20)

    def switched() -> None:
        leaves.phase = PartPhase.PARKED
        comes.phase, comes.parts.step_rate.first_step_ns = PartPhase.RUNNING, int(20.5 * SECOND)

    assert switch_seconds_after_an_order([comes, leaves], switched, tmp_path) == 0.5
