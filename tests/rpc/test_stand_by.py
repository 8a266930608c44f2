"""Several masters on one database: a stand-by refuses calls and takes over, and a former leader answers nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from ganger.client import Client
from ganger.v1 import job_service_pb2, node_pb2, scheduling_pb2
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint, find_endpoint
from ganger.wire.errors import ApiError, LeaseLost, NotLeader, from_rpc_error
from ganger_master.app import Master, StartError
from ganger_master.config import Config
from ganger_master.core.answers import Answer
from ganger_master.core.commands import Command
from ganger_master.metrics import take
from ganger_master.store.tables import Problem, StoreError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kit.certified import Authority
from kit.leased_store import LeasedDatabase, LeasedStore
from rpc.kit import Served

LEASE_S = 3.0


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30.0):
            await story

    asyncio.run(bounded())


class Standing:
    """A master on a leased database, and calls to it. `names`: the leaders that it has announced."""

    def __init__(self, master: Master, store: LeasedStore, channel: grpc.aio.Channel) -> None:
        self.master, self.store = master, store
        self.served = Served(master, channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.names: asyncio.Queue[str] = asyncio.Queue()
        self.standing = asyncio.create_task(master.stand_by(self.names.put_nowait))

    async def is_serving(self) -> bool:
        answer = await self.health.Check(health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def standing(
    database: LeasedDatabase, directory: Path, storage: str = "storage", tls: Path | None = None, host: str = ""
) -> AsyncIterator[Standing]:
    """`tls`: directory of the certificate of a master that listens at `host`."""
    config = Config(
        directory,
        listen=f"unix:{directory}.sock" if tls is None else f"{host}:0",
        tls=tls,
        storage=directory.parent / storage,
        policy="fifo-backfill",
        scheduler_host=False,
        leader_lease_s=LEASE_S,
    )
    store = database.store()
    master = Master(config, store=store)
    await master.start()
    channel = open_aio_channel(Endpoint(master.local_address, master.token), (("grpc.enable_retries", 0),))
    one = Standing(master, store, channel)
    try:
        yield one
    finally:
        one.standing.cancel()
        await asyncio.gather(one.standing, return_exceptions=True)
        await channel.close(None)
        await master.stop()


async def refusal(call: Awaitable[object]) -> ApiError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


def test_a_stand_by_refuses_every_call_and_names_the_leader(tmp_path: Path) -> None:
    async def story() -> None:
        database = LeasedDatabase()
        async with standing(database, tmp_path / "a") as first:
            await first.standing
            async with standing(database, tmp_path / "b") as second:
                assert await second.names.get() == first.master.address
                jobs, nodes = second.served.jobs, second.served.nodes
                watched = second.served.scheduling.WatchView(scheduling_pb2.WatchViewRequest())
                for call in (
                    second.served.submit(),
                    jobs.ListJobs(job_service_pb2.ListJobsRequest()),
                    nodes.GetCluster(node_pb2.GetClusterRequest()),
                    watched.read(),
                ):
                    found = await refusal(call)
                    assert isinstance(found, NotLeader)
                    assert found.metadata == {"leader": first.master.address}
                assert await first.is_serving()
                assert not await second.is_serving()
                assert (await first.served.submit()).name == "jobs/1"

    run(story())


def test_a_stand_by_leads_with_all_that_was_accepted_once_the_lease_has_expired(tmp_path: Path) -> None:
    async def story() -> None:
        database = LeasedDatabase()
        async with standing(database, tmp_path / "a") as first, standing(database, tmp_path / "b") as second:
            await first.standing
            accepted = await first.served.submit(request_id="one")
            first.store.trouble = StoreError(Problem.UNREADABLE, "the network is cut")
            database.expire()
            await second.standing
            assert await second.is_serving()
            assert (await second.served.submit(request_id="one")).name == accepted.name
            assert (await second.served.submit()).name == "jobs/2"

    run(story())


def test_a_former_leader_commits_nothing_answers_nothing_and_ends(tmp_path: Path) -> None:
    async def story() -> None:
        database = LeasedDatabase()
        async with standing(database, tmp_path / "a") as first:
            await first.standing
            await first.served.submit()
            database.expire()
            async with standing(database, tmp_path / "b") as second:
                await second.standing
                before = dict(database.content._rows["jobs"])
                assert isinstance(await refusal(first.served.submit()), ApiError)
                assert database.content._rows["jobs"] == before
                await first.master.writer.stopped.wait()
                assert first.master.writer.fenced is not None
                found = await refusal(first.served.jobs.ListJobs(job_service_pb2.ListJobsRequest()))
                assert isinstance(found, NotLeader)

    run(story())


def test_a_leader_whose_lease_may_have_expired_answers_nothing_until_it_is_renewed(tmp_path: Path) -> None:
    async def story() -> None:
        database = LeasedDatabase()
        async with standing(database, tmp_path / "a") as one:
            await one.standing
            ownership = one.master.writer.ownership
            one.store.trouble = StoreError(Problem.UNREADABLE, "the network is cut")
            now = ownership.now
            ownership.now = lambda: now() + LEASE_S
            jobs = one.served.jobs
            watched = one.health.Watch(health_pb2.HealthCheckRequest())
            found = await refusal(jobs.ListJobs(job_service_pb2.ListJobsRequest()))
            assert isinstance(found, NotLeader)
            assert not take(one.master.writer, 0, 0.0).is_ready
            while (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING:
                pass
            one.store.trouble = None
            await ownership.check()
            await jobs.ListJobs(job_service_pb2.ListJobsRequest())
            assert take(one.master.writer, 0, 0.0).is_ready
            assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
            watched.cancel()

    run(story())


def test_an_answer_that_was_held_when_the_process_stopped_is_not_given_after_it(tmp_path: Path) -> None:
    async def story() -> None:
        database = LeasedDatabase()
        async with standing(database, tmp_path / "a") as one:
            await one.standing
            job = await one.served.submit()
            watched = one.served.jobs.WatchJob(job_service_pb2.WatchJobRequest(name=job.name))
            await watched.read()
            one.store.trouble = StoreError(Problem.UNREADABLE, "the network is cut")
            writer = one.master.writer
            now, submit = writer.ownership.now, writer.submit

            def stand_still(command: Command) -> asyncio.Future[Answer]:
                writer.ownership.now = lambda: now() + LEASE_S
                return submit(command)

            writer.submit = stand_still  # type: ignore[method-assign]
            cancelled = one.served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name=job.name))
            assert isinstance(await refusal(cancelled), LeaseLost)
            assert isinstance(await refusal(watched.read()), LeaseLost)
            assert all(job.state.is_finished for job in writer.committed.jobs.values()), "it was carried out"

    run(story())


def test_a_user_with_a_certificate_follows_the_leader_to_a_master_with_a_certificate_of_another_host(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    certificates = {host: authority.issue("master", host, (host,)) for host in ("127.0.0.1", "localhost")}
    ann = str(authority.issue("user", "ann"))

    async def story() -> None:
        database = LeasedDatabase()
        async with AsyncExitStack() as stack:
            first, second = [
                await stack.enter_async_context(standing(database, tmp_path / host, tls=tls, host=host))
                for host, tls in certificates.items()
            ]
            await asyncio.wait({first.standing, second.standing}, return_when=asyncio.FIRST_COMPLETED)
            leader, follower = (first, second) if first.standing.done() else (second, first)
            listed = f"{follower.master.address},{leader.master.address}"
            with Client(find_endpoint(listed, ann)) as client:
                accepted = await asyncio.to_thread(client.submit, ["true"])
                await leader.master.stop()
                await follower.standing
                found = await asyncio.to_thread(client.get_job, accepted.name)
            assert (found.name, found.user) == ("jobs/1", "ann")

    run(story())


def test_a_leader_that_stops_is_replaced_without_a_wait_for_its_lease(tmp_path: Path) -> None:
    async def story() -> None:
        database = LeasedDatabase()
        async with standing(database, tmp_path / "b") as second, standing(database, tmp_path / "a") as first:
            await asyncio.wait({first.standing, second.standing}, return_when=asyncio.FIRST_COMPLETED)
            leader, follower = (first, second) if first.standing.done() else (second, first)
            before = database.now
            await leader.master.stop()
            await follower.standing
            assert database.now == before

    run(story())


def test_a_master_with_the_storage_of_another_cluster_ends_and_gives_its_lease_back(tmp_path: Path) -> None:
    async def story() -> None:
        database = LeasedDatabase()
        async with standing(database, tmp_path / "a") as first:
            await first.standing
        async with standing(database, tmp_path / "b", "elsewhere") as second:
            with pytest.raises(StartError, match="is not the storage of this cluster"):
                await second.standing
            await second.master.stop()
            async with standing(database, tmp_path / "c") as third:
                await third.standing

    run(story())
