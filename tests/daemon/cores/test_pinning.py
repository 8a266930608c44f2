"""On which cores a gang is pinned when it goes on after a rest, and when its user asks for others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ganger.agent.v1 import agent_pb2
from ganger_daemon.gang.gang_context import LocalPart
from ganger_daemon.gang.taken_devices import CorePinning
from ganger_daemon.node.core_table import Core, CoreMap, CoreTable, declared_cores


class Node:
    """What of a daemon's host has to do with cores: eight declared ones that stand for two CPUs."""

    def __init__(self) -> None:
        self.cores = CoreTable(declared_cores(8, 1, (0, 1), housekeeping=0))
        self.inventory = SimpleNamespace(near=lambda device_mask: ())
        self.pinned: list[tuple[int, ...]] = []
        self.quotas: list[float] = []
        self.cgroups = SimpleNamespace(
            set_cpus=lambda group, cpus: self.pinned.append(cpus),
            set_quota=lambda group, cpus: self.quotas.append(cpus),
        )


def pinning_on(node: Any) -> CorePinning:
    context: Any = SimpleNamespace(
        host=node,
        paths=SimpleNamespace(group="gang"),
        pages=SimpleNamespace(threads=lambda: {0: 1}),
        part=LocalPart((0,), (1,), 1, True),
    )
    return CorePinning(context, SimpleNamespace(processes={}))  # type: ignore[arg-type]


def wanted(repin_request: int = 0, millicores: int = 1000) -> agent_pb2.DesiredGang:
    desired = agent_pb2.DesiredGang(threads=1, repin_request=repin_request)
    desired.claim.millicores.append(millicores)
    return desired


def follow(pinning: CorePinning, desired: agent_pb2.DesiredGang) -> None:
    asyncio.run(pinning.follow(desired, 0.0))


def test_a_gang_that_goes_on_gets_the_cores_back_that_it_gave_up() -> None:
    node = Node()
    node.cores.adopt("gang", ((5, 1000),))
    pinning = pinning_on(node)
    follow(pinning, wanted())
    pinning.give_up()
    # Asked for more than once while it rests.
    pinning.give_up()
    assert "gang" not in node.cores.held
    follow(pinning, wanted())
    assert node.cores.held["gang"] == ((5, 1000),)


def test_other_cores_asked_for_as_a_gang_goes_on_are_others_than_it_had() -> None:
    for core in (4, 5):
        node = Node()
        node.cores.adopt("gang", ((core, 1000),))
        pinning = pinning_on(node)
        follow(pinning, wanted())
        before = node.cores.cpus("gang")
        pinning.give_up()
        follow(pinning, wanted(repin_request=1))
        assert (pinning.repin_done, len(node.cores.cpus("gang"))) == (1, 1)
        assert node.cores.cpus("gang") != before
        assert node.pinned[-1] == node.cores.cpus("gang")


def test_what_others_took_meanwhile_is_theirs() -> None:
    node = Node()
    node.cores.adopt("gang", ((5, 1000),))
    pinning = pinning_on(node)
    follow(pinning, wanted())
    pinning.give_up()
    node.cores.adopt("other", ((5, 1000),))
    follow(pinning, wanted())
    assert node.cores.held["gang"] not in {(), ((5, 1000),)}


def test_a_gang_with_a_part_of_a_core_has_a_quota_until_it_has_whole_ones_again() -> None:
    node = Node()
    # Each core has two hardware threads.
    cores = tuple(Core(number, 0, (number, number + 4)) for number in range(4))
    node.cores = CoreTable(CoreMap((cores,)))
    node.cores.adopt("gang", ((0, 1000),))
    pinning = pinning_on(node)
    for millicores in (1000, 2500, 3000):
        follow(pinning, wanted(millicores=millicores))
    assert node.pinned == [(0, 1, 2, 4, 5, 6), (0, 1, 2, 4, 5, 6)]
    assert node.quotas == [5.0, 0.0]


def test_a_gang_that_shrinks_gets_fewer_threads_first_and_one_that_grows_gets_cores_first() -> None:
    node, done, threads = Node(), list[object](), {0: 1}
    node.cores.adopt("gang", ((5, 1000),))
    node.cgroups.set_cpus = lambda group, cpus: done.append(len(node.cores.ids(group)))
    pinning = pinning_on(node)

    def retune(wanted: dict[int, int]) -> int:
        threads.update(wanted)
        done.append(f"{wanted[0]} threads")
        return 0

    class Pages(SimpleNamespace):
        def __getitem__(self, rank: int) -> Any:
            return SimpleNamespace(get=lambda word: 0)

    pinning._pages = Pages(threads=lambda: dict(threads), retune=retune)  # type: ignore[assignment]
    for count in (4, 2):
        desired = wanted(millicores=1000 * count)
        desired.threads = count
        follow(pinning, desired)
    assert done == [4, "4 threads", "2 threads", 2]
