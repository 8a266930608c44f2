"""Limits of each user on a master that several share."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from ganger.v1 import array_pb2, job_service_pb2
from ganger.wire.errors import ApiError, UserLimit, from_rpc_error
from ganger.wire.methods import CallerIdentity, CallerRole
from ganger_master.rpc.access import LONGEST_WAIT_S, Bucket, UserLimits
from rpc.certified import serving_certified
from rpc.kit import Speaker, spec_of, until

ANN, ROOT = CallerIdentity(CallerRole.USER, "ann"), CallerIdentity(CallerRole.OPERATOR, "root")


async def refused(call: object) -> ApiError:
    with pytest.raises(grpc.RpcError) as failed:
        await call  # type: ignore[misc]
    return from_rpc_error(failed.value)


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    bucket = Bucket(rate=2.0, burst=10.0)
    assert [bucket.take(100.0) for _ in range(10)] == [0.0] * 10
    assert bucket.take(100.0) == 0.5, "in half a second there is one"
    assert bucket.take(100.5) == 0.0
    assert bucket.take(100.5) == 0.5
    assert [bucket.take(1_000.0) for _ in range(11)] == [0.0] * 10 + [0.5], "it is never more than full"


def test_more_than_a_burst_is_had_of_a_full_bucket_and_paid_off() -> None:
    bucket = Bucket(rate=1.0, burst=10.0)
    assert bucket.take(0.0, 30.0) == 0.0
    assert bucket.take(0.0) == 21.0
    assert bucket.take(21.0) == 0.0
    assert bucket.take(21.0, 30.0) == 10.0, "and then not before it is full"


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(rate=1.0, burst=1.0)
    assert bucket.take(5.0) == 0.0
    assert bucket.take(4.0) == 1.0


def test_requests_and_changes_of_a_user_are_bounded_and_those_of_operators_are_not() -> None:
    now = [0.0]
    limits = UserLimits(requests=5, changes=1, streams=1, steady=lambda: now[0])
    assert limits.charge_requests(ANN, 50) == 0.0
    assert limits.charge_requests(ANN) == 0.2, "it waits"
    assert limits.charge_requests(ANN, 9) == LONGEST_WAIT_S
    with pytest.raises(
        UserLimit, match=r"user ann has used up 5 requests a second \(requests_per_user\): try again in 2.2 s"
    ):
        limits.charge_requests(ANN)
    now[0] = 3.0
    assert limits.charge_requests(ANN, 5) == 0.0, "what was taken ahead is paid off"
    assert limits.charge_requests(ANN) == 0.2
    assert limits.charge_requests(CallerIdentity(CallerRole.USER, "bob"), 50) == 0.0
    for _ in range(100):
        limits.charge_requests(ROOT, 1_000)


def test_changes_of_a_user_are_bounded_and_made_one_after_the_other() -> None:
    limits = UserLimits(requests=1_000, changes=1, streams=1, steady=lambda: 0.0)
    under_way, most = 0, {ANN: 0, ROOT: 0}

    async def change(caller: CallerIdentity, count: int = 1) -> None:
        nonlocal under_way
        async with limits.change(caller, count):
            under_way += 1
            most[caller] = max(most[caller], under_way)
            await asyncio.sleep(0)
            under_way -= 1

    async def story() -> None:
        await asyncio.gather(*(change(ANN) for _ in range(10)))
        await asyncio.gather(*(change(ROOT) for _ in range(10)))
        await change(ANN, 1_990)
        with pytest.raises(UserLimit, match="changes_per_user"):
            await change(ANN)
        await change(ROOT, 10_000)

    asyncio.run(story())
    assert most == {ANN: 1, ROOT: 10}


def test_a_change_counts_as_five_requests() -> None:
    limits = UserLimits(requests=5, changes=100, streams=1, steady=lambda: 0.0)

    async def story() -> None:
        for _ in range(12):
            limits.charge_requests(ANN)
            async with limits.change(ANN):
                pass

    began = time.monotonic()
    asyncio.run(story())
    assert time.monotonic() - began >= 1.0 + 2.0, "60 of 50: the eleventh waits for one second, the twelfth for two"


def test_a_users_streams_pending_jobs_and_requests_are_bounded_on_a_running_master(tmp_path: Path) -> None:
    async def story() -> None:
        small = {"streams_per_user": 2, "pending_jobs_per_user": 5, "requests_per_user": 5}
        async with serving_certified(tmp_path, **small) as made:
            await Speaker(made.calls(CallerRole.DAEMON, "n1"), "n1").join()
            ann, bob, root = (
                made.calls(role, name) for role, name in ((ANN.role, "ann"), ("user", "bob"), ("operator", "root"))
            )
            job = await ann.submit()
            watch = job_service_pb2.WatchJobRequest(name=job.name)
            streams = [ann.jobs.WatchJob(watch) for _ in range(2)]
            for stream in streams:
                await stream.read()
            third = ann.jobs.WatchJob(watch)
            error = await refused(third.read())
            assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "USER_LIMIT")
            assert "has 2 streams open" in error.message
            await root.jobs.WatchJob(watch).read()
            streams[0].cancel()
            user = made.master._server._limits._users["ann"]  # type: ignore[union-attr]
            await until(lambda: user.streams == 1)
            await ann.jobs.WatchJob(watch).read()
            members = [array_pb2.ArrayMember(index=index) for index in range(5)]
            array = job_service_pb2.CreateArrayRequest(spec=spec_of(), members=members)
            assert "has 1 pending jobs" in (await refused(ann.jobs.CreateArray(array))).message
            await bob.jobs.CreateArray(array)
            await root.jobs.CreateArray(array)
            await root.jobs.CreateArray(array)
            await bob.jobs.ListJobs(job_service_pb2.ListJobsRequest())

    asyncio.run(story())


def test_requests_beyond_the_rate_wait_and_refusals_are_held_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving_certified(tmp_path, requests_per_user=5) as made:
            ann = made.calls(CallerRole.USER, "ann")
            job = await ann.submit()
            get = job_service_pb2.GetJobRequest(name=job.name)
            began = time.monotonic()
            answers = await asyncio.gather(*(ann.jobs.GetJob(get) for _ in range(80)), return_exceptions=True)
            took_s = time.monotonic() - began
            errors = [from_rpc_error(one) for one in answers if isinstance(one, grpc.RpcError)]
            assert errors, "80 are more than what the submission has left of a burst of 50, and the 10 that may wait"
            assert {error.reason for error in errors} == {"USER_LIMIT"}
            assert "user ann has used up 5 requests a second" in errors[0].message
            assert len(answers) - len(errors) >= 54, "what was left, and those that wait"
            assert took_s >= 1.5, "the last of them waits for two seconds"
            began = time.monotonic()
            await asyncio.gather(*(ann.jobs.GetJob(get) for _ in range(80)), return_exceptions=True)
            assert time.monotonic() - began >= 1.0, "no refusal comes at once"

    asyncio.run(story())
