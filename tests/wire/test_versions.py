"""Two programs use the highest version of the wire that both speak, or the call says which one to upgrade."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from ganger.agent.v1 import agent_pb2
from ganger.v1 import node_pb2
from ganger.wire.channels import (
    SUPPORTED_VERSIONS,
    UNSTATED_VERSIONS,
    VERSIONS_KEY,
    WireVersions,
    common_version,
    open_aio_channel,
    read_versions,
    stated_versions,
)
from ganger.wire.endpoints import Endpoint
from ganger.wire.errors import RequestInvalid, WireVersionUnsupported, from_rpc_error
from ganger.wire.servers import bind, make_server


@pytest.mark.parametrize(
    ("caller", "server", "common"),
    [((1, 1), (1, 2), 1), ((1, 2), (1, 1), 1), ((1, 2), (2, 3), 2), ((2, 5), (1, 4), 4), ((3, 3), (3, 3), 3)],
)
def test_the_highest_common_version_is_used(caller: tuple[int, int], server: tuple[int, int], common: int) -> None:
    assert common_version(WireVersions(*caller), WireVersions(*server)) == common


def test_a_refusal_names_both_ranges_and_the_side_to_upgrade() -> None:
    with pytest.raises(WireVersionUnsupported) as old_daemon:
        common_version(WireVersions(1, 2), WireVersions(3, 4), names=("daemon", "master"))
    assert str(old_daemon.value) == ("the daemon speaks versions 1-2 of the wire, the master 3-4: upgrade the daemon")
    with pytest.raises(
        WireVersionUnsupported, match="3-4 of the wire, the master 1-2: upgrade the master"
    ) as old_master:
        common_version(WireVersions(3, 4), WireVersions(1, 2), names=("daemon", "master"))
    assert old_master.value.metadata == {"caller": "3-4", "server": "1-2"}


@pytest.mark.parametrize("text", ["", "2", "2-1", "0-2", "1-", "-1-2", "1-2 ", "1-9999999", "a-b", "\u0661-\u0662"])
def test_a_range_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(RequestInvalid, match="OLDEST-NEWEST"):
        read_versions(text)


def test_a_range_is_read_as_it_is_written() -> None:
    assert read_versions(str(SUPPORTED_VERSIONS)) == SUPPORTED_VERSIONS


def test_this_program_speaks_the_version_of_peers_that_state_none() -> None:
    assert common_version(UNSTATED_VERSIONS) == UNSTATED_VERSIONS.newest


@pytest.mark.parametrize("message", [agent_pb2.CreateSessionRequest, agent_pb2.Session])
def test_daemons_and_masters_state_their_versions_in_a_session_and_those_of_0_1_state_none(message: Any) -> None:
    assert stated_versions(message()) == UNSTATED_VERSIONS
    assert stated_versions(message(wire_versions=agent_pb2.WireVersions(oldest=3, newest=5))) == WireVersions(3, 5)


async def get(request: node_pb2.GetNodeRequest, context: Any) -> node_pb2.Node:
    stated = dict(context.invocation_metadata() or ()).get(VERSIONS_KEY)
    return node_pb2.Node(name=request.name, state_reason=str(stated))


def calling(method: str, metadata: tuple[tuple[str, str], ...] | None) -> node_pb2.Node:
    """Call `method` of a real server: by a channel of Ganger, or by a plain one with `metadata`."""

    async def body() -> node_pb2.Node:
        server = make_server()
        service, _, name = method.strip("/").rpartition("/")
        handler = grpc.unary_unary_rpc_method_handler(
            get, node_pb2.GetNodeRequest.FromString, node_pb2.Node.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        address = bind(server, "127.0.0.1:0")
        await server.start()
        channel = open_aio_channel(Endpoint(address, "")) if metadata is None else grpc.aio.insecure_channel(address)
        try:
            call = channel.unary_unary(method, node_pb2.GetNodeRequest.SerializeToString, node_pb2.Node.FromString)
            return await call(node_pb2.GetNodeRequest(name="nodes/a"), metadata=metadata)  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            await channel.close()
            await server.stop(None)

    return asyncio.run(body())


GET = "/ganger.v1.NodeService/GetNode"


def test_each_call_states_the_versions_of_its_program() -> None:
    assert calling(GET, None).state_reason == str(SUPPORTED_VERSIONS)


@pytest.mark.parametrize("metadata", [(), ((VERSIONS_KEY, "1-1"),), ((VERSIONS_KEY, "2-9"),)])
def test_a_caller_with_a_common_version_is_served(metadata: tuple[tuple[str, str], ...]) -> None:
    assert calling(GET, metadata).name == "nodes/a"


def test_a_caller_without_a_common_version_is_refused_by_every_method() -> None:
    newer = ((VERSIONS_KEY, "8-9"),)
    for method in (GET, "/ganger.v1.JobService/GetJob", "/ganger.agent.v1.PeerService/SwitchRow"):
        with pytest.raises(WireVersionUnsupported, match=rf"client speaks versions 8-9 .*{SUPPORTED_VERSIONS}.*server"):
            calling(method, newer)


def test_a_range_that_cannot_be_read_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(RequestInvalid, match="state the range"):
        calling(GET, ((VERSIONS_KEY, "new"),))
