"""Process images of gangs with several ranks on one node: one image of all, to storage and back, and in a move."""

from __future__ import annotations

import os
import signal
import uuid

import pytest
from daemon.image_kit import (
    OPAQUE,
    WITH_AGENT,
    begun,
    counts,
    ended,
    from_image,
    moved_in,
    needs_images,
    one_after_the_other,
    saved,
    until,
)
from daemon.kit import Cluster, Intents, Observed, in_phase, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.injob.process_identity import stat_fields

pytestmark = [pytest.mark.system, needs_images]

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


async def gang_begun(made: Cluster, kind: str, uid: str) -> agent_pb2.DesiredGang:
    return await begun(made, kind, uid, PROGRAMS[kind], ranks=RANKS)


async def all_count(made: Cluster, node: str, uid: str, epoch: int) -> None:
    await until(lambda: all(len(found) > 2 for found in counts_of_all(made, node, uid, epoch)))


def counts_of_all(made: Cluster, node: str, uid: str, epoch: int) -> list[list[int]]:
    return [counts(made, node, uid, epoch, rank) for rank in RANKS]


@programs
def test_a_gang_is_saved_as_it_is_and_goes_on_from_its_image_on_another_node(kind: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await gang_begun(made, kind, uid)
        parked = await saved(made, "n1", gang)
        assert parked.checkpoint.path, parked
        parts = [counts_of_all(made, "n1", uid, 1)]
        await made.master.forget("n1", 1)
        for epoch, node in ((2, "n2"), (3, "n1")):
            gang = from_image(made, gang, parked, node, epoch)
            await made.master.want(node, gang)
            running = await made.master.until(node, epoch, in_phase(Observed.PHASE_RUNNING))
            assert len({int(stat_fields(rank.pid)[1]) for rank in running.ranks}) == 1, "they have one parent"
            await all_count(made, node, uid, epoch)
            await made.master.until(node, epoch, lambda seen: seen.capabilities.can_checkpoint)
            parked = await saved(made, node, gang)
            parts.append(counts_of_all(made, node, uid, epoch))
            await made.master.forget(node, epoch)
        for rank in RANKS:
            assert one_after_the_other(*(part[rank] for part in parts))
        assert uid not in " ".join(os.listdir("/run/ganger-unit"))

    run(story)


@programs
def test_a_gang_is_moved_as_it_is_and_back(kind: str) -> None:
    async def story(made: Cluster) -> None:
        uid, parts = str(uuid.uuid4()), []
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await gang_begun(made, kind, uid)
        for epoch, source, target in ((2, "n1", "n2"), (3, "n2", "n1")):
            new = await moved_in(made, gang, target, sequence=8)
            parked = await made.master.until(source, gang.epoch, in_phase(Observed.PHASE_PARKED))
            assert made.master.book(target).observed[epoch].stop_step == parked.stop_step
            parts.append(counts_of_all(made, source, uid, epoch - 1))
            old, gang = gang, with_changes(new, 2, intent=Intents.INTENT_RUN)
            await made.master.want(target, gang)
            await all_count(made, target, uid, epoch)
            await made.master.until(target, epoch, in_phase(Observed.PHASE_RUNNING))
            assert counts_of_all(made, source, uid, epoch - 1) == parts[-1], "nothing ran at the source"
            await ended(made, source, old)
        parts.append(counts_of_all(made, "n1", uid, 3))
        for rank in RANKS:
            assert one_after_the_other(*(part[rank] for part in parts))

    run(story)


def test_a_restored_gang_of_which_one_rank_fails_has_that_ranks_code() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        gang = await gang_begun(made, "agent", uid)
        parked = await saved(made, "n1", gang)
        await made.master.forget("n1", 1)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
        running = await made.master.until("n1", 2, in_phase(Observed.PHASE_RUNNING))
        pids = {rank.rank: rank.pid for rank in running.ranks}
        os.kill(pids[1], signal.SIGKILL)
        failed = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert (failed.outcome.rank, failed.outcome.exit_code) == (1, -signal.SIGKILL)

    run(story)
