"""Job arrays over a real socket: made, listed folded, judged by what daemons report, cancelled whole."""

from __future__ import annotations

import asyncio
import math
import uuid
from pathlib import Path

import grpc
import pytest
from ganger.agent.v1 import agent_pb2
from ganger.v1 import array_pb2, job_pb2, job_service_pb2, scheduling_pb2
from ganger.wire.errors import from_rpc_error
from rpc.kit import Served, Speaker, serving, spec_of, until
from rpc.test_agent_and_scheduling_service import approved_for, claim

RULE = array_pb2.StopRule(kind=array_pb2.StopRule.KIND_HALVING, metric="accuracy", higher_is_better=True, first_rung=10)


def request(
    *lrs: str, request_id: str = "", at_once: int = 0, rule: array_pb2.StopRule | None = None
) -> job_service_pb2.CreateArrayRequest:
    members = [array_pb2.ArrayMember(index=index, parameters={"lr": lr}) for index, lr in enumerate(lrs)]
    return job_service_pb2.CreateArrayRequest(
        spec=spec_of(), members=members, request_id=request_id or str(uuid.uuid4()), max_concurrent=at_once, rule=rule
    )


async def reason(call: object) -> str:
    with pytest.raises(grpc.RpcError) as failed:
        await call  # type: ignore[misc]
    return from_rpc_error(failed.value).reason


async def told(served: Served, node: Speaker, job: str, epoch: int, accuracy: float, step: int) -> None:
    metric = job_pb2.Metric(name="accuracy", value=accuracy, step=step)
    progress = job_pb2.Progress(step=step, loss=math.nan, metrics=[metric])

    async def reports():  # type: ignore[no-untyped-def]
        gang = agent_pb2.GangProgress(job=job, epoch=epoch, progress=progress)
        yield agent_pb2.ProgressReport(session=node.session, gangs=[gang])

    await served.agents.ReportProgress(reports())


def test_an_array_is_made_once_and_survives_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        wanted = request("0.1", "0.2", "0.3", at_once=2, rule=RULE)
        async with serving(tmp_path) as served:
            made, again = await served.jobs.CreateArray(wanted), await served.jobs.CreateArray(wanted)
            assert (made.name, again.name, made.size, dict(made.states)) == (
                "arrays/1",
                "arrays/1",
                3,
                {"pending": 2, "held": 1},
            )
            await served.submit()
        async with serving(tmp_path) as served:
            everything = await served.jobs.ListJobs(job_service_pb2.ListJobsRequest())
            folded = await served.jobs.ListJobs(job_service_pb2.ListJobsRequest(without_members=True))
            members = await served.jobs.ListJobs(job_service_pb2.ListJobsRequest(array="arrays/1"))
            assert [job.name for job in everything.jobs] == ["jobs/5", "jobs/4", "jobs/3", "jobs/2"]
            assert [job.name for job in folded.jobs] == ["jobs/5"]
            assert [job.array.member.parameters["lr"] for job in members.jobs] == ["0.3", "0.2", "0.1"]
            assert [job.array.held for job in members.jobs] == [True, False, False]
            (listed,) = (await served.jobs.ListArrays(job_service_pb2.ListArraysRequest(live=True))).arrays
            assert (listed.rule.metric, listed.rule.resource, listed.rule.factor) == ("accuracy", "step", 2)
            other = request("0.1", request_id=wanted.request_id)
            assert await reason(served.jobs.CreateArray(other)) == "REQUEST_REUSED"

    asyncio.run(story())


def test_what_daemons_report_of_members_decides_which_members_stop(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
            await served.jobs.CreateArray(request("0.1", "0.2", rule=RULE))
            epochs = {}
            for device, lease in enumerate((await host.read()).leases):
                verdict = await approved_for(served, lease, claim("n1", 1 << device))
                epochs[verdict.job] = verdict.approved.epoch
            await node.reconcile(max_wait_seconds=10.0)
            for job, accuracy in (("jobs/2", 0.25), ("jobs/3", 0.75), ("jobs/2", math.nan)):
                await told(served, node, job, epochs[job], accuracy, step=11)
            committed = served.master.writer.committed.jobs
            await until(lambda: committed[2].ending is not None)
            loser = await served.jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/2"))
            assert list(loser.array.rungs) == [0.25]
            array = await served.jobs.GetArray(job_service_pb2.GetArrayRequest(name="arrays/1"))
            assert (array.best.index, array.best_value) == (1, 0.75)
            host.cancel()

    asyncio.run(story())


def test_an_array_is_cancelled_whole_and_its_number_is_no_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await served.jobs.CreateArray(request("0.1", "0.2"))
            with pytest.raises(grpc.RpcError) as failed:
                await served.jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/1"))
            assert from_rpc_error(failed.value).metadata["array"] == "arrays/1"
            ended = await served.jobs.CancelArray(job_service_pb2.CancelArrayRequest(name="arrays/1", reason="enough"))
            assert dict(ended.states) == {"cancelled": 2}
            assert ended.HasField("end_time")
            assert not (await served.jobs.ListArrays(job_service_pb2.ListArraysRequest(live=True))).arrays
            events = await served.jobs.ListEvents(job_service_pb2.ListEventsRequest(subject="arrays/1"))
            kinds = ["array_submitted", "cancel_ordered", "member_ended", "member_ended", "array_ended"]
            assert [event.kind for event in events.events] == kinds

    asyncio.run(story())


def test_what_is_no_array_and_no_rule_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            missing = job_service_pb2.GetArrayRequest(name="arrays/9")
            assert await reason(served.jobs.GetArray(missing)) == "ARRAY_NOT_FOUND"
            wrong = job_service_pb2.GetArrayRequest(name="jobs/9")
            assert await reason(served.jobs.GetArray(wrong)) == "NAME_INVALID"
            guess = array_pb2.StopRule(kind=99, metric="loss", first_rung=1)  # type: ignore[arg-type]
            assert await reason(served.jobs.CreateArray(request("1", rule=guess))) == "SPEC_INVALID"
            assert await reason(served.jobs.CreateArray(request())) == "SPEC_INVALID"
            large = request(*map(str, range(1_001)))
            assert await reason(served.jobs.CreateArray(large)) == "SPEC_INVALID"

    asyncio.run(story())
