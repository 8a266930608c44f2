"""Why the master does not accept a node's daemon, as operators see it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from ganger.v1 import node_pb2
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint
from ganger.wire.errors import NotReady, StorageMismatch
from ganger_master.core.commands import OpenSession
from ganger_master.rpc.answer_messages import SessionRefusals
from rpc.certified import serving_certified
from rpc.kit import Served, Speaker, configuration_set, serving, until

MISMATCH = "not accepted: the storage directory belongs to another cluster; mount the right one or correct --storage"


async def refused(speaker: Speaker, storage_token: str = "") -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await speaker.open(storage_token)


async def reasons(served: Served) -> dict[str, str]:
    found = await served.nodes.ListNodes(node_pb2.ListNodesRequest())
    return {node.name: node.state_reason for node in found.nodes}


def test_a_node_whose_storage_is_anothers_shows_that_until_it_is_accepted(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node, other = Speaker(served, "n1"), Speaker(served, "n2")
            await other.join()
            token = (await node.join()).storage_token
            await refused(node, "another")
            assert await reasons(served) == {"nodes/n1": MISMATCH, "nodes/n2": ""}
            await node.open(token)
            assert await reasons(served) == {"nodes/n1": "", "nodes/n2": ""}

    asyncio.run(story())


def test_the_reason_of_an_operator_stays_beside_that_of_a_refusal(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            await served.nodes.DrainNode(node_pb2.DrainNodeRequest(name="nodes/n1", reason="new fan"))
            await refused(node, "another")
            assert await reasons(served) == {"nodes/n1": f"{MISMATCH}; new fan"}

    asyncio.run(story())


def test_a_node_that_was_never_accepted_is_listed_with_the_reason(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n2").join()
            await refused(Speaker(served, "n1"), "another")
            found = await served.nodes.ListNodes(node_pb2.ListNodesRequest(page_size=1))
            assert [(node.name, node.state, node.state_reason) for node in found.nodes] == [
                ("nodes/n1", node_pb2.Node.STATE_UNKNOWN, MISMATCH)
            ]
            assert not found.configuration_sets
            found = await served.nodes.ListNodes(node_pb2.ListNodesRequest(page_token=found.next_page_token))
            assert [node.name for node in found.nodes] == ["nodes/n2"]
            shown = await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert (shown.refusal, shown.state_reason) == ("STORAGE_MISMATCH", MISMATCH)

    asyncio.run(story())


def test_hardware_that_is_not_taken_is_shown_as_the_reason(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            # The set that every `Speaker` names, with other hardware.
            other = configuration_set("four", 8)
            await served.master.writer.submit(OpenSession("n1", "machine-of-n1", other))
            await refused(Speaker(served, "n2"))
            assert "'four' is known with other hardware" in (await reasons(served))["nodes/n2"]

    asyncio.run(story())


def test_a_connected_node_shows_nothing_of_a_refused_machine_with_its_name(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node, other = Speaker(served, "n1"), Speaker(served, "n1", machine="another")
            await node.join()
            await refused(other)
            assert "belongs to another machine" in (await reasons(served))["nodes/n1"]
            poll = asyncio.ensure_future(node.reconcile(max_wait_seconds=30.0))
            await until(lambda: served.is_held("n1"))
            assert await reasons(served) == {"nodes/n1": ""}
            await refused(other)
            assert await reasons(served) == {"nodes/n1": ""}
            poll.cancel()

    asyncio.run(story())


def test_a_daemon_without_the_token_leaves_no_entry(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served, open_aio_channel(Endpoint(served.master.address, "forged")) as channel:
            await refused(Speaker(Served(served.master, channel), "n1"))
            assert await reasons(served) == {}

    asyncio.run(story())


def test_a_daemon_with_the_certificate_of_another_node_is_shown_under_its_own_name(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving_certified(tmp_path) as certified:
            await refused(Speaker(certified.calls("daemon", "n2"), "n1"))
            await refused(Speaker(certified.calls("user", "alice"), "n3"))
            found = await reasons(certified.calls("operator", "root"))
            assert list(found) == ["nodes/n2"]
            assert "nodes/n1 is not this daemon's: its certificate is of nodes/n2" in found["nodes/n2"]

    asyncio.run(story())


def test_a_refusal_is_shown_as_long_as_its_daemon_goes_on_asking() -> None:
    now = 1_000.0
    refusals = SessionRefusals(lambda: now)
    refusals.note("n1", StorageMismatch("another storage"))
    now += 100.0
    refusals.note("n2", NotReady("the master is starting"))
    assert refusals.nodes() == ["n1"]
    now += 100.0
    assert (refusals.nodes(), refusals.of("n1").text) == ([], "")


def test_refusals_of_many_names_with_long_texts_take_bounded_memory() -> None:
    refusals = SessionRefusals(lambda: 1_000.0)
    for number in range(3_000):
        refusals.note(f"n{number}", StorageMismatch("x" * 100_000))
    assert refusals.nodes() == [f"n{number}" for number in range(2_000, 3_000)]
    assert len(refusals.of("n2999").text) == 500
