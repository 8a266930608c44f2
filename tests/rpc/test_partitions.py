"""Partitions on the wire: submissions that are refused, jobs and nodes as they are shown, and ListPartitions."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest
from ganger.v1 import array_pb2, job_pb2, job_service_pb2, node_pb2, scheduling_pb2
from ganger.wire import times
from ganger.wire.errors import from_rpc_error
from ganger_master.core.tenancy import Partition
from rpc.kit import Speaker, serving, spec_of

PARTITIONS = {
    "batch": Partition(nodes=("n1", "n9"), time_s=3_600.0, gpus_per_job=2),
    "own": Partition(nodes=("n1",), users=("cat",), priority=7, preemptible=False),
}


def spec_in(partition: str, gpus: int = 1, time_s: float = 0.0) -> job_pb2.JobSpec:
    spec = spec_of(gpus)
    spec.partition = partition
    if time_s:
        spec.time_limit.CopyFrom(times.duration(time_s))
    return spec


dry_run = job_service_pb2.ValidateSubmissionRequest


@pytest.mark.parametrize(
    ("spec", "code", "reason"),
    [
        (spec_in("none"), grpc.StatusCode.NOT_FOUND, "NO_SUCH_PARTITION"),
        (spec_in("own"), grpc.StatusCode.FAILED_PRECONDITION, "PARTITION_CLOSED"),
        (spec_in("batch", 3), grpc.StatusCode.FAILED_PRECONDITION, "PARTITION_LIMIT"),
        (spec_in("", 1, 7_200.0), grpc.StatusCode.FAILED_PRECONDITION, "PARTITION_TIME"),
    ],
)
def test_a_submission_that_its_partition_forbids_is_refused(
    tmp_path: Path, spec: job_pb2.JobSpec, code: grpc.StatusCode, reason: str
) -> None:
    async def story() -> None:
        async with serving(tmp_path, partitions=PARTITIONS) as served:
            await Speaker(served, "n1").join()
            job = job_service_pb2.CreateJobRequest(spec=spec)
            for call in (served.jobs.CreateJob(job), served.jobs.ValidateSubmission(dry_run(job=job))):
                with pytest.raises(grpc.RpcError) as refused:
                    await call
                found = from_rpc_error(refused.value)
                assert (refused.value.code(), found.reason) == (code, reason)
                assert found.metadata["partition"] == (spec.partition or "batch")

    asyncio.run(story())


def test_a_submission_is_validated_by_the_rules_of_a_real_one_and_nothing_is_accepted(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, partitions=PARTITIONS, quotas={"*": 1}) as served:
            await Speaker(served, "n1").join()
            job = await served.jobs.ValidateSubmission(dry_run(job=job_service_pb2.CreateJobRequest(spec=spec_of(1))))
            assert (job.name, job.spec.partition, times.seconds(job.spec.time_limit)) == ("", "batch", 3_600.0)
            members = [array_pb2.ArrayMember(index=index) for index in range(2)]
            array = job_service_pb2.CreateArrayRequest(spec=spec_of(1), members=members)
            assert (await served.jobs.ValidateSubmission(dry_run(array=array))).spec.partition == "batch"
            beyond = job_service_pb2.CreateJobRequest(spec=spec_of(2))
            wrong = job_service_pb2.CreateArrayRequest(spec=spec_of(1), members=[*members, *members])
            for request, reason in (
                (dry_run(job=beyond), "QUOTA_EXCEEDED"),
                (dry_run(array=wrong), "SPEC_INVALID"),
                (dry_run(), "REQUEST_INVALID"),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    await served.jobs.ValidateSubmission(request)
                assert from_rpc_error(refused.value).reason == reason
            assert served.master.writer.state.jobs == {}
            repeated = job_service_pb2.CreateJobRequest(spec=spec_of(1), request_id="once")
            assert (await served.jobs.ValidateSubmission(dry_run(job=repeated))).name == ""
            first = await served.jobs.CreateJob(repeated)
            assert (await served.jobs.ValidateSubmission(dry_run(job=repeated))).name == first.name
            repeated.spec.priority = 7
            with pytest.raises(grpc.RpcError) as refused:
                await served.jobs.ValidateSubmission(dry_run(job=repeated))
            assert from_rpc_error(refused.value).reason == "REQUEST_REUSED"

    asyncio.run(story())


def test_named_nodes_that_have_not_joined_are_reported_by_the_log_and_the_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partitions = {**PARTITIONS, "all": Partition()}

    async def story() -> None:
        with caplog.at_level(logging.WARNING, "ganger_master"):
            async with serving(tmp_path, partitions=partitions) as served:
                await Speaker(served, "n1").join()
                found = (await served.nodes.ListPartitions(node_pb2.ListPartitionsRequest())).partitions
                listed = {one.name: (one.absent_nodes, one.absent_node_count) for one in found}
                assert listed == {"batch": ("n9", 1), "own": ("", 0), "all": ("", 0)}

    asyncio.run(story())
    said = [one for one in caplog.records if one.message == "partition names nodes that have not joined"]
    # When it started no node had joined.
    assert [(one.partition, one.nodes) for one in said] == [("batch", "n[1,9]"), ("own", "n1")]  # type: ignore[attr-defined]


def test_jobs_nodes_and_partitions_show_what_is_in_force(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, partitions=PARTITIONS) as served:
            await Speaker(served, "n1").join()
            job = await served.submit(spec_of(2))
            assert (job.spec.partition, times.seconds(job.spec.time_limit)) == ("batch", 3_600.0)
            again = await served.jobs.GetJob(job_service_pb2.GetJobRequest(name=job.name))
            assert again.spec.partition == "batch"
            node = await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert list(node.view_entry.partitions) == ["batch", "own"]
            batch, own = (await served.nodes.ListPartitions(node_pb2.ListPartitionsRequest())).partitions
            assert (batch.name, batch.is_default, batch.nodes, batch.jobs_pending) == ("batch", True, "n1", 1)
            assert (times.seconds(batch.time_limit), batch.gpus_per_job_limit, batch.HasField("gpus_limit")) == (
                3_600.0,
                2,
                False,
            )
            assert (own.priority, own.preemptible, list(own.users), own.HasField("time_limit")) == (
                7,
                False,
                ["cat"],
                False,
            )

    asyncio.run(story())


def test_a_repeated_submission_is_the_same_job_though_its_partition_and_limit_were_filled_in(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, partitions=PARTITIONS) as served:
            await Speaker(served, "n1").join()
            first, second = [await served.submit(spec_of(1), request_id="same") for _ in range(2)]
            assert first.name == second.name

    asyncio.run(story())


def test_planners_are_not_sent_a_pending_job_that_may_not_be_in_its_partition_any_more(tmp_path: Path) -> None:
    async def sent(partitions: dict[str, Partition], submits: bool) -> list[str]:
        async with serving(tmp_path, partitions=partitions) as served:
            if submits:
                await served.submit(spec_in("batch"))
            watch = served.scheduling.WatchCluster(scheduling_pb2.WatchClusterRequest())
            delta = await watch.read()
            watch.cancel()
            return [job.job for job in delta.jobs] + [f"not {name}" for name in delta.removed_jobs]

    async def story() -> None:
        assert await sent({"batch": Partition()}, submits=True) == ["jobs/1"]
        assert await sent({"batch": Partition(users=("cat",))}, submits=False) == ["not jobs/1"]

    asyncio.run(story())
