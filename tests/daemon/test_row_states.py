"""Reports of a member of a time-slice group to its leader: all fields arrive, and gangs that the
master parked differ from those that a switch parked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger.protocol.slice_rotation import SliceMember, SlicePosition, SliceSwitch
from ganger_daemon.core.gang_judgement import PartPhase
from ganger_daemon.node.slice_rotation import Rotation, member_from_wire, state_to_wire

SAID = SliceMember(
    SlicePosition(SliceSwitch(2, 5), 3, 1, {7: SliceSwitch(2, 4)}, regular_row=1),
    known_version=4,
    started=True,
    alive=frozenset({7, 8}),
    running=frozenset({8}),
    switch_s=0.25,
    unstarted=frozenset({7}),
    blocked=True,
    resting=frozenset({9, 10}),
)


def test_all_that_a_member_says_arrives() -> None:
    sent = state_to_wire(12, SAID).SerializeToString()
    assert member_from_wire(peer_pb2.SliceMember.FromString(sent)) == SAID


@pytest.mark.parametrize(
    ("intent", "phase", "rests"),
    [
        (agent_pb2.INTENT_PARK, PartPhase.PARKED, True),
        (agent_pb2.INTENT_HAND_OVER, PartPhase.PARKED, True),
        # On its way: it may wait for the others of its gang.
        (agent_pb2.INTENT_PARK, PartPhase.RUNNING, False),
        # For another's turn.
        (agent_pb2.INTENT_RUN, PartPhase.PARKED, False),
        (agent_pb2.INTENT_STOP, PartPhase.ENDED, False),
    ],
)
def test_a_gang_parked_by_the_master_is_reported_as_resting(
    intent: agent_pb2.Intent, phase: PartPhase, rests: bool, tmp_path: Path
) -> None:
    gang = SimpleNamespace(
        desired=SimpleNamespace(epoch=7),
        master_desired=SimpleNamespace(intent=intent),
        wanted=SimpleNamespace(stop_sequence=0, intent=intent, order=SimpleNamespace(set_epoch=0, local_sequence=0)),
        phase=phase,
        launched=True,
    )
    host: Any = SimpleNamespace(paths=SimpleNamespace(state=tmp_path), node="n1", changed=lambda: None)
    rotation = Rotation(host, SimpleNamespace(), lambda: [gang], lambda gang: "")  # type: ignore[arg-type]
    rotation.set_desired(
        [agent_pb2.DesiredSlices(node_set=9, version=2, slices=[agent_pb2.Slice(epochs=[7])], set_epoch=1)]
    )
    answer = asyncio.run(rotation.receive_order(peer_pb2.SliceOrder(node_set=9, is_query=True)))
    assert list(answer.resting_epochs) == ([7] if rests else [])
