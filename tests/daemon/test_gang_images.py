"""Process images of gangs with several ranks on one node: one image of all, to storage and back, and in a move."""

from __future__ import annotations

import os
import signal
import sys
import uuid

import pytest
from daemon.kit import PATIENCE, Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from daemon.test_process_images import CHECKPOINT, OPAQUE, WITH_AGENT, one_after_the_other, pytestmark, until
from ganger.agent.v1 import agent_pb2
from ganger.injob.process_identity import stat_fields
from ganger.protocol.gang_orders import Mechanism
from ganger.v1 import job_pb2

__all__ = ["pytestmark"]

RANKS = [0, 1]
# Every step is a collective operation, and the store of the rendezvous is asked too.
COLLECTIVE = WITH_AGENT.replace(
    "import time\n",
    """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
total = torch.zeros(1)
""",
    1,
).replace(
    "    print(",
    """
    total.fill_(count)
    dist.all_reduce(total)
    assert total.item() == count * dist.get_world_size()
    store.set(f"count-{dist.get_rank()}", str(count))
    print(""",
    1,
)
PROGRAMS = {"opaque": OPAQUE, "agent": WITH_AGENT, "collective": COLLECTIVE}
programs = pytest.mark.parametrize("kind", ["opaque", "agent", pytest.param("collective", marks=pytest.mark.torch)])


def counts(made: Cluster, node: str, uid: str, rank: int, epoch: int) -> list[int]:
    lines = log_of(made.directory, node, uid, rank, epoch)
    return [int(line.split()[1]) for line in lines if line.startswith("count ")]


async def all_count(made: Cluster, node: str, uid: str, epoch: int) -> None:
    await until(lambda: all(len(counts(made, node, uid, rank, epoch)) > 2 for rank in RANKS))


async def begun(made: Cluster, kind: str, uid: str) -> agent_pb2.DesiredGang:
    command = [sys.executable, "-u", "-c", PROGRAMS[kind]]
    gang = made.gang({"n1": RANKS}, "n1", uid=uid, command=command)
    if kind == "opaque":
        gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
    await made.master.want("n1", gang)
    running = await made.master.until(
        "n1",
        1,
        lambda seen: seen.capabilities.can_checkpoint and seen.phase == Observed.PHASE_RUNNING,
        patience=PATIENCE,
    )
    assert running.capabilities.mechanism == Mechanism.IMAGE
    await all_count(made, "n1", uid, 1)
    return gang


@programs
def test_a_gang_is_saved_as_it_is_and_goes_on_from_its_image_on_another_node(kind: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, kind, uid)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED), patience=PATIENCE)
        assert parked.level == job_pb2.SUSPEND_LEVEL_CHECKPOINT, str(parked)
        assert not parked.ranks
        parts = [{rank: counts(made, "n1", uid, rank, 1) for rank in RANKS}]
        assert parked.checkpoint.path, parked
        await made.master.forget("n1", 1)
        for epoch, node in ((2, "n2"), (3, "n1")):
            restore = agent_pb2.Restore(checkpoint_path=parked.checkpoint.path, step=parked.checkpoint.step)
            gang = made.gang(
                {node: RANKS}, node, uid=uid, epoch=epoch, command=list(gang.spec.command), restore=restore
            )
            await made.master.want(node, gang)
            running = await made.master.until(node, epoch, in_phase(Observed.PHASE_RUNNING), patience=PATIENCE)
            assert len({int(stat_fields(rank.pid)[1]) for rank in running.ranks}) == 1, "they have one parent"
            await all_count(made, node, uid, epoch)
            await made.master.until(node, epoch, lambda seen: seen.capabilities.can_checkpoint)
            await made.master.want(node, with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
            parked = await made.master.until(node, epoch, in_phase(Observed.PHASE_PARKED), patience=PATIENCE)
            parts.append({rank: counts(made, node, uid, rank, epoch) for rank in RANKS})
            await made.master.forget(node, epoch)
        for rank in RANKS:
            assert one_after_the_other(*(part[rank] for part in parts))
        assert uid not in " ".join(os.listdir("/run/ganger-unit"))

    run(story)


@programs
def test_a_gang_is_moved_as_it_is_and_back(kind: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        parts = []
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, kind, uid)
        for epoch, source, target in ((2, "n1", "n2"), (3, "n2", "n1")):
            new = prepared(made, uid, gang, source, target, epoch)
            await made.master.want(target, new)
            await made.master.until(target, epoch, in_phase(Observed.PHASE_PREPARED))
            await made.master.want(source, with_changes(gang, 8, intent=Intents.INTENT_HAND_OVER, stop_sequence=8))
            parked = await made.master.until(source, gang.epoch, in_phase(Observed.PHASE_PARKED), patience=PATIENCE)
            ready = await made.master.until(target, epoch, in_phase(Observed.PHASE_READY), patience=PATIENCE)
            assert ready.stop_step == parked.stop_step
            parts.append({rank: counts(made, source, uid, rank, epoch - 1) for rank in RANKS})
            gang = with_changes(new, 2, intent=Intents.INTENT_RUN)
            await made.master.want(target, gang)
            await all_count(made, target, uid, epoch)
            await made.master.until(target, epoch, in_phase(Observed.PHASE_RUNNING))
            for rank in RANKS:
                assert counts(made, source, uid, rank, epoch - 1) == parts[-1][rank], "nothing ran at the source"
            old = with_changes(prepared(made, uid, gang, target, source, epoch - 1), 9, intent=Intents.INTENT_STOP)
            await made.master.want(source, old)
            await made.master.until(source, epoch - 1, in_phase(Observed.PHASE_ENDED))
            await made.master.forget(source, epoch - 1)
        parts.append({rank: counts(made, "n1", uid, rank, 3) for rank in RANKS})
        for rank in RANKS:
            assert one_after_the_other(*(part[rank] for part in parts))

    run(story)


def prepared(
    made: Cluster, uid: str, gang: agent_pb2.DesiredGang, source: str, target: str, epoch: int
) -> agent_pb2.DesiredGang:
    parked = agent_pb2.ParkedState(epoch=gang.epoch, members=[made.member(source, RANKS)], is_process_image=True)
    return made.gang(
        {target: RANKS},
        target,
        uid=uid,
        epoch=epoch,
        command=list(gang.spec.command),
        restore=agent_pb2.Restore(parked=parked),
        intent=Intents.INTENT_PREPARE,
    )


def test_a_restored_gang_of_which_one_rank_fails_has_that_ranks_code() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        gang = await begun(made, "agent", uid)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED), patience=PATIENCE)
        await made.master.forget("n1", 1)
        restore = agent_pb2.Restore(checkpoint_path=parked.checkpoint.path, step=parked.checkpoint.step)
        gang = made.gang({"n1": RANKS}, "n1", uid=uid, epoch=2, command=list(gang.spec.command), restore=restore)
        await made.master.want("n1", gang)
        running = await made.master.until("n1", 2, in_phase(Observed.PHASE_RUNNING), patience=PATIENCE)
        pids = {rank.rank: rank.pid for rank in running.ranks}
        os.kill(pids[1], signal.SIGKILL)
        ended = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED), patience=PATIENCE)
        assert (ended.outcome.rank, ended.outcome.exit_code) == (1, -signal.SIGKILL)

    run(story)
