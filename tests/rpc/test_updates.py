"""Updates over a real socket: durable, the same once however often asked for, refused with every path at once."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest
from ganger.v1 import job_pb2, job_service_pb2, resources_pb2
from ganger.wire import times
from ganger.wire.errors import ApiError, from_rpc_error
from rpc.kit import serving, spec_of
from rpc.test_arrays import request as array_of


def asked(job: str, request_id: str = "", **changes: Any) -> job_service_pb2.UpdateJobRequest:
    update = job_service_pb2.JobUpdate(**changes)
    return job_service_pb2.UpdateJobRequest(name=job, update=update, request_id=request_id or str(uuid.uuid4()))


async def refusal(call: Any) -> ApiError:
    with pytest.raises(grpc.RpcError) as failed:
        await call
    return from_rpc_error(failed.value)


def test_an_update_outlives_a_restart_and_its_request_too(tmp_path: Path) -> None:
    once = asked(
        "jobs/1",
        display_name="b",
        priority=5,
        time_limit=times.duration(60),
        device_type="virtual",
        locality=resources_pb2.Locality(widest=resources_pb2.LEVEL_NODE),
        memory_bytes=2 << 30,
        millicores_per_gpu=500,
    )

    async def story() -> None:
        submitted = str(uuid.uuid4())
        async with serving(tmp_path) as served:
            await served.submit(spec_of(environment={"A": "1"}), submitted)
            changed = await served.jobs.UpdateJob(once)
            # Nothing else of it is stored anew but what is put again.
            await served.jobs.SuspendJob(job_service_pb2.SuspendJobRequest(name="jobs/1"))
        async with serving(tmp_path) as served:
            found = await served.jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/1"))
            spec, shape = found.spec, found.spec.roles[0].shape
            assert (spec.display_name, spec.priority, spec.time_limit.seconds) == ("b", 5, 60)
            assert (spec.device_type, spec.locality.widest) == ("virtual", resources_pb2.LEVEL_NODE)
            assert (shape.memory_bytes, shape.millicores, dict(spec.environment)) == (2 << 30, 500, {"A": "1"})
            again = await served.jobs.UpdateJob(once)
            assert (again.revision, changed.revision) == (found.revision, found.revision - 1)
            other = asked("jobs/1", once.request_id, priority=6)
            assert (await refusal(served.jobs.UpdateJob(other))).reason == "REQUEST_REUSED"
            assert (await served.submit(spec_of(environment={"A": "1"}), submitted)).name == "jobs/1"
            listed = await served.jobs.ListEvents(job_service_pb2.ListEventsRequest(subject="jobs/1"))
            (event,) = [event for event in listed.events if event.kind == "job_updated"]
            assert event.message.startswith("name test -> b, priority 0 -> 5, time limit none -> 1m")
            without = await served.jobs.UpdateJob(asked("jobs/1", time_limit=times.duration(0), priority=0))
            assert not without.spec.HasField("time_limit")
            assert without.spec.priority == 0

    asyncio.run(story())


def test_what_is_wrong_comes_with_its_path_and_what_is_over_with_its_reason(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await served.submit()
            wrong = await refusal(served.jobs.UpdateJob(asked("jobs/1", priority=5_000, memory_bytes=1 << 60)))
            assert wrong.reason == "SPEC_INVALID"
            assert [violation.field for violation in wrong.violations] == ["update.priority", "update.memory_bytes"]
            assert (await refusal(served.jobs.UpdateJob(asked("jobs/1")))).violations[0].field == "update"
            assert (await refusal(served.jobs.UpdateJob(asked("jobs/9", priority=1)))).reason == "JOB_NOT_FOUND"
            long = asked("jobs/1", "x" * 201, priority=1)
            assert (await refusal(served.jobs.UpdateJob(long))).reason == "SPEC_INVALID"
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/1"))
            over = await refusal(served.jobs.UpdateJob(asked("jobs/1", priority=1)))
            assert (over.code, over.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "JOB_FINISHED")

    asyncio.run(story())


def test_of_an_array_it_is_said_how_many_are_updated_and_it_has_its_new_name(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await served.jobs.CreateArray(array_of("0.1", "0.2", "0.3"))
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/2"))
            update = job_service_pb2.JobUpdate(priority=3, display_name="b")
            request = job_service_pb2.UpdateArrayRequest(name="arrays/1", update=update, request_id="r")
            first, again = await served.jobs.UpdateArray(request), await served.jobs.UpdateArray(request)
            assert first == again
            assert (first.updated, list(first.refused), first.array.display_name) == (2, [], "b")
            jobs = (await served.jobs.ListJobs(job_service_pb2.ListJobsRequest(array="arrays/1"))).jobs
            assert [job.spec.priority for job in jobs] == [3, 3, 0]
            assert jobs[-1].state == job_pb2.Job.STATE_CANCELLED
            missing = job_service_pb2.UpdateArrayRequest(name="arrays/9", update=update)
            assert (await refusal(served.jobs.UpdateArray(missing))).reason == "ARRAY_NOT_FOUND"

    asyncio.run(story())
