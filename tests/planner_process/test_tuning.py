"""A planner that tunes against a real master: it hears how fast jobs go with their cores, tries others, and moves cores
to jobs that use them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ganger.agent.v1 import agent_pb2
from ganger.v1 import job_pb2, job_service_pb2
from ganger.wire import times
from ganger_master.policies.trials import TrialPace
from planner_process.test_planner import on_a_master, planning
from rpc.kit import Served, Speaker, spec_of, until

# As slow as the master reports rates at most.
PACE = TrialPace(warm_s=0.2, settle_s=0.1, window_s=0.1, window_steps=1, most_s=20.0, share=1.0)
GIB = 1 << 30
ABLE = job_pb2.Capabilities(can_pause=True, can_offload=True, can_checkpoint=True)


class Fleet:
    """What a node's jobs do: each steps as fast as its cores let it, up to as many for each GPU as it can use."""

    def __init__(self, served: Served, node: Speaker, uses: dict[int, float]) -> None:
        self.served, self.node, self.uses = served, node, uses
        self.steps = dict.fromkeys(uses, 1_000.0)
        # Bytes below which a job's caches thrash, and what it is held to by a trial.
        self.caches: dict[int, int] = {}
        self.held: dict[str, int] = {}

    def cores(self, number: int) -> float:
        """For each GPU."""
        committed = self.served.master.writer.committed
        (claim,) = committed.gangs[committed.jobs[number].epoch].claims
        return sum(claim.millicores) / claim.device_mask.bit_count() / 1000

    async def run(self) -> None:
        await asyncio.gather(self._follow(), self.node.served.agents.ReportProgress(self._reports()))

    async def _follow(self) -> None:
        """Whatever is wanted runs as it is wanted."""
        while True:
            desired = await self.node.reconcile(max_wait_seconds=5.0)
            if desired.changed:
                self.held = {gang.job: gang.trial_memory_bytes for gang in desired.gangs}
                await self.node.reconcile([self._observed(gang) for gang in desired.gangs])

    def _observed(self, gang: agent_pb2.DesiredGang) -> agent_pb2.ObservedGang:
        return agent_pb2.ObservedGang(
            job=gang.job,
            job_uid=gang.job_uid,
            epoch=gang.epoch,
            phase=agent_pb2.ObservedGang.PHASE_RUNNING,
            order=gang.order,
            capabilities=ABLE,
        )

    async def _reports(self) -> AsyncIterator[agent_pb2.ProgressReport]:
        last = time.time()
        while True:
            await asyncio.sleep(0.05)
            now = time.time()
            report = agent_pb2.ProgressReport(session=self.node.session)
            for number, job in self.served.master.writer.committed.jobs.items():
                if job.epoch and not job.state.is_finished:
                    held = self.held.get(job.name, 0)
                    part = 0.2 if 0 < held < self.caches.get(number, 0) else 1.0
                    self.steps[number] += 1_000.0 * part * min(self.cores(number), self.uses[number]) * (now - last)
                    step = int(self.steps[number])
                    progress = job_pb2.Progress(step=step, time=times.timestamp(now), step_time=times.timestamp(now))
                    if number in self.caches:
                        progress.used_memory_bytes, progress.least_memory_bytes = 2 * GIB, GIB // 4
                        progress.trial_memory_bytes = held
                    report.gangs.add(job=job.name, epoch=job.epoch, progress=progress)
            last = now
            yield report


async def figures(served: Served, number: int) -> list[tuple[int, str]]:
    """Cores that it was given, and why, in order."""
    listed = await served.jobs.ListEvents(job_service_pb2.ListEventsRequest(subject=f"jobs/{number}"))
    changes = [event for event in listed.events if event.kind == "cores_changed"]
    return [(int(event.figures["millicores"]), event.message) for event in changes]


@pytest.mark.parametrize("policy", ["las+predictor", "las+synergy-tune"])
def test_cores_go_to_the_job_that_uses_them_and_a_change_that_gains_nothing_is_undone(
    tmp_path: Path, policy: str
) -> None:
    async def story(served: Served, node: Speaker) -> None:
        fleet = Fleet(served, node, uses={1: 1.0, 2: 3.0})
        running = asyncio.create_task(fleet.run())
        try:
            async with planning(served, trial_pace=PACE):
                # On 4 GPUs with 8 cores two are one GPU's share.
                await served.submit(spec_of(2))
                await until(lambda: served.master.writer.committed.jobs[1].epoch > 0 and fleet.cores(1) == 4.0, 30)
                await until(lambda: fleet.cores(1) == 1.0, 30)
                # Of the same series, and yet another one.
                await served.submit(spec_of(2))
                await until(lambda: served.master.writer.committed.jobs[2].epoch > 0 and fleet.cores(2) == 3.0, 30)
                assert fleet.cores(1) == 1.0
                await until(lambda: 2 in served.master.writer.state.cores_curves, 30)
            answer = await served.jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name="jobs/1"))
            assert {point.cores for point in answer.cores_curve.points} >= {1.0, 2.0, 4.0}
            assert "steps/s by cores for each GPU" in answer.cores_reason.lower().replace("gpu", "GPU")
            told = await figures(served, 1)
            assert told[0][0] == 8_000
            assert told[0][1].startswith("a trial of 4 cores for each GPU; steps/s by cores for each GPU: ")
            assert all(" with 2" in why for _, why in told)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    on_a_master(tmp_path, story, policy)


def test_less_memory_is_tried_at_the_daemon_and_what_was_enough_is_what_the_next_job_of_the_series_takes(
    tmp_path: Path,
) -> None:
    async def story(served: Served, node: Speaker) -> None:
        fleet = Fleet(served, node, uses={1: 1.0, 2: 1.0})
        fleet.caches = {1: GIB, 2: GIB}
        spec = spec_of(1)
        spec.roles[0].shape.memory_bytes = 0
        running = asyncio.create_task(fleet.run())
        state = served.master.writer.state

        def memory(number: int) -> int:
            committed = served.master.writer.committed
            return committed.gangs[committed.jobs[number].epoch].claims[0].memory_bytes

        try:
            async with planning(served, trial_pace=PACE):
                await served.submit(spec)
                await until(lambda: 1 in state.cores_curves and len(state.cores_curves[1].memory_points) > 3, 60)
                whole = memory(1)
                await until(lambda: not state.cores_curves[1].trial_memory_bytes and not any(fleet.held.values()), 30)
                curve = state.cores_curves[1]
                assert [point.memory_bytes for point in curve.memory_points][::3] == [GIB // 4, whole]
                assert GIB <= curve.enough_memory_bytes <= GIB * 5 // 4
                await served.submit(spec)
                await until(lambda: served.master.writer.committed.jobs[2].epoch > 0, 30)
                assert memory(2) == curve.enough_memory_bytes * 5 // 4 + GIB < whole
                assert memory(1) == whole
            answer = await served.jobs.ExplainJob(job_service_pb2.ExplainJobRequest(name="jobs/1"))
            assert "page cache included" in answer.memory_reason
            assert len(answer.cores_curve.memory_points) == len(curve.memory_points)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    on_a_master(tmp_path, story, "las+synergy-tune")
