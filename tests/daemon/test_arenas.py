"""How much of a rank's arena is there before its state comes."""

from __future__ import annotations

import pytest
from ganger.agent.v1 import agent_pb2
from ganger.v1 import resources_pb2
from ganger_daemon.gang.launch_plan import bytes_ahead_per_rank

MIB = 1 << 20


def comes_from_an_arena(claimed: int, peak: int) -> agent_pb2.DesiredGang:
    return agent_pb2.DesiredGang(
        claim=resources_pb2.Claim(device_mask=0b11, arena_bytes=claimed),
        restore=agent_pb2.Restore(parked=agent_pb2.ParkedState(epoch=1, peak_device_bytes=peak)),
    )


@pytest.mark.parametrize(
    ("claimed", "peak", "ahead"),
    [
        (2000 * MIB, 200 * MIB, 220 * MIB),  # two devices for two ranks, and a tenth
        (2000 * MIB, 0, 1000 * MIB),  # unknown size: as much as possible
        (2000 * MIB, 5000 * MIB, 1000 * MIB),  # never more than there may be
        (2000 * MIB, MIB, 2 * MIB),  # in whole large pages
        (0, 200 * MIB, 0),  # nothing is claimed, so nothing may be charged before it is needed
    ],
)
def test_a_rank_gets_what_its_state_was_seen_to_need(claimed: int, peak: int, ahead: int) -> None:
    assert bytes_ahead_per_rank(comes_from_an_arena(claimed, peak), 2, 1000 * MIB) == ahead


def test_a_rank_that_starts_without_a_state_gets_its_arena_as_it_fills_it() -> None:
    gang = comes_from_an_arena(2000 * MIB, 200 * MIB)
    gang.restore.checkpoint_path = "checkpoints/step-5"
    assert bytes_ahead_per_rank(gang, 2, 1000 * MIB) == 0
