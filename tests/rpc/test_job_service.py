"""What users call, over a real socket."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import grpc
import grpc.aio
import pytest
from ganger.v1 import job_pb2, job_service_pb2, node_pb2
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint
from ganger.wire.errors import from_rpc_error
from rpc.kit import Served, serving, spec_of


async def reason(call: object) -> str:
    with pytest.raises(grpc.RpcError) as failed:
        await call  # type: ignore[misc]
    return from_rpc_error(failed.value).reason


def test_created_job_is_found_by_its_name_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            made = await served.submit(spec_of(2, environment={"A": "1"}, labels={"k": "v"}, priority=7))
            assert made.name == "jobs/1"
            assert made.state == job_pb2.Job.STATE_PENDING
            assert not made.spec.environment
        async with serving(tmp_path) as served:
            found = await served.jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/1"))
            assert (found.uid, found.spec.priority, dict(found.spec.labels)) == (made.uid, 7, {"k": "v"})
            assert dict(found.spec.environment) == {"A": "1"}
            assert (await served.submit()).name == "jobs/2"

    asyncio.run(story())


def test_repeated_request_id_gives_the_same_job_and_another_spec_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        request_id = str(uuid.uuid4())
        async with serving(tmp_path) as served:
            first, second = await asyncio.gather(
                served.submit(spec_of(), request_id), served.submit(spec_of(), request_id)
            )
            assert first.name == second.name
        async with serving(tmp_path) as served:
            assert (await served.submit(spec_of(), request_id)).name == first.name
            assert await reason(served.submit(spec_of(3), request_id)) == "REQUEST_REUSED"

    asyncio.run(story())


def test_a_job_that_is_no_longer_kept_is_said_so_and_its_request_id_is_not_taken_again(tmp_path: Path) -> None:
    async def story() -> None:
        request_id = str(uuid.uuid4())
        async with serving(tmp_path, finished_jobs_limit=1) as served:
            for made in (await served.submit(spec_of(), request_id), await served.submit()):
                await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name=made.name))
            listed = await served.jobs.ListJobs(job_service_pb2.ListJobsRequest())
            assert [job.name for job in listed.jobs] == ["jobs/2"]
        async with serving(tmp_path, finished_jobs_limit=1) as served:
            for ask, request in (
                (served.jobs.GetJob, job_service_pb2.GetJobRequest(name="jobs/1")),
                (served.jobs.ExplainJob, job_service_pb2.ExplainJobRequest(name="jobs/1")),
            ):
                with pytest.raises(grpc.RpcError) as failed:
                    await ask(request)  # type: ignore[operator]
                assert "jobs/1 has ended and is no longer kept" in from_rpc_error(failed.value).message
            assert await reason(served.submit(spec_of(), request_id)) == "REQUEST_REUSED"
            told = await served.jobs.ListEvents(job_service_pb2.ListEventsRequest(subject="jobs/1"))
            assert told.events[-1].kind == "job_cancelled"

    asyncio.run(story())


def test_bad_spec_is_refused_with_all_violations_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            with pytest.raises(grpc.RpcError) as failed:
                await served.submit(job_pb2.JobSpec(working_directory="relative", priority=5000))
            error = from_rpc_error(failed.value)
            assert error.reason == "SPEC_INVALID"
            assert len(error.violations) >= 3

    asyncio.run(story())


def test_list_comes_newest_first_in_pages_and_filtered(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            for n in range(5):
                await served.submit(spec_of(name=f"job-{n}"))
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/3"))
            seen, token = [], ""
            while True:
                page = await served.jobs.ListJobs(job_service_pb2.ListJobsRequest(page_size=2, page_token=token))
                assert len(page.jobs) <= 2
                seen += [job.name for job in page.jobs]
                token = page.next_page_token
                if not token:
                    break
            assert seen == [f"jobs/{n}" for n in (5, 4, 3, 2, 1)]
            cancelled = await served.jobs.ListJobs(
                job_service_pb2.ListJobsRequest(states=[job_pb2.Job.STATE_CANCELLED])
            )
            assert [job.name for job in cancelled.jobs] == ["jobs/3"]
            bad = served.jobs.ListJobs(job_service_pb2.ListJobsRequest(page_token="forged"))
            assert await reason(bad) == "PAGE_TOKEN_INVALID"

    asyncio.run(story())


def test_jobs_are_found_by_name_and_by_labels(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            for name, labels in (("a", {"x": "1"}), ("b", {"x": "1", "y": "2"}), ("b", {"x": "3"})):
                await served.submit(spec_of(name=name, labels=labels))

            async def found(**asked: object) -> list[str]:
                answer = await served.jobs.ListJobs(job_service_pb2.ListJobsRequest(**asked))  # type: ignore[arg-type]
                return [job.name.removeprefix("jobs/") for job in answer.jobs]

            assert await found(display_name="b") == ["3", "2"]
            assert await found(labels={"x": "1"}) == ["2", "1"]
            assert await found(labels={"x": "1", "y": "2"}) == ["2"]
            assert await found(display_name="a", labels={"x": "3"}) == []

    asyncio.run(story())


def test_watch_sends_now_at_changes_and_ends_with_the_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await served.submit()
            watch = served.jobs.WatchJob(job_service_pb2.WatchJobRequest(name="jobs/1"))
            first = await watch.read()
            assert first.state == job_pb2.Job.STATE_PENDING
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/1", reason="enough"))
            states = [first.state]
            while (job := await watch.read()) is not grpc.aio.EOF:
                states.append(job.state)
            assert states[-1] == job_pb2.Job.STATE_CANCELLED
            again = served.jobs.WatchJob(job_service_pb2.WatchJobRequest(name="jobs/1", after_revision=1))
            assert [job.state async for job in again] == [job_pb2.Job.STATE_CANCELLED]

    asyncio.run(story())


def test_cancel_is_idempotent_or_says_that_the_job_is_over(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await served.submit()
            request = job_service_pb2.CancelJobRequest(name="jobs/1")
            assert (await served.jobs.CancelJob(request)).state == job_pb2.Job.STATE_CANCELLED
            assert (await served.jobs.CancelJob(request)).state == job_pb2.Job.STATE_CANCELLED

    asyncio.run(story())


def test_names_that_are_none_and_jobs_that_are_not_there_are_told_apart(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            get = served.jobs.GetJob
            assert await reason(get(job_service_pb2.GetJobRequest(name="jobs/99"))) == "JOB_NOT_FOUND"
            assert await reason(get(job_service_pb2.GetJobRequest(name="../etc"))) == "NAME_INVALID"
            assert (
                await reason(served.jobs.ResumeJob(job_service_pb2.ResumeJobRequest(name="jobs/9"))) == "JOB_NOT_FOUND"
            )
            drain = served.nodes.DrainNode(node_pb2.DrainNodeRequest(name="nodes/n9", reason="x"))
            assert await reason(drain) == "NODE_NOT_FOUND"

    asyncio.run(story())


def test_history_is_listed_by_subject_and_page(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await served.submit()
            await served.submit()
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/2"))
            page = await served.jobs.ListEvents(job_service_pb2.ListEventsRequest(subject="jobs/2"))
            kinds = [event.kind for event in page.events]
            assert kinds[0] == "job_submitted"
            assert kinds[-1] == "job_cancelled"
            rest = await served.jobs.ListEvents(
                job_service_pb2.ListEventsRequest(subject="jobs/2", after_sequence=page.events[0].sequence)
            )
            assert list(rest.events) == list(page.events)[1:]

    asyncio.run(story())


def test_why_explains_a_job_that_waits_for_nodes(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await served.submit()
            answer = await served.jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name="jobs/1"))
            assert answer.job.name == "jobs/1"
            assert answer.blockers or answer.assumption

    asyncio.run(story())


def test_call_without_the_token_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            for token in ("", "wrong"):
                channel = open_aio_channel(Endpoint(served.master.address, token))
                other = Served(served.master, channel)
                assert await reason(other.submit()) == "TOKEN_INVALID"
                await channel.close(None)

    asyncio.run(story())


def test_message_beyond_the_limit_is_refused_and_the_master_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            channel = grpc.aio.insecure_channel(served.master.address)
            other = Served(served.master, channel)
            large = job_service_pb2.CreateJobRequest(spec=spec_of(environment={"A": "x" * 5_000_000}))
            with pytest.raises(grpc.RpcError) as failed:
                await other.jobs.CreateJob(large, metadata=(("authorization", f"Bearer {served.master.token}"),))
            assert from_rpc_error(failed.value).reason == "MESSAGE_TOO_LARGE"
            await channel.close(None)
            assert (await served.submit()).name == "jobs/1"

    asyncio.run(story())


def test_cluster_says_what_it_is(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await served.submit()
            cluster = await served.nodes.GetCluster(node_pb2.GetClusterRequest())
            assert (cluster.jobs_pending, cluster.policy) == (1, "fifo-backfill")
            assert cluster.storage

    asyncio.run(story())
