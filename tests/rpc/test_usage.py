"""GetUsage: teams of the settings, users with use, and what a restart keeps."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ganger.agent.v1 import agent_pb2
from ganger.v1 import scheduling_pb2, usage_pb2
from ganger.wire import times
from ganger_master.core.accounting import DAY_S
from ganger_master.core.tenancy import Team
from rpc.kit import Served, Speaker, serving, spec_of
from rpc.test_agent_and_scheduling_service import approved, claim

TEAMS = {"vision": Team(("ann",), 3.0, 8), "others": Team(("*",))}


async def _run(served: Served) -> None:
    """Let a job of two GPUs run."""
    node = Speaker(served, "n1")
    await node.join()
    host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
    await served.submit(spec_of(2))
    assert (await approved(served, host, claim("n1", 0b11))).HasField("approved")
    (wanted,) = (await node.reconcile(max_wait_seconds=10.0)).gangs
    running = agent_pb2.ObservedGang(
        job=wanted.job,
        job_uid=wanted.job_uid,
        epoch=wanted.epoch,
        order=wanted.order,
        phase=agent_pb2.ObservedGang.PHASE_RUNNING,
    )
    await node.reconcile([running])
    host.cancel()


def test_use_is_reported_by_team_and_survives_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, teams=TEAMS) as served:
            await _run(served)
            found = await served.jobs.GetUsage(usage_pb2.GetUsageRequest())
            assert [team.team for team in found.teams] == ["vision", "others"]
            assert [team.share for team in found.teams] == [0.75, 0.25]
            assert (found.teams[0].gpus_limit, found.teams[1].HasField("gpus_limit")) == (8, False)
            assert found.teams[0].users[0].user == "ann"
            (user,) = found.teams[1].users
            assert (user.running_gpus, user.used_share) == (2.0, 1.0)
            assert times.unix_s(found.since_time) % DAY_S == 0.0
            assert times.seconds(found.half_life) == 7 * DAY_S
        async with serving(tmp_path, teams=TEAMS) as served:
            later = await served.jobs.GetUsage(usage_pb2.GetUsageRequest())
            assert later.teams[1].users[0].running_gpus == 2.0
            assert later.teams[1].users[0].gpu_seconds > user.gpu_seconds

    asyncio.run(story())
