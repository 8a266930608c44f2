"""Segments in shared memory that a job leaves are removed when it ends; those of other jobs stay."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger_daemon.gang import shared_memory
from kit.waiting import eventually

pytestmark = pytest.mark.system

SHARED = Path("/dev/shm")
# The loader is killed by the job, so that nothing of Python removes its segment; the job attaches to one more.
JOB = """
import multiprocessing, signal, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
resource_tracker.register = resource_tracker.unregister = lambda *_: None
prefix, attached = sys.argv[1:3]
def load():
    segment = SharedMemory(prefix + "loader", create=True, size=4096)
    signal.pause()
loader = multiprocessing.get_context("fork").Process(target=load)
loader.start()
own = SharedMemory(prefix + "own", create=True, size=4096)
other = SharedMemory(attached) if attached else None
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[3]:
    # A pipe: reading waits for the test to open it.
    open(sys.argv[3]).read()
    loader.kill()
    loader.join()
while True:
    signal.pause()
"""


@pytest.fixture
def prefix() -> Iterator[str]:
    made = f"gt-{uuid.uuid4().hex[:8]}-"
    yield made
    for path in SHARED.glob(f"{made}*"):
        path.unlink()


def _command(prefix: str, attached: str = "", end_of_loader: str = "") -> list[str]:
    """`end_of_loader`: a pipe; once it was opened and closed, the job kills its loader."""
    return [sys.executable, "-c", JOB, prefix, attached, end_of_loader]


def _names(prefix: str) -> set[str]:
    return {path.name.removeprefix(prefix) for path in SHARED.glob(f"{prefix}*")}


def _with_children(pid: int) -> list[int]:
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


async def _until_noted(made: Cluster, gang: agent_pb2.DesiredGang, names: set[str]) -> None:
    """Until the daemon has recorded that these segments are the gang's."""
    local = made.directory / "n1" / "jobs" / gang.job_uid / str(gang.epoch) / "local.json"

    def are_noted() -> bool:
        try:
            return set(json.loads(local.read_text())["segments"]["own"]) == names
        except (OSError, ValueError):
            return False

    await asyncio.to_thread(eventually, are_noted, what=f"a record of {names}")


async def _cancel(made: Cluster, gang: agent_pb2.DesiredGang) -> None:
    stop = with_changes(gang, 9, intent=Intents.INTENT_STOP)
    stop.grace.FromMilliseconds(100)
    await made.master.want("n1", stop)
    await made.master.until("n1", gang.epoch, in_phase(Observed.PHASE_ENDED))


def test_a_cancelled_job_and_its_killed_loader_leave_no_segment_and_those_of_others_stay(
    prefix: str, tmp_path: Path
) -> None:
    (SHARED / f"{prefix}former").write_bytes(bytes(4096))

    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        kill = tmp_path / "kill"
        os.mkfifo(kill)
        one = made.gang(
            {"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=_command(f"{prefix}a-", f"{prefix}former", str(kill))
        )
        other = made.gang(
            {"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=2, command=_command(f"{prefix}b-"), job="jobs/2"
        )
        other.claim.device_mask = 2
        await made.master.want("n1", one)
        await made.master.want("n1", other)
        await _until_noted(made, one, {f"{prefix}a-own", f"{prefix}a-loader"})
        await _until_noted(made, other, {f"{prefix}b-own", f"{prefix}b-loader"})
        await asyncio.to_thread(kill.write_text, "")
        gang = await made.master.until("n1", 1, lambda message: bool(message.ranks))
        children = Path(f"/proc/{gang.ranks[0].pid}/task/{gang.ranks[0].pid}/children")
        await asyncio.to_thread(eventually, lambda: not children.read_text(), what="the end of the loader")
        await _cancel(made, one)
        assert _names(prefix) == {"former", "b-own", "b-loader"}
        await _cancel(made, other)
        assert _names(prefix) == {"former"}

    run(story)


def test_a_daemon_that_was_killed_meanwhile_knows_what_to_remove(prefix: str) -> None:
    async def story(made: Cluster) -> None:
        first = await made.daemon_process("n1")
        await made.until_session("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=_command(prefix))
        await made.master.want("n1", gang)
        await _until_noted(made, gang, {f"{prefix}own", f"{prefix}loader"})
        running = await made.master.until("n1", 1, lambda message: bool(message.ranks))
        first.kill()
        await first.wait()
        # no process is left that the next daemon could read
        for pid in _with_children(running.ranks[0].pid):
            os.kill(pid, signal.SIGKILL)
        made.master.book("n1").observed.clear()
        await made.daemon_process("n1")
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert _names(prefix) == set()

    run(story)


def test_a_segment_that_another_process_still_has_is_left_when_its_job_ends(prefix: str) -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), command=_command(prefix))
        await made.master.want("n1", gang)
        await _until_noted(made, gang, {f"{prefix}own", f"{prefix}loader"})
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import sys; f = open(sys.argv[1]); print(flush=True); sys.stdin.read()",
            str(SHARED / f"{prefix}own"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert reader.stdout is not None
        await reader.stdout.readline()
        try:
            await _cancel(made, gang)
            assert _names(prefix) == {"own"}
        finally:
            reader.kill()
            await reader.wait()

    run(story)


def test_what_a_process_maps_or_has_open_is_known_by_its_inode(prefix: str) -> None:
    segment = SharedMemory(f"{prefix}mapped", create=True, size=4096)
    path = SHARED / f"{prefix}open"
    with path.open("wb"):
        held = shared_memory.held_by(os.getpid())
        assert {shared_memory.id_of(path.stat()), shared_memory.id_of((SHARED / segment.name).stat())} <= held
    assert shared_memory.id_of(path.stat()) not in shared_memory.held_by(os.getpid())
    segment.close()
    segment.unlink()
