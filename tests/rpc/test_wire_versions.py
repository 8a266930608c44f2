"""A master serves peers of the version of the wire before its own, and names what to upgrade for any other."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from ganger.agent.v1 import agent_pb2
from ganger.v1 import node_pb2, resources_pb2, scheduling_pb2
from ganger.wire.channels import NEWEST_VERSION, SUPPORTED_VERSIONS, TOKEN_KEY, VERSIONS_KEY
from ganger.wire.errors import WireVersionUnsupported, from_rpc_error
from kit.recorded_wire import RecordedWire
from rpc.kit import Served, serving

BEFORE = NEWEST_VERSION - 1
AGENTS, JOBS, NODES = "/ganger.agent.v1.AgentService/", "/ganger.v1.JobService/", "/ganger.v1.NodeService/"


def fields_of_node(name: str, **more: Any) -> dict[str, Any]:
    sockets = [{"millicores": 8000, "device_mask": 15}]
    hardware = {
        "name": "four", "device_type": "virtual", "devices": 4, "device_memory_bytes": 1 << 30, "sockets": sockets,
        "memory_bytes": 64 << 30,
    }  # fmt: skip
    return {
        "node": f"nodes/{name}", "machine_uuid": name, "boot_id": "boot", "configuration_set": hardware,
        "peer_address": "127.0.0.1:1", "stream_address": "127.0.0.1:2", **more,
    }  # fmt: skip


async def open_session(served: Served, oldest: int, newest: int) -> agent_pb2.Session:
    """Open a session as a daemon that speaks the versions `oldest` to `newest`."""
    versions = agent_pb2.WireVersions(oldest=oldest, newest=newest)
    request = agent_pb2.CreateSessionRequest(**fields_of_node("n1"), wire_versions=versions)
    try:
        return await served.agents.CreateSession(request)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def test_a_daemon_and_a_client_of_the_version_before_start_a_job(tmp_path: Path) -> None:
    async def story() -> None:
        wire = RecordedWire(BEFORE)
        async with serving(tmp_path) as served, grpc.aio.insecure_channel(served.master.address) as channel:
            token, versions = f"Bearer {served.master.token}", f"{BEFORE}-{BEFORE}"
            metadata = ((TOKEN_KEY, token), (VERSIONS_KEY, versions))

            async def call(path: str, **fields: Any) -> Any:
                request = wire.message(wire.listing.methods[path].request)(**fields)
                return await wire.call(channel, path)(request, metadata=metadata, timeout=10.0)

            session = await call(f"{AGENTS}CreateSession", **fields_of_node("n1"))
            found = {"storage_token": session.storage_token}
            session = await call(f"{AGENTS}CreateSession", **fields_of_node("n1", **found))
            poll = {"session": session.session, "storage_proved": True, "changed": True}
            await call(f"{AGENTS}Reconcile", observation=1, **poll)
            shape = {"gpus": 1, "millicores": 2000, "memory_bytes": 1 << 30}
            role = {"name": "worker", "tasks": 2, "shape": shape}
            spec = {"display_name": "old", "command": ["python"], "working_directory": "/", "roles": [role]}
            job = await call(f"{JOBS}CreateJob", spec=spec, request_id="1")
            assert job.spec.display_name == "old"
            epoch = await _approved(served, job.name)
            answer = await call(f"{AGENTS}Reconcile", observation=1, **poll)
            (gang,) = answer.gangs
            assert (gang.job, gang.epoch, bin(gang.claim.device_mask).count("1")) == (job.name, epoch, 2)
            assert gang.spec.command == ["python"]
            ranks = [{"rank": 0, "pid": 7, "start_ticks": 1}, {"rank": 1, "pid": 8, "start_ticks": 1}]
            observed = {"job": gang.job, "job_uid": gang.job_uid, "epoch": epoch, "phase": 4, "ranks": ranks}
            await call(f"{AGENTS}Reconcile", observation=2, gangs=[observed], **poll)
            shown = await call(f"{JOBS}GetJob", name=job.name)
            assert (list(shown.gang.pids), shown.gang.phase) == ([7, 8], 2)
            (node,) = (await call(f"{NODES}ListNodes")).nodes
            assert (node.name, node.state) == ("nodes/n1", 2)

    asyncio.run(story())


async def _approved(served: Served, job: str) -> int:
    """Request a gang of two devices on n1 for the job, and return its epoch."""
    claim = resources_pb2.Claim(node="nodes/n1", device_mask=3, millicores=[4000], memory_bytes=2 << 30, tasks=[2])
    candidate = scheduling_pb2.Candidate(claims=[claim])
    request = scheduling_pb2.GangRequest(job=job, revision=1, candidates=[candidate])
    verdict = await served.scheduling.RequestGang(request)
    assert verdict.HasField("approved"), verdict
    return verdict.approved.epoch


def test_a_session_uses_the_highest_version_that_daemon_and_master_speak(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            for oldest, newest in ((BEFORE, BEFORE), (BEFORE, NEWEST_VERSION), (NEWEST_VERSION, NEWEST_VERSION + 5)):
                session = await open_session(served, oldest, newest)
                assert session.wire_version == min(newest, NEWEST_VERSION)
                assert (session.wire_versions.oldest, session.wire_versions.newest) == SUPPORTED_VERSIONS

    asyncio.run(story())


def test_a_daemon_without_a_common_version_is_refused_and_operators_see_why(tmp_path: Path) -> None:
    async def story() -> None:
        newer = NEWEST_VERSION + 1
        sentence = (
            f"the daemon speaks versions {newer}-{newer} of the wire, the master {SUPPORTED_VERSIONS}: "
            "upgrade the master"
        )
        async with serving(tmp_path) as served:
            with pytest.raises(WireVersionUnsupported, match=re.escape(sentence)):
                await open_session(served, newer, newer)
            node = await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert (node.refusal, node.state_reason) == ("WIRE_VERSION_UNSUPPORTED", f"not accepted: {sentence}")
            await open_session(served, NEWEST_VERSION, newer)
            node = await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert node.refusal == ""

    asyncio.run(story())
