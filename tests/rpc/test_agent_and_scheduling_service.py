"""From a submission to a wanted gang: turns, verdicts, held polls, sessions, over a real socket."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import grpc
import pytest
from ganger.agent.v1 import agent_pb2
from ganger.v1 import array_pb2, job_pb2, job_service_pb2, node_pb2, resources_pb2, scheduling_pb2
from ganger.wire.errors import from_rpc_error
from ganger_master.planner.remaining_time import Calibration, RemainingTime
from ganger_master.rpc.planner_messages import remaining_times_to_wire
from ganger_master.store.sql import SqlStore
from rpc.kit import Served, Speaker, serving, spec_of, until


async def reason(call: object) -> str:
    with pytest.raises(grpc.RpcError) as failed:
        await call  # type: ignore[misc]
    return from_rpc_error(failed.value).reason


def claim(node: str, mask: int = 0b1) -> resources_pb2.Claim:
    tasks = mask.bit_count()
    return resources_pb2.Claim(
        node=f"nodes/{node}",
        device_mask=mask,
        millicores=[2000 * tasks],
        memory_bytes=(1 << 30) * tasks,
        tasks=[tasks],
    )


async def a_lease(served: Served, stream: object) -> scheduling_pb2.PlacementLease:
    """The next lease of the stream, which comes alone."""
    batch = await asyncio.wait_for(stream.read(), 10.0)  # type: ignore[attr-defined]
    (lease,) = batch.leases
    return lease  # type: ignore[no-any-return]


async def approved(served: Served, stream: object, *claims: resources_pb2.Claim) -> scheduling_pb2.Verdict:
    return await approved_for(served, await a_lease(served, stream), *claims)


async def approved_for(
    served: Served, lease: scheduling_pb2.PlacementLease, *claims: resources_pb2.Claim
) -> scheduling_pb2.Verdict:
    request = scheduling_pb2.GangRequest(
        job=lease.job,
        revision=lease.revision,
        lease=lease.lease,
        candidates=[scheduling_pb2.Candidate(claims=claims)],
    )
    return await served.scheduling.RequestGang(request)


def test_job_is_placed_and_the_daemon_hears_of_it_in_its_held_poll(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            session = await node.join()
            assert session.storage_token
            host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
            poll = asyncio.ensure_future(node.reconcile(max_wait_seconds=30.0))
            await served.submit(spec_of(2, environment={"A": "1"}))
            verdict = await approved(served, host, claim("n1", 0b11))
            assert verdict.WhichOneof("verdict") == "approved", verdict
            response = await poll
            assert response.changed
            (gang,) = response.gangs
            assert (gang.job, gang.epoch) == ("jobs/1", verdict.approved.epoch)
            assert gang.intent == agent_pb2.INTENT_RUN
            assert dict(gang.spec.environment) == {"A": "1"}
            assert list(gang.members[0].ranks) == [0, 1]
            job = await served.jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/1"))
            assert job.state == job_pb2.Job.STATE_HOLDING
            view = await served.scheduling.GetView(scheduling_pb2.GetViewRequest())
            assert view.nodes[0].free_mask == 0b1100
            host.cancel()

    asyncio.run(story())


def test_a_poll_sent_after_another_master_took_the_store_over_extends_no_lease(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            newer = SqlStore(served.master.config.database)
            newer.open()
            taken_over = time.monotonic()
            # The margin of lost_after is thirty times as long.
            while time.monotonic() < taken_over + 1.0:
                try:
                    await node.reconcile()
                except grpc.RpcError:
                    break
            assert await reason(node.reconcile()) == "NOT_READY"
            await asyncio.wait_for(served.master.writer.stopped.wait(), 10.0)
            assert await reason(served.submit()) == "NOT_READY"
            newer.close()

    asyncio.run(story())


def test_a_daemon_hears_which_checkpoints_on_its_disk_may_go(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, checkpoints_kept_s=0.0) as served:
            node = Speaker(served, "n1")
            await node.join()
            ended, waiting = await served.submit(), await served.submit()
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name=ended.name))
            uids = (ended.uid, waiting.uid, "of-no-job")
            kept = [agent_pb2.KeptCheckpoint(job_uid=uid, path="checkpoints/5-1") for uid in uids]
            answer = await node.reconcile(kept=kept)
            assert [(one.job_uid, one.path) for one in answer.removable_checkpoints] == [(ended.uid, "checkpoints/5-1")]

    asyncio.run(story())


def test_a_leader_has_the_addresses_of_nodes_that_can_keep_copies_now_and_a_start_those_that_have_one(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            n1, n2, n3 = (
                Speaker(served, name, peer_address=f"127.0.0.1:{name[1]}", keeps_checkpoints=True)
                for name in ("n1", "n2", "n3")
            )
            for node in (n1, n2, n3):
                await node.join()
            host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
            job = await served.submit(spec_of(checkpoint_copies=2))
            assert (await approved(served, host, claim("n1"))).HasField("approved")
            answer = await n1.reconcile()
            (gang,) = answer.gangs
            assert gang.checkpoints_on_nodes
            copies = [(one.epoch, list(one.addresses)) for one in answer.copy_peers]
            assert copies == [(gang.epoch, ["127.0.0.1:2", "127.0.0.1:3"])]
            # A daemon that has just begun a session has not reported yet. The desired set is not sent for that.
            await n2.open()
            answer = await n1.reconcile()
            assert not answer.gangs
            assert [list(one.addresses) for one in answer.copy_peers] == [["127.0.0.1:3"]]
            await n2.reconcile([])

            checkpoint = job_pb2.Checkpoint(step=9, epoch=gang.epoch, path=f"checkpoints/9-{gang.epoch}")
            checkpoint.nodes.append("nodes/n1")
            ended = agent_pb2.ObservedGang(
                job=gang.job, job_uid=gang.job_uid, epoch=gang.epoch, order=gang.order, checkpoint=checkpoint,
                phase=agent_pb2.ObservedGang.PHASE_ENDED, outcome=agent_pb2.Outcome(kind=agent_pb2.Outcome.KIND_FENCED),
            )  # fmt: skip
            await n1.reconcile([ended])
            # Another node has fetched it.
            kept = [agent_pb2.KeptCheckpoint(job_uid=gang.job_uid, path=checkpoint.path)]
            assert not (await n2.reconcile(kept=kept)).removable_checkpoints
            shown = await served.jobs.GetJob(job_service_pb2.GetJobRequest(name=job.name))
            assert list(shown.checkpoint.nodes) == ["nodes/n1", "nodes/n2"]
            assert (await approved(served, host, claim("n3"))).HasField("approved")
            (gang,) = (await n3.reconcile()).gangs
            assert list(gang.restore.checkpoint_streams) == ["127.0.0.1:2"] * 2
            host.cancel()

    asyncio.run(story())


def test_second_claim_on_the_same_devices_is_rejected_with_fresh_rows(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
            await served.submit()
            await served.submit()
            assert (await approved(served, host, claim("n1"))).HasField("approved")
            verdict = await approved(served, host, claim("n1"))
            assert verdict.rejected.refusals[0].reason == "GPUS"
            assert [row.node for row in verdict.rejected.rows] == ["nodes/n1"]
            assert verdict.rejected.rows[0].free_mask == 0b1110
            host.cancel()

    asyncio.run(story())


def test_batched_requests_are_answered_in_order_with_refusals_in_their_places(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, policy="backfill") as served:
            await Speaker(served, "n1").join()
            await served.submit()
            await served.submit()

            async def messages():  # type: ignore[no-untyped-def]
                yield scheduling_pb2.GangRequests(
                    requests=[
                        scheduling_pb2.GangRequest(
                            job=f"jobs/{number}",
                            revision=1,
                            candidates=[scheduling_pb2.Candidate(claims=[claim("n1", mask)])],
                        )
                        for number, mask in ((1, 0b1), (77, 0b1), (2, 0b10))
                    ]
                )

            answers = [answer async for answer in served.scheduling.RequestGangs(messages())]
            (verdicts,) = answers
            kinds = [verdict.WhichOneof("verdict") for verdict in verdicts.verdicts]
            assert kinds == ["approved", "rejected", "approved"], verdicts
            assert verdicts.verdicts[1].rejected.refusals[0].reason == "JOB_NOT_FOUND"

    asyncio.run(story())


def test_view_watcher_gets_the_whole_then_deltas_and_can_resume(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            watch = served.scheduling.WatchView(scheduling_pb2.WatchViewRequest())
            first = await watch.read()
            assert (first.from_version, [row.node for row in first.nodes]) == (0, ["nodes/n1"])
            await Speaker(served, "n2").join()
            seen: set[str] = set()
            version = first.version
            while "nodes/n2" not in seen:
                delta = await asyncio.wait_for(watch.read(), 10.0)
                assert delta.from_version == version
                version = delta.version
                seen |= {row.node for row in delta.nodes}
            assert "nodes/n1" not in seen
            watch.cancel()
            resumed = served.scheduling.WatchView(scheduling_pb2.WatchViewRequest(after_version=first.version))
            delta = await resumed.read()
            assert (delta.from_version, [row.node for row in delta.nodes]) == (first.version, ["nodes/n2"])
            resumed.cancel()

    asyncio.run(story())


def test_only_the_newest_call_of_a_node_is_answered(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            older = asyncio.ensure_future(node.reconcile(max_wait_seconds=30.0))
            held = served.master.writer.committed
            await until(lambda: bool(held._watchers.get("nodes/n1")))
            response = await node.reconcile([])
            assert response.observation == node.observation
            assert await reason(older) == "NOT_READY"

    asyncio.run(story())


def test_a_daemon_that_always_has_news_before_its_time_is_up_is_answered_all_the_same(tmp_path: Path) -> None:
    async def answered(node: Speaker) -> bool:
        try:
            await node.reconcile([], max_wait_seconds=1.0, timeout=0.3)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return False
        return True

    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            tries = [await answered(node) for _ in range(12)]
            assert any(tries), "its node would be lost"
            assert not all(tries), "a call is still held"

    asyncio.run(story())


def test_void_session_is_told_so_and_a_new_one_works(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            old, new = Speaker(served, "n1"), Speaker(served, "n1")
            await old.join()
            await new.join()
            assert await reason(old.reconcile([])) == "SESSION_SUPERSEDED"
            await new.reconcile([])
        async with serving(tmp_path) as served:
            new.served = served
            assert await reason(new.reconcile([])) == "SESSION_SUPERSEDED"
            unknown = await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert unknown.state == node_pb2.Node.STATE_UNKNOWN
            assert not unknown.view_entry.available
            await new.join()
            ready = await served.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))
            assert ready.state == node_pb2.Node.STATE_READY

    asyncio.run(story())


def test_cordoned_node_takes_no_gangs_and_says_why(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            cordon = served.nodes.CordonNode
            assert await reason(cordon(node_pb2.CordonNodeRequest(name="nodes/n1"))) == "REASON_MISSING"
            marked = await cordon(node_pb2.CordonNodeRequest(name="nodes/n1", reason="fan"))
            assert (marked.state, marked.state_reason) == (node_pb2.Node.STATE_CORDONED, "fan")
            assert not marked.view_entry.available
            back = await served.nodes.UncordonNode(node_pb2.UncordonNodeRequest(name="nodes/n1"))
            assert back.view_entry.available
            assert await reason(served.nodes.DeclareNodeLost(node_pb2.DeclareNodeLostRequest(name="nodes/n1"))) == (
                "NODE_ALIVE"
            )

    asyncio.run(story())


def test_a_node_whose_daemon_is_connected_is_neither_lost_nor_another_machine(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, session_alive_s=0.001) as served:
            node, lost = Speaker(served, "n1"), node_pb2.DeclareNodeLostRequest(name="nodes/n1")
            await node.join()
            poll = asyncio.ensure_future(node.reconcile(max_wait_seconds=30.0))
            await until(lambda: served.is_held("n1"))
            await asyncio.sleep(0.01)  # longer than an answer counts
            assert await reason(served.nodes.DeclareNodeLost(lost)) == "NODE_ALIVE"
            assert await reason(Speaker(served, "n1", machine="another").open()) == "NODE_NAME_TAKEN"
            poll.cancel()
            await until(lambda: not served.is_held("n1"))
            assert (await served.nodes.DeclareNodeLost(lost)).state == node_pb2.Node.STATE_LOST

    asyncio.run(story())


def test_a_removed_node_is_nowhere_any_more_and_its_daemon_joins_anew(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path, session_alive_s=0.001) as served:
            node, remove = Speaker(served, "n1"), node_pb2.RemoveNodeRequest(name="nodes/n1")
            await node.join()
            watch = served.scheduling.WatchView(scheduling_pb2.WatchViewRequest())
            assert [row.node for row in (await watch.read()).nodes] == ["nodes/n1"]
            poll = asyncio.ensure_future(node.reconcile(max_wait_seconds=30.0))
            await until(lambda: served.is_held("n1"))
            await asyncio.sleep(0.01)  # longer than an answer counts
            assert await reason(served.nodes.RemoveNode(remove)) == "NODE_ALIVE"
            poll.cancel()
            await until(lambda: not served.is_held("n1"))
            await served.nodes.RemoveNode(remove)
            assert (await watch.read()).removed_nodes == ["nodes/n1"]
            assert not (await served.nodes.ListNodes(node_pb2.ListNodesRequest())).nodes
            assert await reason(served.nodes.RemoveNode(remove)) == "NODE_NOT_FOUND"
            assert await reason(node.reconcile([])) == "SESSION_SUPERSEDED"
            await node.join()
            assert [row.node for row in (await watch.read()).nodes] == ["nodes/n1"]

    asyncio.run(story())


def test_leases_of_one_commit_come_in_one_message_and_one_by_one_to_a_scheduler_of_version_1(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await Speaker(served, "n1").join()
            members = [array_pb2.ArrayMember(index=index) for index in range(2)]
            array = job_service_pb2.CreateArrayRequest(spec=spec_of(), members=members, request_id="r")
            request = scheduling_pb2.WatchLeasesRequest(scheduler="host")
            host = served.scheduling.WatchLeases(request)
            await served.jobs.CreateArray(array)
            batch = await asyncio.wait_for(host.read(), 10.0)
            assert [(lease.rank, lease.job) for lease in batch.leases] == [(1, "jobs/2"), (2, "jobs/3")]
            host.cancel()
            old = served.scheduling.WatchTurns(request)
            assert {(await asyncio.wait_for(old.read(), 10.0)).job for _ in range(2)} == {"jobs/2", "jobs/3"}
            old.cancel()

    asyncio.run(story())


def test_progress_of_a_running_gang_shows_in_its_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
            await served.submit()
            verdict = await approved(served, host, claim("n1"))
            await node.reconcile(max_wait_seconds=10.0)

            async def reports():  # type: ignore[no-untyped-def]
                for epoch, step in ((verdict.approved.epoch, 7), (verdict.approved.epoch + 5, 99)):
                    yield agent_pb2.ProgressReport(
                        session=node.session,
                        gangs=[
                            agent_pb2.GangProgress(
                                job="jobs/1",
                                epoch=epoch,
                                progress=job_pb2.Progress(step=step, steps_per_s=3.5, loss=0.25, stall_reason="slow"),
                            )
                        ],
                    )

            await served.agents.ReportProgress(reports())
            job = await served.jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/1"))
            # It starts still: a job that does not run now has no rate.
            assert (job.progress.step, job.progress.steps_per_s) == (7, 0.0)
            assert job.progress.stall_reason == "slow"
            batch = await served.scheduling.WatchProgress(scheduling_pb2.WatchProgressRequest()).read()
            assert batch.progress["jobs/1"].step == 7
            host.cancel()

    asyncio.run(story())


def test_a_plan_with_remaining_times_alone_decides_nothing_and_they_are_shown_while_the_job_runs(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
            await served.submit()
            await approved(served, host, claim("n1"))

            async def shown() -> job_pb2.Job:
                return await served.jobs.GetJob(job_service_pb2.GetJobRequest(name="jobs/1"))

            found = RemainingTime(1, 60.0, 50.0, 90.0)
            times = remaining_times_to_wire([found, RemainingTime(7, 1.0, 0.0, math.inf)], Calibration(10, 9), 1_000.0)
            before = served.master.writer.committed.view_version
            await served.scheduling.ProposePlan(scheduling_pb2.Plan(remaining_times=times))
            assert served.master.writer.committed.view_version == before
            assert not (await shown()).HasField("remaining_time"), "it does not run yet"
            desired = await node.reconcile(max_wait_seconds=10.0)
            gangs = [
                agent_pb2.ObservedGang(
                    job=gang.job, job_uid=gang.job_uid, epoch=gang.epoch, order=gang.order,
                    phase=agent_pb2.ObservedGang.PHASE_RUNNING, stop_sequence=gang.stop_sequence,
                )
                for gang in desired.gangs
            ]  # fmt: skip
            await node.reconcile(gangs)
            remaining = (await shown()).remaining_time
            assert (remaining.expected.seconds, remaining.low.seconds, remaining.high.seconds) == (60, 50, 90)
            assert (remaining.judged_ranges, remaining.held_ranges, remaining.time.seconds) == (10, 9, 1_000)
            host.cancel()

    asyncio.run(story())


def test_log_of_a_rank_that_an_elastic_job_may_have_had_can_be_read(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await served.submit(spec_of(1, gpus_min=1, gpus_max=4))
            had = served.jobs.ReadLog(job_service_pb2.ReadLogRequest(name="jobs/1", rank=3))
            assert [chunk async for chunk in had] == []
            never = served.jobs.ReadLog(job_service_pb2.ReadLogRequest(name="jobs/1", rank=4))
            assert await reason(never.read()) == "RANK_NOT_FOUND"

    asyncio.run(story())


def test_log_of_a_rank_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            await served.submit()
            read = served.jobs.ReadLog(job_service_pb2.ReadLogRequest(name="jobs/1", rank=3))
            assert await reason(read.read()) == "RANK_NOT_FOUND"
            nothing = served.jobs.ReadLog(job_service_pb2.ReadLogRequest(name="jobs/1"))
            assert [chunk async for chunk in nothing] == []

    asyncio.run(story())


def test_the_lease_of_an_elastic_job_that_rests_asks_for_as_many_tasks_as_rest(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            host = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
            await served.submit(spec_of(1, gpus_min=1, gpus_max=4, gpu_memory_bytes=10 << 20))
            turn = await a_lease(served, host)
            assert [role.tasks for role in turn.spec.roles] == [1]
            place = claim("n1", 0b111)
            place.arena_bytes = 3 * (11 << 20)
            start = scheduling_pb2.StartChange(claims=[place])
            change = scheduling_pb2.Change(job="jobs/1", revision=turn.revision, start=start)
            verdict = await served.scheduling.ProposePlan(scheduling_pb2.Plan(changes=[change]))
            assert verdict.verdicts[0].approved, verdict
            can = job_pb2.Capabilities(can_pause=True, can_offload=True, can_resize=True)

            async def observed(phase: agent_pb2.ObservedGang.Phase.ValueType, **more: object) -> None:
                desired = await node.reconcile()
                gangs = [
                    agent_pb2.ObservedGang(
                        job=gang.job, job_uid=gang.job_uid, epoch=gang.epoch, order=gang.order, phase=phase,
                        capabilities=can, **{"stop_sequence": gang.stop_sequence, **more},  # type: ignore[arg-type]
                    )
                    for gang in desired.gangs
                ]  # fmt: skip
                await node.reconcile(gangs)

            await observed(agent_pb2.ObservedGang.PHASE_RUNNING)
            offload = job_pb2.SUSPEND_LEVEL_OFFLOAD
            await served.jobs.SuspendJob(job_service_pb2.SuspendJobRequest(name="jobs/1", level=offload))
            await observed(agent_pb2.ObservedGang.PHASE_PARKED, level=offload, stop_step=5)
            await served.jobs.ResumeJob(job_service_pb2.ResumeJobRequest(name="jobs/1"))
            turn = await a_lease(served, host)
            while not turn.parked:
                turn = await a_lease(served, host)
            assert [role.tasks for role in turn.spec.roles] == [3]
            host.cancel()

    asyncio.run(story())
