"""Hosts against a real master: every job finds its gang, whatever the schedulers in between do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from ganger.cluster.placement import candidates
from ganger.cluster.refusals import Reason, Refusal
from ganger.cluster.resources import Claim, NodeRow
from ganger.cluster.topology import parse_topology
from ganger.cluster.view import View
from ganger.scheduling import DefaultScheduler, JobScheduler, PlacementLease, Proposal
from ganger.scheduling.host import Mirror, SchedulerHost
from ganger.v1 import job_pb2, job_service_pb2, scheduling_pb2
from ganger.wire import resource_messages as convert
from ganger.wire.endpoints import Endpoint
from rpc.kit import Served, Speaker, serving, spec_of

pytestmark = pytest.mark.system

WAIT_S = 30.0


def on_a_master(tmp_path: Path, story: Callable[[Served], Coroutine[Any, Any, None]], nodes: int = 2) -> None:
    async def told() -> None:
        async with serving(tmp_path) as served:
            for index in range(nodes):
                await Speaker(served, f"n{index}").join()
            await story(served)

    asyncio.run(told())


@asynccontextmanager
async def running(
    served: Served, make: Callable[[], JobScheduler] = DefaultScheduler, jobs: Sequence[str] = ()
) -> AsyncIterator[SchedulerHost]:
    host = SchedulerHost(lambda: Endpoint(served.master.address, served.master.token), make, jobs=jobs)
    task = asyncio.create_task(host.run())
    try:
        yield host
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def held(served: Served, name: str) -> job_pb2.Job:
    """The job, once it has a gang."""
    async with asyncio.timeout(WAIT_S):
        async for job in served.jobs.WatchJob(job_service_pb2.WatchJobRequest(name=name)):
            if job.state == job_pb2.Job.STATE_HOLDING:
                return job
    raise AssertionError(f"{name} was no longer watched")


def nodes_of(job: job_pb2.Job) -> list[str]:
    return [claim.node for claim in job.gang.claims]


class Last(JobScheduler):
    """Wants the last node by name."""

    def propose(self, lease: PlacementLease, view: View) -> Proposal:
        last = max(view.names())
        return Proposal(candidates(view, lease.shape, only=[last]).candidates)


class Broken(JobScheduler):
    def propose(self, lease: PlacementLease, view: View) -> Proposal:
        raise RuntimeError("this scheduler is broken on purpose")


class Forgetful(JobScheduler):
    def propose(self, lease: PlacementLease, view: View) -> Proposal:  # type: ignore[return]
        candidates(view, lease.shape)


class Absurd(JobScheduler):
    """Keeps asking for what cannot be."""

    def propose(self, lease: PlacementLease, view: View) -> Proposal:
        good = DefaultScheduler().propose(lease, view).candidates[0]
        return Proposal((good[:1] * 2,) * 16)

    def on_rejected(self, lease: PlacementLease, view: View, refusals: Sequence[Refusal]) -> Proposal | None:
        return self.propose(lease, view)


def test_default_host_places_jobs_and_gangs_over_nodes(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        async with running(served):
            one, four = await served.submit(spec_of(1)), await served.submit(spec_of(6))
            assert len((await held(served, one.name)).gang.claims) == 1
            assert len((await held(served, four.name)).gang.claims) == 2

    on_a_master(tmp_path, story)


def test_many_jobs_at_once_all_start_and_hold_different_devices(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        async with running(served):
            jobs = await asyncio.gather(*(served.submit(spec_of(1)) for _ in range(8)))
            gangs = [(await held(served, job.name)).gang for job in jobs]
            pieces = [(claim.node, claim.device_mask) for gang in gangs for claim in gang.claims]
            assert len(set(pieces)) == 8

    on_a_master(tmp_path, story)


def test_job_that_waits_is_placed_when_devices_come_free(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        async with running(served):
            first = await served.submit(spec_of(8))
            await held(served, first.name)
            second = await served.submit(spec_of(1))
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name=first.name))
            async with asyncio.timeout(WAIT_S):
                job = await served.jobs.GetJob(job_service_pb2.GetJobRequest(name=second.name))
                assert job.state == job_pb2.Job.STATE_PENDING
            await Speaker(served, "n9").join()
            assert nodes_of(await held(served, second.name)) == ["nodes/n9"]

    on_a_master(tmp_path, story)


def test_user_written_scheduler_decides_for_its_own_job_only(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        job = await served.submit(spec_of(1, scheduler="mine:Last"))
        async with running(served, Last, [job.name]), running(served):
            assert nodes_of(await held(served, job.name)) == ["nodes/n1"]
            other = await served.submit(spec_of(2))
            assert nodes_of(await held(served, other.name)) == ["nodes/n0"]

    on_a_master(tmp_path, story)


def test_job_whose_scheduler_never_came_is_placed_by_the_default(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        async with running(served):
            job = await served.submit(spec_of(1, scheduler="mine:Dead"))
            await held(served, job.name)

    on_a_master(tmp_path, story)


@pytest.mark.parametrize("make", [Broken, Forgetful, Absurd])
def test_job_whose_scheduler_is_useless_is_placed_by_the_default(tmp_path: Path, make: type[JobScheduler]) -> None:
    async def story(served: Served) -> None:
        job = await served.submit(spec_of(1, scheduler="mine:Bad"))
        async with running(served, make, [job.name]), running(served):
            await held(served, job.name)
            other = await served.submit(spec_of(1))
            await held(served, other.name)

    on_a_master(tmp_path, story)


def test_job_whose_scheduler_hangs_is_placed_by_the_default(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        job = await served.submit(spec_of(1, scheduler="mine:Hung"))
        # It claims the job, hears its turns and never asks for anything.
        request = scheduling_pb2.WatchLeasesRequest(scheduler="hung", jobs=[job.name])
        stream = served.scheduling.WatchLeases(request)
        async with running(served):
            await stream.read()
            await held(served, job.name)
        stream.cancel()

    on_a_master(tmp_path, story)


def test_scheduler_that_spams_without_a_lease_keeps_no_job_from_starting(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        target = await served.submit(spec_of(1, scheduler="mine:Spam"))

        async def spam() -> None:
            request = scheduling_pb2.GangRequest(job=target.name, revision=99, lease=12345)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await served.scheduling.RequestGang(request)

        spammers = [asyncio.create_task(spam()) for _ in range(4)]
        try:
            async with running(served):
                others = [await served.submit(spec_of(1)) for _ in range(3)]
                for job in [target, *others]:
                    await held(served, job.name)
        finally:
            for task in spammers:
                task.cancel()
            await asyncio.gather(*spammers, return_exceptions=True)

    on_a_master(tmp_path, story)


def test_host_finds_a_master_that_was_restarted(tmp_path: Path) -> None:
    async def told() -> None:
        async with serving(tmp_path) as first:
            address, token = first.master.address, first.master.token
            host = SchedulerHost(lambda: Endpoint(address, token))
            task = asyncio.create_task(host.run())
            await host.mirror.reach(0, WAIT_S)
        async with serving(tmp_path) as second:
            await Speaker(second, "n0").join()
            job = await second.submit(spec_of(1))
            await held(second, job.name)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(told())


def test_a_scheduler_refused_on_an_old_view_reads_the_view_of_its_lease_before_it_passes() -> None:
    """The only place it knew of is closed to it, and that another has come free is still under way to it."""
    server = parse_topology("2x2", name="v4")

    def view(version: int, free_of_n1: int) -> scheduling_pb2.ViewDelta:
        rows = [NodeRow("n0", "v4", 0xF, (16_000,) * 2, 64 << 30, version=1)]
        rows += [NodeRow("n1", "v4", free_of_n1, (16_000,) * 2, 64 << 30, version=version)]
        return scheduling_pb2.ViewDelta(
            version=version,
            from_version=version - 1,
            configuration_sets=[convert.configuration_set_to_wire(server)],
            nodes=[convert.node_row_to_wire(row) for row in rows],
        )

    asked: list[list[str]] = []

    class Master:
        async def WatchLeases(  # noqa: N802
            self, request: scheduling_pb2.WatchLeasesRequest
        ) -> AsyncIterator[scheduling_pb2.PlacementLeases]:
            lease = scheduling_pb2.PlacementLease(lease=1, job="jobs/1", spec=spec_of(4), view_version=2)
            lease.remaining.FromSeconds(20)
            yield scheduling_pb2.PlacementLeases(leases=[lease])

        async def RequestGangs(  # noqa: N802
            self, messages: AsyncIterator[scheduling_pb2.GangRequests]
        ) -> AsyncIterator[scheduling_pb2.Verdicts]:
            async for message in messages:
                (request,) = message.requests
                asked.append([claim.node for candidate in request.candidates for claim in candidate.claims])
                if len(asked) > 1:
                    return
                asyncio.get_running_loop().call_later(0.05, host.mirror.apply, view(2, free_of_n1=0xF))
                closed = Refusal(Reason.LAUNCH_FAILED, node="n0")
                rejection = scheduling_pb2.Rejection(refusals=convert.refusals_to_wire([closed]), lease_kept=True)
                yield scheduling_pb2.Verdicts(verdicts=[scheduling_pb2.Verdict(rejected=rejection)])

    async def told() -> None:
        host.mirror.apply(view(1, free_of_n1=0))
        await asyncio.wait_for(asyncio.gather(host._watch_leases(Master()), host._request_gangs(Master())), WAIT_S)

    host = SchedulerHost(lambda: Endpoint("", ""))
    asyncio.run(told())
    assert asked == [["nodes/n0"], ["nodes/n1"]]


def test_devices_of_requests_under_way_are_not_proposed_again_when_a_node_state_arrives_meanwhile() -> None:
    """The state is of a commit before the requests: it shows their devices as free."""
    server = parse_topology("2x2", name="v4")
    mirror = Mirror()

    def hear(version: int, free: int) -> None:
        row = NodeRow("n0", "v4", free, (16_000,) * 2, 64 << 30, version=version)
        mirror.apply(
            scheduling_pb2.ViewDelta(
                version=version,
                from_version=version - 1,
                configuration_sets=[convert.configuration_set_to_wire(server)],
                nodes=[convert.node_row_to_wire(row)],
            )
        )

    def free() -> int:
        return mirror.view.row("n0").free_mask

    def claims_of(mask: int) -> tuple[Claim, ...]:
        tasks = mask.bit_count()
        return (Claim("n0", mask, (2_000 * tasks, 0), tasks << 30, 0, (tasks,)),)

    hear(1, 0b1111)
    shape = convert.gang_shape_from_wire(spec_of(1), 0, 0)
    taken = [mirror.take(shape, claims_of(mask)) for mask in (0b0001, 0b0010, 0b0100)]
    hear(2, 0b1111)
    assert free() == 0b1000
    assert [claims[0].device_mask for claims in candidates(mirror.view, shape).candidates] == [0b1000]
    mirror.approved(taken[0], 3)
    mirror.restore(taken[1])
    assert free() == 0b1010, "a rejected request gives its devices back"
    hear(4, 0b1110)
    assert free() == 0b1010, "the node's state includes the approved one, and the third is under way"
    hear(5, 0b1111)
    assert free() == 0b1011, "what the master frees later is free"
    mirror.approved(taken[2], 5)
    assert free() == 0b1111
