"""Placement of jobs that fail over and over."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ganger.agent.v1 import agent_pb2
from ganger.v1 import job_service_pb2, scheduling_pb2
from rpc.kit import Served, Speaker, serving, spec_of, until
from rpc.test_log_proxy import placed


async def fails(served: Served, node: Speaker) -> None:
    await placed(served, node.node)
    (gang,) = (await node.reconcile([])).gangs
    ended = agent_pb2.ObservedGang(
        job=gang.job,
        job_uid=gang.job_uid,
        epoch=gang.epoch,
        phase=agent_pb2.ObservedGang.PHASE_ENDED,
        outcome=agent_pb2.Outcome(kind=agent_pb2.Outcome.KIND_FAILED, exit_code=1),
    )
    await node.reconcile([ended])
    jobs = served.master.writer.committed.jobs
    await until(lambda: not jobs[1].epoch)


def test_a_planner_does_not_see_it_until_it_is_tried_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, restart_delay_s=1.0) as served:
            node = Speaker(served, "n1")
            await node.join()
            await served.submit(spec_of(max_failures=9))
            watch = served.scheduling.WatchCluster(scheduling_pb2.WatchClusterRequest())
            known: set[str] = set()

            async def told() -> None:
                async for delta in watch:
                    known.update(job.job for job in delta.jobs)
                    known.difference_update(delta.removed_jobs)

            watching = asyncio.create_task(told())
            await fails(served, node)
            await until(lambda: known == {"jobs/1"})
            await fails(served, node)
            await until(lambda: known == set())
            shown = await served.jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/1"))
            assert [one.reason for one in shown.blockers] == ["FAILING"]
            await until(lambda: known == {"jobs/1"})
            await placed(served, "n1")
            watching.cancel()

    asyncio.run(story())
