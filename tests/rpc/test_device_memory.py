"""What a parked job keeps of devices on the wire: from the report of its daemon to the view, a refusal, its turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ganger.agent.v1 import agent_pb2
from ganger.cluster.view import View
from ganger.scheduling import DefaultScheduler
from ganger.scheduling.host import _lease_of
from ganger.v1 import job_pb2, job_service_pb2, scheduling_pb2
from ganger.wire import resource_messages as convert
from rpc.kit import Served, Speaker, configuration_set, serving, spec_of
from rpc.test_agent_and_scheduling_service import a_lease, approved, claim

GIB = 1 << 30


async def parked(served: Served, node: Speaker, stream: object) -> agent_pb2.ObservedGang:
    """A job of two devices at OFFLOAD, whose processes keep 4 MiB and 5 MiB of them."""
    await served.submit(spec_of(2, gpu_memory_bytes=GIB))
    place = claim("n1", 0b11)
    place.arena_bytes = 2 * (GIB + GIB // 10)
    assert (await approved(served, stream, place)).HasField("approved")
    (wanted,) = (await node.reconcile(max_wait_seconds=10.0)).gangs
    seen = agent_pb2.ObservedGang(
        job=wanted.job,
        job_uid=wanted.job_uid,
        epoch=wanted.epoch,
        order=wanted.order,
        phase=agent_pb2.ObservedGang.PHASE_RUNNING,
        capabilities=job_pb2.Capabilities(can_pause=True, can_offload=True),
    )
    await node.reconcile([seen])
    level = job_pb2.SUSPEND_LEVEL_OFFLOAD
    await served.jobs.SuspendJob(job_service_pb2.SuspendJobRequest(name=wanted.job, level=level))
    (wanted,) = (await node.reconcile(max_wait_seconds=10.0)).gangs
    seen.order.CopyFrom(wanted.order)
    seen.phase, seen.level = agent_pb2.ObservedGang.PHASE_PARKED, level
    seen.stop_sequence, seen.stop_step = wanted.stop_sequence, 7
    seen.residue_bytes.extend([4 << 20, 5 << 20, 0, 0])
    await node.reconcile([seen])
    return seen


def test_what_is_kept_is_shown_refused_to_others_and_told_to_its_own_scheduler(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as served:
            node = Speaker(served, "n1")
            await node.join()
            stream = served.scheduling.WatchLeases(scheduling_pb2.WatchLeasesRequest(scheduler="host"))
            await parked(served, node, stream)
            view = await served.scheduling.GetView(scheduling_pb2.GetViewRequest())
            assert view.nodes[0].free_mask == 0b1111
            assert list(view.nodes[0].parked_bytes) == [4 << 20, 5 << 20, 0, 0]

            await served.submit(spec_of(1, gpu_memory_bytes=GIB))
            refused = (await approved(served, stream, claim("n1", 0b10))).rejected
            assert refused.refusals[0].reason == "DEVICE_MEMORY"
            assert refused.refusals[0].figures["free_bytes"] == GIB - (5 << 20)
            assert list(refused.rows[0].parked_bytes) == [4 << 20, 5 << 20, 0, 0]
            await served.jobs.CancelJob(job_service_pb2.CancelJobRequest(name="jobs/2"))

            await served.jobs.ResumeJob(job_service_pb2.ResumeJobRequest(name="jobs/1"))
            turn = await a_lease(served, stream)
            while turn.job != "jobs/1":
                turn = await a_lease(served, stream)
            assert turn.device_memory_bytes == GIB
            # In its own place the job needs no more than is left beside others.
            copy = View([configuration_set()])
            copy.put(convert.node_row_from_wire(view.nodes[0]))
            (first, *_) = DefaultScheduler().propose(_lease_of(turn), copy).candidates
            assert first[0].device_mask == 0b11
            place = turn.parked[0]
            assert list(place.parked_bytes) == [4 << 20, 5 << 20, 0, 0]
            request = scheduling_pb2.GangRequest(
                job=turn.job,
                revision=turn.revision,
                lease=turn.lease,
                candidates=[scheduling_pb2.Candidate(claims=[place])],
            )
            assert (await served.scheduling.RequestGang(request)).HasField("approved")
            view = await served.scheduling.GetView(scheduling_pb2.GetViewRequest())
            assert (view.nodes[0].free_mask, list(view.nodes[0].parked_bytes)) == (0b1100, [])
            stream.cancel()

    asyncio.run(story())
