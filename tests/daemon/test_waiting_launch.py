"""A gang whose launch has to wait is reported all the same: a master that wanted it would read its absence as gone."""

from __future__ import annotations

import sys
import threading
import uuid
from typing import Any

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, run, with_changes
from ganger.v1 import job_pb2
from ganger_daemon.gang import rank_launch as launching

pytestmark = pytest.mark.system


def test_gangs_that_wait_for_the_launch_of_another_are_reported_as_starting() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1")
        uid = str(uuid.uuid4())
        async with daemon.host.launch_lock:
            await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid, steps=20))
            waiting = await made.master.until("n1", 1, lambda _: True)
            assert waiting.phase == Observed.PHASE_STARTING
            assert not waiting.HasField("outcome")
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))

    run(story)


def test_a_gang_waits_for_the_cores_of_one_that_is_to_rest_and_does_not_yet() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1")
        # Both cores of a socket, and steps that take a while.
        leaves = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), pause=1.0)
        leaves.claim.millicores[0] = 2000
        await made.master.want("n1", leaves)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        comes = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=2)
        comes.claim.device_mask = 0b10
        level = job_pb2.SUSPEND_LEVEL_OFFLOAD
        parks = with_changes(leaves, 2, intent=Intents.INTENT_PARK, level=level, stop_sequence=2)
        await made.master.want("n1", parks)
        await made.master.want("n1", comes)
        await made.master.until("n1", 2, in_phase(Observed.PHASE_RUNNING))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        assert parked.level == level
        assert [len(shares) for shares in daemon.host.cores.held.values()] == [1]

    run(story)


def test_a_gang_waits_for_the_cores_that_a_job_without_boundaries_is_to_give_back() -> None:
    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1")
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        gives = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=command)
        gives.spec.agent = job_pb2.JobSpec.AGENT_NONE
        gives.claim.millicores[0], gives.threads = 2000, 2
        await made.master.want("n1", gives)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        fewer = with_changes(gives, 2, threads=1)
        fewer.claim.millicores[0] = 1000
        comes = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=2)
        comes.claim.device_mask = 0b10
        # The job never says that it has fewer threads, so its cores come late.
        await made.master.want("n1", fewer)
        await made.master.want("n1", comes)
        await made.master.until("n1", 2, in_phase(Observed.PHASE_RUNNING))
        assert [len(shares) for shares in daemon.host.cores.held.values()] == [1, 1]

    run(story)


def test_a_gang_is_refused_if_no_leaving_gang_will_free_the_cores_that_it_lacks() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        stays = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()))
        stays.claim.millicores[0] = 2000
        comes = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=2)
        comes.claim.device_mask = 0b10
        await made.master.want("n1", stays)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await made.master.want("n1", comes)
        ended = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert "no cores" in ended.outcome.message

    run(story)


def test_a_gang_that_reads_its_checkpoint_is_not_launched_beside_one_that_was_launched_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both_read, first_runs = threading.Event(), threading.Event()
    plan = launching.restore_plan

    def read(desired: Any, *arguments: Any) -> Any:
        if desired.epoch == 2:
            both_read.set()
            assert first_runs.wait(60.0)
        assert both_read.wait(60.0)
        return plan(desired, *arguments)

    launch, held = launching.RankLaunch._launch, dict[int, str]()

    async def note_and_launch(self: launching.RankLaunch, desired: Any, *arguments: Any) -> Any:
        held[desired.epoch] = self._blocked_by()
        return await launch(self, desired, *arguments)

    monkeypatch.setattr(launching, "restore_plan", read)
    # Both are in the middle of their launch while they read.
    monkeypatch.setattr(launching, "_READING_PATIENCE_S", 60.0)
    monkeypatch.setattr(launching.RankLaunch, "_launch", note_and_launch)

    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), steps=20, pause=0.1))
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=2))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        first_runs.set()
        await made.master.until("n1", 2, in_phase(Observed.PHASE_RUNNING))
        assert held == {1: "", 2: ""}

    run(story)
