"""Storage that fails on a node, as the list of nodes shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ganger.agent.v1 import agent_pb2
from ganger.v1 import node_pb2, scheduling_pb2
from ganger.wire import times
from rpc.kit import Served, Speaker, serving
from rpc.test_agent_and_scheduling_service import approved, claim


async def reason_of(served: Served) -> str:
    return (await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))).state_reason


def test_a_node_shows_what_its_gangs_report_of_the_storage_by_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
            for device in range(2):
                await served.submit()
                assert (await approved(served, host, claim("n1", 1 << device))).HasField("approved")
            host.cancel()
            desired = (await node.reconcile()).gangs

            async def report(*troubles: str) -> None:
                running = agent_pb2.ObservedGang.PHASE_RUNNING
                await node.reconcile(
                    [
                        agent_pb2.ObservedGang(
                            job=gang.job, job_uid=gang.job_uid, epoch=gang.epoch, phase=running, trouble=trouble
                        )
                        for gang, trouble in zip(desired, troubles, strict=True)
                    ]
                )

            await report("STORAGE_HUNG: storage has not answered for 9 s", "STORAGE_HUNG: for 9 s")
            assert await reason_of(served) == "STORAGE_HUNG, reported by jobs/1, jobs/2: see `ganger why 1`"
            await report("no cores: none free", "STORAGE_FULL: checkpoints are skipped")
            assert await reason_of(served) == "STORAGE_FULL, reported by jobs/2: see `ganger why 2`"
            await report("", "")
            assert await reason_of(served) == ""

    asyncio.run(story())


def test_a_node_that_does_not_find_the_storage_shows_that(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.open()
            request = agent_pb2.ReconcileRequest(
                session=node.session, observation=1, changed=True, max_wait=times.duration(0.0)
            )
            await served.agents.Reconcile(request)
            assert "its daemon does not find the cluster's storage" in await reason_of(served)
            await node.join()
            assert await reason_of(served) == ""

    asyncio.run(story())
