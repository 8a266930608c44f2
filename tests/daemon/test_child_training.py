"""A job whose training is a child of its command: PAUSE and OFFLOAD freeze all of it; other orders are refused."""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.v1 import job_pb2
from kit.waiting import eventually

pytestmark = [pytest.mark.system, pytest.mark.torch]

TRAIN = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100000):
    for (x,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2):
        model(x).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
        time.sleep(0.01)
"""


def _command(tmp_path: Path, kind: str) -> list[str]:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "run.sh").write_text(f"set -e\n{sys.executable} {tmp_path}/train.py\necho done\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return ["bash", str(tmp_path / "run.sh")] if kind == "bash" else [*torchrun, str(tmp_path / "train.py")]


def _offers_by_child(message: agent_pb2.ObservedGang) -> bool:
    said = message.capabilities.missing.get("CHECKPOINT", "")
    return "its command started" in said or "several of its processes train" in said


def _stopped(pid: int) -> list[bool]:
    """Return for `pid` and each process that descends from it whether it stands still."""
    state, children = Path(f"/proc/{pid}/stat"), Path(f"/proc/{pid}/task/{pid}/children")
    found = [state.read_text().rpartition(") ")[2][0] in "TZ"]
    for child in children.read_text().split():
        found += _stopped(int(child))
    return found


@pytest.mark.parametrize("kind", ["bash", "torchrun"])
def test_pause_and_offload_freeze_every_process_and_the_rest_is_refused_with_the_reason(
    tmp_path: Path, kind: str
) -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1", criu="none")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=_command(tmp_path, kind))
        await made.master.want("n1", gang)
        running = await made.master.until("n1", 1, _offers_by_child, patience=60)
        assert running.capabilities.can_pause
        assert running.capabilities.can_offload
        assert not running.capabilities.can_checkpoint
        assert not running.capabilities_presumed
        pid = running.ranks[0].pid
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, intent=Intents.INTENT_PARK, level=1))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        stopped = _stopped(pid)
        assert len(stopped) > (1 if kind == "bash" else 2)
        assert all(stopped)
        await made.master.want("n1", with_changes(gang, 3))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await asyncio.to_thread(eventually, lambda: not any(_stopped(pid)), what="all of it goes on")
        level = job_pb2.SUSPEND_LEVEL_OFFLOAD
        await made.master.want("n1", with_changes(gang, 4, stop_sequence=4, intent=Intents.INTENT_PARK, level=level))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        assert parked.level == level
        assert all(_stopped(pid))
        # An order from before this was known is refused, and no signal enforces it.
        await made.master.want("n1", with_changes(gang, 5, stop_sequence=5, intent=Intents.INTENT_HAND_OVER))
        troubled = await made.master.until("n1", 1, lambda message: "a move is not possible" in message.trouble)
        assert troubled.phase != Observed.PHASE_PARKED
        await made.master.want("n1", with_changes(gang, 6, intent=Intents.INTENT_STOP))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))

    run(story)
