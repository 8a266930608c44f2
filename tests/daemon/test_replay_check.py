"""A suspend by replay: the script is run to its place in a second process before the first one is given up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.protocol.gang_orders import Mechanism
from ganger.v1 import job_pb2
from kit.waiting import eventually

pytestmark = pytest.mark.system

PATIENCE = 120.0
CHECKPOINT = {"intent": Intents.INTENT_PARK, "level": job_pb2.SUSPEND_LEVEL_CHECKPOINT}
# What the hooks do not see: that it waits at its start, and which data it has.
SCRIPT = """
import os, time, torch
from torch.utils.data import DataLoader, TensorDataset
while os.path.exists("held"):
    time.sleep(0.01)
torch.manual_seed(1)
rank = os.environ.get("RANK", "0")
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
size = 4 if os.path.exists("shorter-" + rank) else 4000
loader = DataLoader(TensorDataset(torch.randn(size, 64)), batch_size=4)
step = 0
for epoch in range(100):
    for (batch,) in loader:
        loss = model(batch).square().sum()
        optimizer.zero_grad()
        loss.backward()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(model.weight.grad)
        optimizer.step()
        step = step + 1
        print("loss", step, loss.item().hex(), flush=True)
        if os.path.exists("slow"):
            time.sleep(0.02)
"""


async def begun(made: Cluster, uid: str, nodes: tuple[str, ...] = ("n1",)) -> dict[str, agent_pb2.DesiredGang]:
    """Start the script with one rank on each node, and wait until it offers a checkpoint by replay."""
    (made.directory / "train.py").write_text(SCRIPT)
    (made.directory / "slow").touch()
    placement = {node: [rank] for rank, node in enumerate(nodes)}
    gangs = {}
    for node in nodes:
        gang = made.gang(placement, node, uid=uid, command=[sys.executable, "train.py"])
        gang.spec.mechanism = job_pb2.MECHANISM_REPLAY
        gangs[node] = gang
        await made.master.want(node, gang)
    for node in nodes:
        seen = await made.master.until(node, 1, lambda seen: seen.capabilities.can_checkpoint, PATIENCE)
        assert seen.capabilities.mechanism == Mechanism.REPLAY
    return gangs


def losses(made: Cluster, node: str, uid: str, epoch: int, rank: int = 0) -> list[str]:
    return [line for line in log_of(made.directory, node, uid, rank, epoch) if line.startswith("loss ")]


def losses_alone(made: Cluster, count: int) -> list[str]:
    """Run the script without Ganger and return its first losses."""
    (made.directory / "slow").unlink()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py"]
    with subprocess.Popen(command, cwd=made.directory, env=environment, stdout=subprocess.PIPE, text=True) as alone:
        assert alone.stdout is not None
        found = [next(alone.stdout).strip() for _ in range(count)]
        alone.kill()
    return found


def second_runs(made: Cluster) -> list[int]:
    """Return the processes that map the page of a second run."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            mapped = Path(f"/proc/{entry}/maps").read_text(errors="replace")
        except OSError:
            continue
        if any("/replay-check/" in line and str(made.directory) in line for line in mapped.splitlines()):
            found.append(int(entry))
    return found


async def until(holds: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(eventually, holds, what=what, within_seconds=PATIENCE)


async def ordered(made: Cluster, gangs: dict[str, agent_pb2.DesiredGang], sequence: int, **changes: Any) -> None:
    for node, gang in gangs.items():
        await made.master.want(node, with_changes(gang, sequence, **changes))


def test_a_job_is_given_up_only_after_a_second_run_has_come_to_its_place_and_goes_on_if_that_goes_astray() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1", preload=True)
        gangs = await begun(made, uid)
        (made.directory / "shorter-0").touch()
        await ordered(made, gangs, 2, stop_sequence=2, **CHECKPOINT)
        refused = await made.master.until("n1", 1, lambda seen: "did not come back" in seen.trouble, PATIENCE)
        stood = len(losses(made, "n1", uid, 1))
        assert f"STATE_UNSAVEABLE: run again, the script did not come back to step {stood}" in refused.trouble
        assert second_runs(made) == []
        await ordered(made, gangs, 3)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING), PATIENCE)
        await until(lambda: len(losses(made, "n1", uid, 1)) > stood + 3, "more steps")
        assert not list(made.storage.glob("*/checkpoints/step-*"))
        (made.directory / "shorter-0").unlink()

        (made.directory / "held").touch()
        await ordered(made, gangs, 4, stop_sequence=4, **CHECKPOINT)
        await until(lambda: second_runs(made), "a second run")
        stopping = made.master.book("n1").observed[1]
        assert stopping.phase == Observed.PHASE_STOPPING
        os.kill(stopping.ranks[0].pid, 0)
        assert not list(made.storage.glob("*/checkpoints/step-*"))
        (made.directory / "held").unlink()
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED), PATIENCE)
        assert parked.level == job_pb2.SUSPEND_LEVEL_CHECKPOINT
        assert second_runs(made) == []
        before = losses(made, "n1", uid, 1)
        assert len(before) == parked.checkpoint.step
        await made.master.forget("n1", 1)
        restore = agent_pb2.Restore(checkpoint_path=parked.checkpoint.path, step=parked.checkpoint.step)
        again = made.gang({"n1": [0]}, "n1", uid=uid, epoch=2, command=[sys.executable, "train.py"], restore=restore)
        again.spec.mechanism = job_pb2.MECHANISM_REPLAY
        await made.master.want("n1", again)
        await until(lambda: len(losses(made, "n1", uid, 2)) > 3, "more steps")
        found = before + losses(made, "n1", uid, 2)
        assert found == losses_alone(made, len(found))

    run(story)


def test_a_gang_on_two_nodes_goes_on_if_one_of_its_ranks_does_not_come_back() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        for node in ("n1", "n2"):
            await made.daemon(node, preload=True)
        gangs = await begun(made, uid, ("n1", "n2"))
        (made.directory / "shorter-1").touch()
        await ordered(made, gangs, 2, stop_sequence=2, **CHECKPOINT)
        refused = await made.master.until("n2", 1, lambda seen: "did not come back" in seen.trouble, PATIENCE)
        assert "rank 1" in refused.trouble
        (made.directory / "shorter-1").unlink()
        await ordered(made, gangs, 3)
        stood = len(losses(made, "n1", uid, 1))
        await until(lambda: len(losses(made, "n1", uid, 1)) > stood, "more steps")
        await ordered(made, gangs, 4, stop_sequence=4, **CHECKPOINT)
        for node in ("n1", "n2"):
            parked = await made.master.until(node, 1, in_phase(Observed.PHASE_PARKED), PATIENCE)
            assert parked.level == job_pb2.SUSPEND_LEVEL_CHECKPOINT
        assert second_runs(made) == []

    run(story)


def test_a_daemon_that_takes_over_ends_the_second_run_of_the_former_one_and_begins_its_own() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        process = await made.daemon_process("n1")
        await made.until_session("n1")
        gangs = await begun(made, uid)
        (made.directory / "held").touch()
        await ordered(made, gangs, 2, stop_sequence=2, **CHECKPOINT)
        await until(lambda: second_runs(made), "a second run")
        (former,) = second_runs(made)
        process.kill()
        await process.wait()
        await made.daemon_process("n1")
        await until(lambda: former not in second_runs(made) and second_runs(made), "another second run")
        (made.directory / "held").unlink()
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED), PATIENCE)
        assert parked.level == job_pb2.SUSPEND_LEVEL_CHECKPOINT
        assert second_runs(made) == []

    run(story)
