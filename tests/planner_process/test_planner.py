"""The planner against a real master: it follows all events, places pending jobs, reports their order, and recovers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from ganger.agent.v1 import agent_pb2
from ganger.cluster.resources import Role, TaskShape
from ganger.scheduling.host import SchedulerHost
from ganger.v1 import job_pb2, job_service_pb2, node_pb2, scheduling_pb2
from ganger.wire import times
from ganger.wire.endpoints import Endpoint
from ganger_master.core.commands import CHANGES_LIMIT, SubmitJob
from ganger_master.core.job_spec import JobSpec
from ganger_master.core.tenancy import MOST_GPUS, Partition, Team
from ganger_master.planner.context import ClusterChange, PlanContext
from ganger_master.planner.loop import PlannerLoop
from ganger_master.planner.order_stage import OrderStage
from ganger_master.planner_process.run import ClusterMirror, NoPlannerError, Planner
from rpc.kit import Served, Speaker, serving, spec_of, until
from rpc.test_reservations import create, reservation

PENDING, HOLDING = job_pb2.Job.STATE_PENDING, job_pb2.Job.STATE_HOLDING


def on_a_master(
    tmp_path: Path,
    story: Callable[[Served, Speaker], Awaitable[None]],
    policy: str = "las",
    nodes: int = 1,
    **settings: object,
) -> None:
    async def told() -> None:
        async with serving(tmp_path, planner=False, policy=policy, plan_every_s=1.0, **settings) as served:
            speakers = [Speaker(served, f"n{number}") for number in range(1, nodes + 1)]
            for speaker in speakers:
                await speaker.join()
            await story(served, speakers[0])

    asyncio.run(told())


@asynccontextmanager
async def planning(served: Served, **more: object) -> AsyncIterator[asyncio.Task[None]]:
    endpoint = Endpoint(served.master.address, served.master.token)
    task = asyncio.create_task(Planner(lambda: endpoint, **more).run())  # type: ignore[arg-type]
    # It requests what the planner suggests.
    host = asyncio.create_task(SchedulerHost(lambda: endpoint).run())
    try:
        yield task
    finally:
        task.cancel()
        host.cancel()
        await asyncio.gather(task, host, return_exceptions=True)


def state_of(served: Served, number: int) -> str:
    return served.master.writer.committed.jobs[number].state


async def get(served: Served, number: int) -> job_pb2.Job:
    return await served.jobs.GetJob(job_service_pb2.GetJobRequest(name=f"jobs/{number}"))


def test_it_starts_jobs_that_fit_and_reports_the_order_of_the_others(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        for gpus in (3, 2, 2):
            await served.submit(spec_of(gpus))
        first = await get(served, 1)
        assert (first.state, first.queue_rank) == (PENDING, 0)
        assert [blocker.reason for blocker in first.blockers] == ["RANKED"]
        assert first.blockers[0].message.startswith("policy las needs a planner, and none is connected")
        async with planning(served):
            state = served.master.writer.state
            await until(lambda: state_of(served, 1) == "HOLDING" and state.queue.ranks == {2: 1, 3: 2})
            last = await get(served, 3)
            found = await served.jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name="jobs/3"))
        assert (last.state, last.queue_rank) == (PENDING, 2)
        assert [blocker.reason for blocker in last.blockers] == ["GPUS", "RANKED"]
        assert dict(last.blockers[0].figures) == {"needed": 2, "free": 1}
        assert last.blockers[1].message == "the planner of policy las lets others go first (1 ahead)"
        assert [blocker.reason for blocker in found.blockers] == ["GPUS", "CORES", "RANKED"]
        # las may preempt for it at any time; the first job has just begun, and none has ended yet
        assert times.seconds(found.start_after) == 0.0
        assert times.seconds(found.start_before) == pytest.approx(600.0, abs=1.0)
        assert found.assumption.startswith("if the jobs before it take half to twice as long as they have run so far")

    on_a_master(tmp_path, story)


def test_a_burst_of_more_jobs_than_a_plan_may_start_is_started_in_several_plans(tmp_path: Path) -> None:
    many = CHANGES_LIMIT + 50

    async def story(served: Served, node: Speaker) -> None:
        spec = JobSpec(("train",), (Role("worker", 1, TaskShape(1, 1_000, 1 << 30)),), working_directory="/tmp")
        await served.master.writer.submit_all([SubmitJob(spec, f"uid-{n}", "ann") for n in range(many)])
        async with planning(served):
            jobs = served.master.writer.committed.jobs
            await until(lambda: all(job.state == "HOLDING" for job in jobs.values()))
        assert len(jobs) == many

    on_a_master(tmp_path, story, nodes=many // 4 + 1)


def test_a_new_place_is_used_and_a_cancelled_job_leaves_the_line(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        async with planning(served):
            for gpus in (4, 4, 4):
                await served.submit(spec_of(gpus))
            state = served.master.writer.state
            await until(lambda: state.queue.ranks == {2: 1, 3: 2})
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/2"))
            await until(lambda: state.queue.ranks == {3: 1})
            await Speaker(served, "n2").join()
            await until(lambda: state_of(served, 3) == "HOLDING" and state.queue.ranks == {})

    on_a_master(tmp_path, story)


def test_a_refused_change_delays_no_other_job_and_is_requested_again(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        async with planning(served):
            await served.submit(spec_of(4))
            await until(lambda: state_of(served, 1) == "HOLDING")
            # It has not said yet what it can: to stop it is refused.
            await served.submit(spec_of(1))
            await until(lambda: 2 in served.master.writer.state.queue.ranks)
            (gang,) = (await node.reconcile()).gangs
            running = agent_pb2.ObservedGang(
                job=gang.job,
                job_uid=gang.job_uid,
                epoch=gang.epoch,
                phase=agent_pb2.ObservedGang.PHASE_RUNNING,
                order=gang.order,
                capabilities=job_pb2.Capabilities(can_checkpoint=True),
            )
            await node.reconcile([running])
            gangs = served.master.writer.committed.gangs
            await until(lambda: gangs[gang.epoch].intent == "PARK")
            assert state_of(served, 2) == "PENDING"

    on_a_master(tmp_path, story)


@pytest.mark.parametrize("most", [2, MOST_GPUS])
def test_a_job_beyond_its_users_quota_is_in_no_line_and_starts_once_others_of_that_user_have_ended(
    tmp_path: Path, most: int
) -> None:
    async def story(served: Served, node: Speaker) -> None:
        async with planning(served):
            for _ in range(3):
                await served.submit(spec_of(2))
            state = served.master.writer.state
            if most > 2:
                await until(lambda: state_of(served, 2) == "HOLDING" and 3 in state.queue.ranks)
                return
            await until(lambda: state_of(served, 1) == "HOLDING")
            assert (await get(served, 2)).blockers[0].reason == "QUOTA"
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/1"))
            await node.reconcile()
            await node.reconcile([])
            await until(lambda: state_of(served, 2) == "HOLDING" and not state.queue.ranks)
            assert state_of(served, 3) == "PENDING"

    on_a_master(tmp_path, story, quotas={"*": most})


@pytest.mark.parametrize("policy", ["fifo", "las"])
def test_with_teams_it_places_jobs_under_every_policy_and_follows_the_use_of_users(tmp_path: Path, policy: str) -> None:
    async def story(served: Served, node: Speaker) -> None:
        async with planning(served):
            await served.submit(spec_of(3))
            await until(lambda: state_of(served, 1) == "HOLDING")
            (gang,) = (await node.reconcile()).gangs
            running = agent_pb2.ObservedGang(
                job=gang.job,
                job_uid=gang.job_uid,
                epoch=gang.epoch,
                phase=agent_pb2.ObservedGang.PHASE_RUNNING,
                order=gang.order,
            )
            await node.reconcile([running])
            await served.submit(spec_of(2))
            await until(lambda: served.master.writer.state.queue.ranks == {2: 1})
            found = await served.jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name="jobs/2"))
            (ranked,) = [one for one in found.blockers if one.reason == "RANKED"]
            assert "first in the queue" in ranked.message
            assert "team 'all' has 100% of the use of late, and a share of 100%" in ranked.message

    on_a_master(tmp_path, story, policy, teams={"all": Team(("*",))})


@pytest.mark.parametrize("policy", ["fifo", "las", "ganger"])
def test_with_partitions_each_job_starts_on_a_node_of_its_own_and_a_queue_of_one_delays_no_other(
    tmp_path: Path, policy: str
) -> None:
    partitions = {
        "batch": Partition(nodes=("n1",), time_s=3600.0),
        "urgent": Partition(nodes=("n2",), priority=1, gpus_per_job=2, preemptible=False),
    }

    async def story(served: Served, node: Speaker) -> None:
        async with planning(served):
            for _ in range(3):
                await served.submit(spec_of(4))
            urgent = spec_of(2)
            urgent.partition = "urgent"
            await served.submit(urgent)
            await until(lambda: state_of(served, 1) == state_of(served, 4) == "HOLDING")
            places = {number: (await get(served, number)).gang.claims[0].node for number in (1, 4)}
            assert places == {1: "nodes/n1", 4: "nodes/n2"}
            waiting = await get(served, 2)
            assert (waiting.spec.partition, times.seconds(waiting.spec.time_limit)) == ("batch", 3600.0)
            assert "in partition 'batch'" in waiting.blockers[0].message
            found = (await served.nodes.ListPartitions(node_pb2.ListPartitionsRequest())).partitions
            assert [(one.name, one.nodes, one.devices_held, one.devices_free) for one in found] == [
                ("batch", "n1", 4, 0),
                ("urgent", "n2", 2, 2),
            ]
            assert [(one.jobs_holding, one.jobs_pending) for one in found] == [(1, 2), (1, 0)]

    on_a_master(tmp_path, story, policy, nodes=2, partitions=partitions)


@pytest.mark.parametrize("nodes", [("n2",), ("n1", "n2")], ids=["apart", "in common"])
def test_why_makes_a_forecast_in_a_partition_from_its_own_nodes(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    partitions = {"batch": Partition(nodes=("n1",)), "urgent": Partition(nodes=nodes)}

    async def story(served: Served, node: Speaker) -> None:
        async with planning(served):
            for _ in range(2):
                await served.submit(spec_of(4))
            await until(lambda: state_of(served, 1) == "HOLDING" and served.master.writer.state.queue.ranks == {2: 1})
            found = await served.jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name="jobs/2"))
        assert found.assumption.startswith("if the jobs before it take")
        assert times.seconds(found.start_before) > 100.0

    on_a_master(tmp_path, story, "fifo", nodes=2, partitions=partitions)


def test_where_jobs_share_gpus_it_starts_jobs_that_fit_and_continues_after_a_restart(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        state = served.master.writer.state
        async with planning(served):
            for _ in range(5):
                await served.submit(spec_of(1))
            await until(lambda: [state_of(served, number) for number in range(1, 6)].count("HOLDING") == 4)
            await until(lambda: list(state.queue.ranks.values()) == [1])
        await Speaker(served, "n2").join()
        async with planning(served):
            await until(lambda: state_of(served, 5) == "HOLDING")

    on_a_master(tmp_path, story, "gandiva")


def cores_of(served: Served) -> list[int]:
    gangs = served.master.writer.committed.gangs
    return [sum(claim.millicores) for _, gang in sorted(gangs.items()) for claim in gang.claims]


def test_a_policy_that_tunes_starts_gangs_with_their_cores_and_takes_back_what_newcomers_need(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        async with planning(served):
            for cores in ([4_000], [4_000, 4_000], [2_666, 2_666, 2_666]):
                await served.submit(spec_of(1))
                await until(lambda cores=cores: cores_of(served) == cores)  # type: ignore[misc]
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/1"))
            # It hears of the order, and then that there is nothing of the job on the node means that it is gone.
            for _ in range(2):
                await node.reconcile([])
            await until(lambda: cores_of(served) == [4_000, 4_000])

    on_a_master(tmp_path, story, "las+role")


def test_edf_places_by_deadlines_and_says_whether_they_can_be_met(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        soon, later = times.timestamp(time.time() + 600), times.timestamp(time.time() + 7_200)
        limit = times.duration(1_800)
        await served.submit(spec_of(4, time_limit=limit))
        await served.submit(spec_of(4, deadline=later, time_limit=limit))
        await served.submit(spec_of(4, deadline=soon, time_limit=limit))
        found = [
            await served.jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name=f"jobs/{number}"))
            for number in (1, 2, 3)
        ]
        assert [one.deadline_advice for one in found] == [
            "",
            "can be met: it would end 60 min before it",
            "cannot be met: it would end 20 min after it",
        ]
        async with planning(served):
            # Whose deadline is first, though it cannot be met; then the other one; then the one without a deadline.
            await until(lambda: served.master.writer.state.queue.ranks == {2: 1, 1: 2})
            assert state_of(served, 3) in ("PENDING", "HOLDING")

    on_a_master(tmp_path, story, "edf")


def test_other_policies_say_that_they_do_nothing_for_a_deadline(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        await served.submit(spec_of(4, deadline=times.timestamp(time.time() + 600)))
        found = await served.jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name="jobs/1"))
        assert found.deadline_advice == "nothing is done for it: policy las does not go by deadlines, edf does"

    on_a_master(tmp_path, story)


def test_tetris_passes_over_a_job_that_does_not_fit_and_preempts_none(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        for gpus in (1, 4, 3):
            await served.submit(spec_of(gpus))
        async with planning(served):
            wanted = ["HOLDING", "PENDING", "HOLDING"]
            await until(lambda: [state_of(served, number) for number in (1, 2, 3)] == wanted)

    on_a_master(tmp_path, story, "tetris")


def test_job_schedulers_are_told_that_it_is_nobodys_turn(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        job = await served.submit(spec_of(1))
        request = scheduling_pb2.GangRequest(job=job.name, revision=job.revision)
        verdict = await served.scheduling.RequestGang(request)
        assert verdict.rejected.refusals[0].reason == "OUT_OF_TURN"
        assert "policy las: jobs start only with a lease" in verdict.rejected.refusals[0].message

    on_a_master(tmp_path, story)


def test_the_first_delta_is_everything_in_parts_and_the_next_ones_are_what_changed(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        await asyncio.gather(*[served.submit(spec_of(1)) for _ in range(450)])
        await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/1"))
        mirror = ClusterMirror(lambda: 0.0)
        stream = served.scheduling.WatchCluster(scheduling_pb2.WatchClusterRequest())

        async def hear() -> tuple[ClusterChange, int]:
            parts = 0
            while True:
                delta = await asyncio.wait_for(stream.read(), 10.0)
                parts += 1
                change = mirror.apply(delta)  # type: ignore[arg-type]
                assert (change is None) == delta.has_more  # type: ignore[attr-defined]
                if change is not None:
                    return change, parts

        first, parts = await hear()
        assert (sorted(job.number for job, _, _ in first.jobs), parts) == (list(range(1, 451)), 3)
        assert [job.number for job, _, _ in first.jobs if job.state.is_finished] == [1]
        assert (first.is_whole, mirror.policy, mirror.plan_every_s) == (True, "las", 1.0)
        assert [free.bit_count() for free in first.view.free] == [4]
        assert mirror.now == pytest.approx(served.master.writer.now(), abs=5.0)
        await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/7"))
        second, parts = await hear()
        assert [job.number for job, _, _ in second.jobs] == [7]
        assert (second.is_whole, second.view, parts) == (False, first.view, 1)
        await Speaker(served, "n2").join()
        while len(first.view.slots) == 1:
            assert (await hear())[0].jobs == []
        stream.cancel()

    on_a_master(tmp_path, story)


def test_reservations_are_sent_when_they_change_and_stand_until_then(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        for number in range(250):
            start = 3_600.0 * (1 + 2 * number)
            await create(served, reservation(f"r{number}", start=start, users=["ann"], lead=times.duration(0.0)))
        mirror = ClusterMirror(lambda: 0.0)
        stream = served.scheduling.WatchCluster(scheduling_pb2.WatchClusterRequest())
        found: list[int] = []

        async def hear() -> None:
            while True:
                change = mirror.apply(await asyncio.wait_for(stream.read(), 10.0))  # type: ignore[arg-type]
                if change is not None:
                    assert all((one.nodes, one.users) == (("n1",), ("ann",)) for one in change.reservations)
                    return found.append(len(change.reservations))

        await hear()
        await served.nodes.DeleteReservation(node_pb2.DeleteReservationRequest(name="r0"))
        await hear()
        await served.submit(spec_of(1))
        await hear()
        assert found == [250, 249, 249]
        stream.cancel()

    on_a_master(tmp_path, story)


@pytest.mark.parametrize("policy", ["las", "ganger"])
def test_a_job_that_a_reservation_keeps_out_is_not_tried_and_starts_once_that_is_deleted(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(served: Served, node: Speaker) -> None:
        await create(served, reservation("upgrade", start=7_200.0))
        async with planning(served):
            await served.submit(spec_of(2, agent=job_pb2.JobSpec.AGENT_NONE))
            await served.submit(spec_of(1))
            await until(lambda: state_of(served, 2) == "HOLDING")
            assert (await get(served, 1)).state == PENDING
            found = await served.jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name="jobs/1"))
            assert found.blockers[0].reason == "NODE_RESERVED"
            await served.nodes.DeleteReservation(node_pb2.DeleteReservationRequest(name="upgrade"))
            await until(lambda: state_of(served, 1) == "HOLDING")
        assert "change refused" not in [record.message for record in caplog.records]

    caplog.set_level(logging.INFO)
    on_a_master(tmp_path, story, policy)


def test_a_plan_that_fails_is_logged_and_the_next_one_starts_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, errors = OrderStage.plan, [ZeroDivisionError("a bug")]

    def failing(stage: OrderStage, context: PlanContext) -> None:
        if errors and context.jobs.has_waiting:
            raise errors.pop()
        plan(stage, context)

    monkeypatch.setattr(OrderStage, "plan", failing)

    async def story(served: Served, node: Speaker) -> None:
        async with planning(served):
            await served.submit(spec_of(1))
            await until(lambda: state_of(served, 1) == "HOLDING")

    on_a_master(tmp_path, story)
    assert ("plan failed: the next one goes on without it", "ZeroDivisionError: a bug") in said(caplog)


def test_a_planner_ends_after_failures_in_a_row_and_not_after_as_many_with_idle_passes_between() -> None:
    def passes_before_the_end(fails: Sequence[bool]) -> int:
        left = list(fails)

        class Loop:
            def step(self, now: float) -> tuple[None, float]:
                if not left:
                    raise asyncio.CancelledError
                if left.pop(0):
                    raise ZeroDivisionError("a bug")
                return None, now

        async def told() -> None:
            planner = Planner(lambda: Endpoint("nowhere"))
            planner._loop = cast(PlannerLoop, Loop())
            planner._news.set()
            await planner._plan_for_ever(None)

        with pytest.raises((ZeroDivisionError, asyncio.CancelledError)):
            asyncio.run(told())
        return len(fails) - len(left)

    assert passes_before_the_end([True] * 5) == 3
    assert passes_before_the_end([True, False] * 5) == 10


def test_while_the_master_settles_a_restore_one_line_is_logged_at_its_start_and_one_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ganger_master.planner_process.run")
    tries: list[float] = []

    async def restored() -> None:
        # A copy of the database has a node and a pending job.
        async with serving(tmp_path, planner=False, policy="las") as served:
            await Speaker(served, "n1").join()
            await served.submit(spec_of(1))
        async with serving(tmp_path, planner=False, policy="las", restored=True) as served:
            endpoint = Endpoint(served.master.address, served.master.token)

            def find() -> Endpoint:
                tries.append(0.0)
                return endpoint

            task = asyncio.create_task(Planner(find).run())
            await until(lambda: len(tries) > 4)
            assert said(caplog) == [("planning", ""), ("master is away", "RESTORING")]
            await served.nodes.SettleRestore(node_pb2.SettleRestoreRequest())
            await until(lambda: len(said(caplog)) > 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(restored())
    assert said(caplog) == [("planning", ""), ("master is away", "RESTORING"), ("planning", "")]


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What the planner logged, with the reasons."""
    return [(one.message, getattr(one, "reason", "")) for one in caplog.records if one.name.endswith("process.run")]


def test_a_reload_of_the_master_is_told_as_a_new_beginning(tmp_path: Path) -> None:
    async def story(served: Served, node: Speaker) -> None:
        await served.submit(spec_of(2))
        async with planning(served):
            await until(lambda: state_of(served, 1) == "HOLDING")
            await served.master.writer._load()
            await node.join()
            await served.submit(spec_of(2))
            await until(lambda: state_of(served, 2) == "HOLDING")

    on_a_master(tmp_path, story)


@pytest.mark.parametrize(
    ("policy", "own", "why"),
    [
        ("fifo", "", "under policy fifo no planner ranks jobs: there is nothing to plan"),
        ("fifo", "las", "under the master's policy fifo no planner ranks jobs: start it with --policy las"),
        ("las", "srtf", "policy 'srtf' asks an oracle how long jobs take: for the simulator only; there are"),
        ("las", "nonsense", "there is no policy 'nonsense'; there are"),
    ],
)
def test_where_there_is_nothing_to_plan_it_ends_and_says_why(tmp_path: Path, policy: str, own: str, why: str) -> None:
    async def story(served: Served, node: Speaker) -> None:
        async with planning(served, policy=own) as task:
            with pytest.raises(NoPlannerError, match=why[:40].replace("'", ".")) as ended:
                await asyncio.wait_for(task, 10.0)
            assert str(ended.value).startswith(why)

    on_a_master(tmp_path, story, policy)
