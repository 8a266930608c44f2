"""Kills of daemons at any instant and of launchers: the job goes on, and the next daemon takes it over."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.injob.launcher.client import Launcher
from ganger.v1 import job_pb2

pytestmark = pytest.mark.system


def steps_in(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("step ")]


async def until_step(made: Cluster, node: str, uid: str, step: int) -> None:
    async with asyncio.timeout(20):
        while (steps_in(log_of(made.directory, node, uid, 0, 1)) or [0])[-1] < step:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_killed_daemon_harms_no_job_and_the_next_one_adopts_it() -> None:
    async def story(made: Cluster) -> None:
        first = await made.daemon_process("n1")
        await made.until_session("n1")
        uid = str(uuid.uuid4())
        gang = made.gang({"n1": [0, 1]}, "n1", uid=uid, pause=0.005)
        await made.master.want("n1", gang)
        running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        first.kill()
        await first.wait()
        before = steps_in(log_of(made.directory, "n1", uid, 0, 1))[-1]
        await until_step(made, "n1", uid, before + 20)
        made.master.book("n1").observed.clear()
        await made.daemon_process("n1")
        adopted = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        assert list(adopted.ranks) == list(running.ranks)
        await made.master.want(
            "n1",
            with_changes(gang, 2, intent=Intents.INTENT_PARK, level=job_pb2.SUSPEND_LEVEL_OFFLOAD, stop_sequence=2),
        )
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        assert steps_in(log_of(made.directory, "n1", uid, 1, 1)) == list(range(1, parked.stop_step + 1))

    run(story)


@pytest.mark.parametrize(
    "point", ["between-fork-and-page", "order-half-written", "partial-acks", "parked-before-report"]
)
def test_a_daemon_that_dies_at_a_named_point_is_continued_by_the_next(point: str) -> None:
    async def story(made: Cluster) -> None:
        first = await made.daemon_process("n1", failpoints=point)
        await made.until_session("n1")
        uid = str(uuid.uuid4())
        # one ack long before the other, so that the daemon's look falls in between
        mode = "apart" if point == "partial-acks" else ""
        gang = made.gang({"n1": [0, 1]}, "n1", uid=uid, pause=0.1 if mode else 0.03, mode=mode)
        await made.master.want("n1", gang)
        stop = with_changes(gang, 2, intent=Intents.INTENT_PARK, level=job_pb2.SUSPEND_LEVEL_PAUSE, stop_sequence=2)
        if point in ("partial-acks", "parked-before-report"):
            await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
            await made.master.want("n1", stop)
        async with asyncio.timeout(20):
            assert await first.wait() == -signal.SIGKILL
        await made.daemon_process("n1")
        if point not in ("partial-acks", "parked-before-report"):
            made.master.book("n1").observed.clear()
            await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
            await made.master.want("n1", stop)
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        for rank in (0, 1):
            assert steps_in(log_of(made.directory, "n1", uid, rank, 1)) == list(range(1, parked.stop_step + 1))
        assert len(parked.ranks) == 2

    run(story)


def test_a_job_whose_launcher_was_killed_runs_on_and_its_exit_is_known() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        uid = str(uuid.uuid4())
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid, steps=300, pause=0.01))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        (path,) = (made.directory / "r-n1" / "launchers").glob("*.sock")
        with Launcher(str(path)) as launcher:
            pid = int(launcher.info()["pid"])
        os.kill(pid, signal.SIGKILL)
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == 1, ended.outcome
        assert steps_in(log_of(made.directory, "n1", uid, 0, 1)) == list(range(1, 301))

    run(story)


def test_a_second_daemon_on_the_same_directory_is_refused_with_the_reason() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        second = await made.daemon_process("n1")
        async with asyncio.timeout(20):
            assert await second.wait() == 4
        assert "another daemon" in (made.directory / "n1.log").read_text()

    run(story)
