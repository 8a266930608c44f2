"""A daemon dies in the middle of a move, of a checkpoint, of an end: the next one brings it to the same result."""

from __future__ import annotations

import asyncio
import signal
import uuid

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.v1 import job_pb2
from ganger_daemon.checkpoints.storage import Manifest, verify

pytestmark = pytest.mark.system


def steps_of(made: Cluster, node: str, uid: str, epoch: int) -> list[int]:
    return [int(line.split()[1]) for line in log_of(made.directory, node, uid, 0, epoch) if line.startswith("step ")]


async def replace_when_dead(made: Cluster, node: str) -> None:
    """The node's daemon dies by SIGKILL at its failpoint, and another one takes its place."""
    async with asyncio.timeout(30):
        assert await made.processes[node].wait() == -signal.SIGKILL
    await made.daemon_process(node)


@pytest.mark.parametrize(
    ("point", "victim"),
    [("between-fork-and-page", "n2"), ("after-prepare", "n2"), ("mid-stream", "n1"), ("before-move-commit", "n2")],
)
def test_a_move_in_which_a_daemon_dies_loses_no_step(point: str, victim: str) -> None:
    async def story(made: Cluster) -> None:
        for node in ("n1", "n2"):
            await made.daemon_process(node, failpoints=point if node == victim else "")
        await asyncio.gather(made.until_session("n1"), made.until_session("n2"))
        uid = str(uuid.uuid4())
        gang = made.gang({"n1": [0]}, "n1", uid=uid, pause=0.01, size=9 << 20)
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        restore = agent_pb2.Restore(parked=agent_pb2.ParkedState(epoch=1, members=[made.member("n1", [0])]))
        new = made.gang(
            {"n2": [0]}, "n2", uid=uid, epoch=2, pause=0.01, size=9 << 20,
            intent=Intents.INTENT_PREPARE, restore=restore,
        )  # fmt: skip
        replaced = asyncio.ensure_future(replace_when_dead(made, victim))
        await made.master.want("n2", new)
        prepared = await made.master.until("n2", 2, in_phase(Observed.PHASE_PREPARED))
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_HAND_OVER, stop_sequence=2))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        ready = await made.master.until("n2", 2, in_phase(Observed.PHASE_READY))
        assert ready.stop_step in (0, parked.stop_step)
        await replaced
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_RUN))
        await made.master.until("n2", 2, in_phase(Observed.PHASE_RUNNING))
        await made.master.want("n1", with_changes(gang, 3, intent=Intents.INTENT_STOP))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        before, after = steps_of(made, "n1", uid, 1), steps_of(made, "n2", uid, 2)
        assert before == list(range(1, parked.stop_step + 1))
        assert after == list(range(parked.stop_step + 1, parked.stop_step + 1 + len(after)))
        assert after
        # the next daemon finds the launcher with the ranks and their arenas, and their cores
        assert len(list((made.directory / "r-n2" / "launchers").glob("*.sock"))) == 1
        assert prepared.cores
        assert all(prepared.cores)

    run(story)


@pytest.mark.parametrize("point", ["mid-fsync", "before-rename", "after-rename"])
def test_a_checkpoint_whose_publisher_dies_is_published_by_the_next(point: str) -> None:
    async def story(made: Cluster) -> None:
        await made.daemon_process("n1", failpoints=point)
        await made.until_session("n1")
        uid = str(uuid.uuid4())
        gang = made.gang({"n1": [0]}, "n1", uid=uid)
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        replaced = asyncio.ensure_future(replace_when_dead(made, "n1"))
        level = job_pb2.SUSPEND_LEVEL_CHECKPOINT
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_PARK, level=level, stop_sequence=2))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        await replaced
        assert parked.checkpoint.step == parked.stop_step == steps_of(made, "n1", uid, 1)[-1]
        found = verify(made.storage / uid / parked.checkpoint.path)
        assert isinstance(found, Manifest), found
        assert not list((made.storage / uid / "checkpoints").glob("*.tmp"))

    run(story)


def test_an_end_that_was_not_noted_is_noted_by_the_next_daemon() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon_process("n1", failpoints="before-reap")
        await made.until_session("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()))
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        replaced = asyncio.ensure_future(replace_when_dead(made, "n1"))
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_STOP))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        await replaced
        assert ended.outcome.kind in (5, 3), ended.outcome
        await made.master.forget("n1", 1)
        await made.master.until_absent("n1", 1)

    run(story)
