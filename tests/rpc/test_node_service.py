"""Nodes as operators list them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from ganger.client import Client
from ganger.v1 import node_pb2
from ganger.wire.endpoints import Endpoint
from ganger.wire.errors import PageTokenInvalid, from_rpc_error
from ganger_master.core.commands import OpenSession
from ganger_master.core.gang_model import Matrix, TimesliceGroup
from ganger_master.core.job_model import SuspendLevel
from rpc.kit import Served, configuration_set, serving

# Ten times what a daemon on a GPU server reports: so few nodes fill several messages.
CAPABILITIES = {f"capability_{number}": "as it was found on this machine" for number in range(120)}


async def joined(served: Served, count: int) -> None:
    """So many nodes, every third of another configuration set, and a node set of each two."""
    for first in range(0, count, 1_000):
        numbers = range(first, min(first + 1_000, count))
        await served.master.writer.submit_all([session(number) for number in numbers])
    for number in range(1, count // 2 + 1):
        nodes = (f"n{2 * number - 2:05}", f"n{2 * number - 1:05}")
        matrix = Matrix(1, (), 60.0, SuspendLevel.PAUSE)
        served.master.writer.committed.sets[number] = TimesliceGroup(number, nodes, nodes[0], matrix)


def session(number: int) -> OpenSession:
    kind = configuration_set("eight", 8) if number % 3 == 0 else configuration_set()
    name = f"n{number:05}"
    return OpenSession(name, f"machine-of-{name}", kind, peer_address="10.11.12.13:14151", capabilities=CAPABILITIES)


def test_more_nodes_than_fit_into_two_messages_are_listed_whole_and_in_order(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await joined(served, 2_200)
            with Client(Endpoint(served.master.address, served.master.token)) as client:
                found = await asyncio.to_thread(client.list_nodes)
            assert found.ByteSize() > 2 * 4 * 1024 * 1024
            assert [node.name for node in found.nodes] == [f"nodes/n{number:05}" for number in range(2_200)]
            assert sorted(kind.name for kind in found.configuration_sets) == ["eight", "four"]
            assert [one.name for one in found.node_sets] == [f"nodeSets/{number}" for number in range(1, 1_101)]

    asyncio.run(story())


def test_a_client_without_pages_gets_what_fits_into_a_message(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await joined(served, 200)
            small = await served.nodes.ListNodes(node_pb2.ListNodesRequest())
            assert (len(small.nodes), len(small.node_sets), small.next_page_token) == (200, 100, "")
            await joined(served, 2_000)
            large = await served.nodes.ListNodes(node_pb2.ListNodesRequest())
            assert 200 < len(large.nodes) < 2_000
            assert large.next_page_token

    asyncio.run(story())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_pages_of_any_size_make_the_whole_list(tmp_path: Path, size: int) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await joined(served, 5)
            names, token = [], ""
            while True:
                page = await served.nodes.ListNodes(node_pb2.ListNodesRequest(page_size=size, page_token=token))
                names += [entry.name for entry in (*page.nodes, *page.node_sets)]
                assert len(page.nodes) + len(page.node_sets) <= size
                assert {kind.name for kind in page.configuration_sets} == {
                    node.configuration_set for node in page.nodes
                }
                token = page.next_page_token
                if not token:
                    break
            assert names == [f"nodes/n{number:05}" for number in range(5)] + ["nodeSets/1", "nodeSets/2"]

    asyncio.run(story())


@pytest.mark.parametrize("token", ["forged", "YWZ0ZXI6am9icy8x", "YmVmb3JlOm5vZGVzL24x", "é"])
def test_a_token_of_another_method_is_refused(tmp_path: Path, token: str) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await served.nodes.ListNodes(node_pb2.ListNodesRequest(page_token=token))
            assert isinstance(from_rpc_error(refused.value), PageTokenInvalid)

    asyncio.run(story())
