"""From when on a node says that it knows a matrix: a leader that counted on gangs before would end the turn of one that
is launched on some of its nodes only, and that one could not rest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ganger.agent.v1 import agent_pb2, peer_pb2
from ganger_daemon.node.gang_set import GangSet

ROWS = agent_pb2.DesiredSlices(node_set=9, version=2, slices=[agent_pb2.Slice(epochs=[7])], set_epoch=1)
WANTED = agent_pb2.DesiredGang(
    job="jobs/1",
    job_uid="uid",
    epoch=7,
    intent=agent_pb2.INTENT_RUN,
    order=agent_pb2.OrderKey(epoch=7, master_sequence=1),
)


class Recorded(GangSet):
    """What it says while it begins gangs, which it does not."""

    def __init__(self, state: Path) -> None:
        host: Any = SimpleNamespace(paths=SimpleNamespace(state=state), node="n1", changed=lambda: None)
        super().__init__(host, peers=SimpleNamespace())  # type: ignore[arg-type]
        self.said: list[int] = []

    async def known(self) -> int:
        answer = await self.rotation.receive_order(peer_pb2.SliceOrder(node_set=9, is_query=True))
        return int(answer.known_version)

    async def _act(self, action: object, messages: object) -> None:
        self.said.append(await self.known())


def test_a_node_knows_a_matrix_once_the_gangs_that_were_told_with_it_have_begun(tmp_path: Path) -> None:
    async def told() -> None:
        gangs = Recorded(tmp_path)
        await gangs.apply([WANTED], frozenset(), [ROWS])
        assert gangs.said == [0]
        assert await gangs.known() == 2

    asyncio.run(told())


def test_a_daemon_that_restarts_knows_none_before_it_is_told_again(tmp_path: Path) -> None:
    """Of a gang that was never launched it has nothing."""

    async def told_twice() -> None:
        await Recorded(tmp_path).apply([WANTED], frozenset(), [ROWS])
        gangs = Recorded(tmp_path)
        gangs.rotation.recall()
        assert await gangs.known() == 0
        await gangs.apply([], frozenset(), [ROWS])
        assert await gangs.known() == 2

    asyncio.run(told_twice())
