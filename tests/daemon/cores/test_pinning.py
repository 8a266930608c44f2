"""On which cores a gang is pinned when it goes on after a rest, and when its user asks for others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger_daemon.gang.core_pinning import CorePinning
from ganger_daemon.node.core_table import Core, CoreMap, CoreTable, Grant, adopt, declared_cores
from ganger_daemon.node.node_context import NodeContext


class Node:
    """What of a daemon's host has to do with cores: eight declared ones that stand for two CPUs."""

    change_cores, repin_cores, release_cores = (
        NodeContext.change_cores,
        NodeContext.repin_cores,
        NodeContext.release_cores,
    )
    shares_of, cpus_of, quota_of = NodeContext.shares_of, NodeContext.cpus_of, NodeContext.quota_of

    def __init__(self) -> None:
        self.core_table = CoreTable.empty(declared_cores(8, 1, (0, 1), housekeeping=0))
        self.pinned: list[tuple[int, ...]] = []
        self.quotas: list[float] = []
        self.cgroups = SimpleNamespace(
            set_cpus=lambda group, cpus: self.pinned.append(cpus),
            set_quota=lambda group, cpus: self.quotas.append(cpus),
        )

    def near(self, device_mask: int) -> tuple[int, ...]:
        return ()


def pinning_on(node: Any) -> CorePinning:
    context: Any = SimpleNamespace(
        host=node,
        paths=SimpleNamespace(group="gang"),
        pages=SimpleNamespace(threads=lambda: 1),
        part=SimpleNamespace(ranks=(0,)),
    )
    return CorePinning(context)


def wanted(repin_request: int = 0, millicores: int = 1000) -> agent_pb2.DesiredGang:
    desired = agent_pb2.DesiredGang(threads=1, repin_request=repin_request)
    desired.claim.millicores.append(millicores)
    return desired


def follow(pinning: CorePinning, desired: agent_pb2.DesiredGang) -> None:
    asyncio.run(pinning.follow(desired, 0.0))


def test_a_gang_that_goes_on_gets_the_cores_back_that_it_gave_up() -> None:
    node = Node()
    node.core_table = adopt(node.core_table, "gang", Grant(((5, 1000),)))
    pinning = pinning_on(node)
    follow(pinning, wanted())
    pinning.give_up()
    # Asked for more than once while it rests.
    pinning.give_up()
    assert node.shares_of("gang") == ()
    follow(pinning, wanted())
    assert node.shares_of("gang") == ((5, 1000),)


def test_other_cores_asked_for_as_a_gang_goes_on_are_others_than_it_had() -> None:
    for core in (4, 5):
        node = Node()
        node.core_table = adopt(node.core_table, "gang", Grant(((core, 1000),)))
        pinning = pinning_on(node)
        follow(pinning, wanted())
        before = node.cpus_of("gang")
        pinning.give_up()
        follow(pinning, wanted(repin_request=1))
        assert (pinning.repin_done, len(node.cpus_of("gang"))) == (1, 1)
        assert node.cpus_of("gang") != before
        assert node.pinned[-1] == node.cpus_of("gang")


def test_what_others_took_meanwhile_is_theirs() -> None:
    node = Node()
    node.core_table = adopt(node.core_table, "gang", Grant(((5, 1000),)))
    pinning = pinning_on(node)
    follow(pinning, wanted())
    pinning.give_up()
    node.core_table = adopt(node.core_table, "other", Grant(((5, 1000),)))
    follow(pinning, wanted())
    assert node.shares_of("gang") not in {(), ((5, 1000),)}


def test_a_gang_with_a_part_of_a_core_has_a_quota_until_it_has_whole_ones_again() -> None:
    node = Node()
    # Each core has two hardware threads.
    cores = tuple(Core(number, 0, (number, number + 4)) for number in range(4))
    node.core_table = adopt(CoreTable.empty(CoreMap((cores,))), "gang", Grant(((0, 1000),)))
    pinning = pinning_on(node)
    for millicores in (1000, 2500, 3000):
        follow(pinning, wanted(millicores=millicores))
    assert node.pinned == [(0, 1, 2, 4, 5, 6), (0, 1, 2, 4, 5, 6)]
    assert node.quotas == [5.0, 0.0]
