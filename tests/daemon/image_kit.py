"""Jobs that count, saved and moved by the images of their processes, and what must not be left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.injob.launcher.namespaces import LINKS
from ganger.protocol.gang_orders import Mechanism
from ganger.v1 import job_pb2
from ganger_daemon.images.criu import CriuImages, choose_images
from ganger_daemon.node.process_identity import parent_of
from kit.waiting import eventually

needs_images = pytest.mark.skipif(bool(choose_images().unavailable), reason=f"no images: {choose_images().unavailable}")

PAUSE = {"intent": Intents.INTENT_PARK, "level": job_pb2.SUSPEND_LEVEL_PAUSE}
OFFLOAD = {"intent": Intents.INTENT_PARK, "level": job_pb2.SUSPEND_LEVEL_OFFLOAD}
CHECKPOINT = {"intent": Intents.INTENT_PARK, "level": job_pb2.SUSPEND_LEVEL_CHECKPOINT}

_COUNTING = """
count = 0
while True:
    {use}
    count += 1
    print("count", count, flush=True)
    time.sleep(0.02)
    {boundary}
"""
_ATTACHING = """
from ganger.injob.control import Control, Handlers
from ganger.injob.page_layout import Capability
control = Control.from_environment()
control.handlers = Handlers(by_image=control.by_image)
control.hello(Capability.PAUSE | Capability.CHECKPOINT | Capability.IMAGE)
control.start()
"""


def opaque(begin: str = "", use: str = "pass") -> str:
    """Return a program without an agent, whose count is in its memory alone. `use`: what it does in each step."""
    return f"import time\n{begin}{_COUNTING.format(use=use, boundary='pass')}"


def with_agent(begin: str = "", use: str = "pass") -> str:
    """Return a program that has boundaries, as an unmodified script has them for its agent."""
    return f"import time\n{begin}{_ATTACHING}{_COUNTING.format(use=use, boundary='control.boundary()')}"


OPAQUE, WITH_AGENT = opaque(), with_agent()
# As a child that trains: its steps are in the page, but it obeys no order there.
WITH_STEPS = opaque(
    """
import os
from ganger.injob.page import Page
from ganger.injob.page_layout import Opaque, Word
page = Page.open(os.environ["GANGER_PAGE"])
page.set(Word.OPAQUE, Opaque.TRAINS_IN_CHILD)
""",
    "page.set(Word.STEP, count + 1)",
)
PROGRAMS = {"opaque": OPAQUE, "steps": WITH_STEPS, "agent": WITH_AGENT}
_WITHOUT_AGENT = ("opaque", "steps")
programs = pytest.mark.parametrize("kind", list(PROGRAMS))


def kinds_at_points(points: Sequence[Any]) -> list[Any]:
    """Return parameters (kind, point): `make test` dies at each point with one kind in turn, `make chaos` with both."""
    kinds = ("agent", "opaque")
    return [
        pytest.param(kind, point, marks=() if number % 2 == at else pytest.mark.chaos)
        for at, kind in enumerate(kinds)
        for number, point in enumerate(points)
    ]


async def begun(
    made: Cluster,
    kind: str,
    uid: str,
    program: str = "",
    *,
    ranks: Sequence[int] = (0,),
    environment: Mapping[str, str] | None = None,
    **spec: Any,
) -> agent_pb2.DesiredGang:
    """Start a program on n1, and wait until every rank counts and images can be taken of it. Return its gang.

    `kind`: one of PROGRAMS, or any other name for a program with an agent; `program`: it, if not that of the kind;
    `spec`: further fields of the job's spec."""
    command = [made.python, "-u", "-c", program or PROGRAMS[kind]]
    gang = made.gang({"n1": list(ranks)}, "n1", uid=uid, command=command)
    gang.spec.environment.update(environment or {})
    for name, value in spec.items():
        setattr(gang.spec, name, value)
    if kind in _WITHOUT_AGENT:
        gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
    await made.master.want("n1", gang)
    await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
    running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
    assert running.capabilities.mechanism == Mechanism.IMAGE
    assert not running.capabilities.missing.get("MOVE")
    await until(lambda: all(counts(made, "n1", uid, 1, rank) for rank in ranks))
    return gang


async def until(holds: Callable[[], object], what: str = "more counts") -> None:
    await asyncio.to_thread(eventually, holds, what=what)


def counts(made: Cluster, node: str, uid: str, epoch: int = 1, rank: int = 0) -> list[int]:
    lines = log_of(made.directory, node, uid, rank, epoch)
    return [int(line.split()[1]) for line in lines if line.startswith("count ")]


async def goes_on(made: Cluster, node: str, uid: str, epoch: int = 1, rank: int = 0) -> None:
    stood = len(counts(made, node, uid, epoch, rank))
    await until(lambda: len(counts(made, node, uid, epoch, rank)) > stood + 2)


def one_after_the_other(*parts: list[int]) -> bool:
    found = [count for part in parts for count in part]
    return found == list(range(1, len(found) + 1))


def prepared(made: Cluster, gang: agent_pb2.DesiredGang, target: str, epoch: int) -> agent_pb2.DesiredGang:
    """The gang of a later epoch on another node, for which the image of the present one comes."""
    (member,) = gang.members
    ranks = list(member.ranks)
    source = made.member(member.node.removeprefix("nodes/"), ranks)
    parked = agent_pb2.ParkedState(epoch=gang.epoch, members=[source], is_process_image=True)
    return made.gang(
        {target: ranks}, target, uid=gang.job_uid, epoch=epoch, command=list(gang.spec.command),
        restore=agent_pb2.Restore(parked=parked), intent=Intents.INTENT_PREPARE,
    )  # fmt: skip


async def moved_in(
    made: Cluster, gang: agent_pb2.DesiredGang, target: str = "n2", sequence: int = 2
) -> agent_pb2.DesiredGang:
    """Bring the image of a job that runs to another node, where it stands still. Return its gang there.

    `sequence`: of the order to hand over."""
    new = await expected(made, gang, target)
    await handed_over(made, gang, sequence)
    await made.master.until(target, new.epoch, in_phase(Observed.PHASE_READY))
    return new


async def expected(made: Cluster, gang: agent_pb2.DesiredGang, target: str = "n2") -> agent_pb2.DesiredGang:
    """Let another node prepare for the image of a job. Return its gang there."""
    new = prepared(made, gang, target, gang.epoch + 1)
    await made.master.want(target, new)
    await made.master.until(target, new.epoch, in_phase(Observed.PHASE_PREPARED))
    return new


async def handed_over(made: Cluster, gang: agent_pb2.DesiredGang, sequence: int = 2) -> None:
    """Order the job's node to send its image to the node that has prepared for it."""
    order = with_changes(gang, sequence, intent=Intents.INTENT_HAND_OVER, stop_sequence=sequence)
    await made.master.want(gang.members[0].node.removeprefix("nodes/"), order)


def from_image(
    made: Cluster, gang: agent_pb2.DesiredGang, parked: agent_pb2.ObservedGang, node: str, epoch: int
) -> agent_pb2.DesiredGang:
    """The gang of a later epoch that goes on from the image on storage with which it was parked."""
    restore = agent_pb2.Restore(checkpoint_path=parked.checkpoint.path, step=parked.checkpoint.step)
    ranks = list(gang.members[0].ranks)
    return made.gang(
        {node: ranks}, node, uid=gang.job_uid, epoch=epoch, command=list(gang.spec.command), restore=restore
    )


async def saved(
    made: Cluster, node: str, gang: agent_pb2.DesiredGang, sequence: int = 2, stop_sequence: int = 0
) -> agent_pb2.ObservedGang:
    """Suspend the gang on its image. Return its last report."""
    order = with_changes(gang, sequence, stop_sequence=stop_sequence or sequence, **CHECKPOINT)
    await made.master.want(node, order)
    parked = await made.master.until(node, gang.epoch, _is_parked_on_storage, patience=60)
    assert not parked.ranks
    return parked


def _is_parked_on_storage(seen: agent_pb2.ObservedGang) -> bool:
    return seen.phase == Observed.PHASE_PARKED and seen.level == job_pb2.SUSPEND_LEVEL_CHECKPOINT


async def ended(made: Cluster, node: str, gang: agent_pb2.DesiredGang) -> None:
    """Stop the gang, and let its daemon forget it."""
    await made.master.want(node, with_changes(gang, 99, intent=Intents.INTENT_STOP))
    await made.master.until(node, gang.epoch, in_phase(Observed.PHASE_ENDED))
    await made.master.forget(node, gang.epoch)
    await made.master.until_absent(node, gang.epoch)


async def replaced(made: Cluster, node: str, program: str = "ganger.cli.main", cgroups: str = "none") -> None:
    """Wait until the node's daemon has died by SIGKILL at its failpoint, and start another one."""
    async with asyncio.timeout(60):
        assert await made.processes[node].wait() == -signal.SIGKILL
    await made.daemon_process(node, "", program, cgroups)


def leftovers(uid: str) -> dict[str, list[str]]:
    """Return what there still is of a job, by kind: processes, whose PID namespaces end with them; names and mounts;
    cgroups; and files in shared memory, where its program has put the job's uid into their names."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    names = [*(os.listdir(LINKS) if os.path.isdir(LINKS) else ()), *mounts]
    cgroups = (name for _, directories, _ in os.walk("/sys/fs/cgroup") for name in directories)
    found = {
        "processes": [f"{pid} {_command(pid)}" for pid in processes_of(uid)],
        "names": [name for name in names if uid in name],
        "cgroups": [name for name in cgroups if uid in name],
        "shared memory": [name for name in os.listdir("/dev/shm") if uid in name],
    }
    return {kind: things for kind, things in found.items() if things}


def processes_of(uid: str) -> list[int]:
    """Return the processes that were started for a job, and the inits of its units."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environment, unit = Path(f"/proc/{name}/environ").read_bytes(), Path(f"/proc/{name}/root{LINKS}")
            is_in_unit = not Path(f"/proc/{name}/ns/pid").samefile("/proc/self/ns/pid")
            if uid.encode() in environment or (is_in_unit and uid in " ".join(os.listdir(unit))):
                found.append(int(name))
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    return ""


async def until_nothing_is_left(uid: str) -> None:
    """Wait until no process, namespace, name, mount, cgroup or file in shared memory of a job is left."""
    story = lambda: str(leftovers(uid))  # noqa: E731
    await asyncio.to_thread(eventually, lambda: not leftovers(uid), what="nothing is left of the job", story=story)


def holding_shared_memory(uid: str) -> str:
    """Return the begin of a program that holds a file in shared memory, named as PyTorch names its own."""
    return f"held = open('/dev/shm/torch_{uid}', 'wb'); held.write(b'held'); held.flush()\n"


async def saves_while_its_daemon_dies(made: Cluster, kind: str, point: str) -> None:
    """Suspend a program on its image, while its daemon dies at a failpoint, and let it go on from there. Nothing is
    lost, and nothing left."""
    uid = str(uuid.uuid4())
    await made.daemon_process("n1", point, cgroups="auto")
    await made.until_session("n1")
    gang = await begun(made, kind, uid, holding_shared_memory(uid) + PROGRAMS[kind])
    dies = asyncio.ensure_future(replaced(made, "n1", cgroups="auto"))
    parked = await saved(made, "n1", gang)
    await dies
    before = counts(made, "n1", uid)
    await ended(made, "n1", gang)
    await until_nothing_is_left(uid)
    gang = from_image(made, gang, parked, "n1", 2)
    await made.master.want("n1", gang)
    await goes_on(made, "n1", uid, 2)
    assert one_after_the_other(before, counts(made, "n1", uid, 2))
    await ended(made, "n1", gang)
    await until_nothing_is_left(uid)


async def moves_while_a_daemon_dies(made: Cluster, kind: str, point: str, victim: str) -> None:
    """Move a program by its image, while the daemon of a node dies at a failpoint. It never runs twice, and nothing is
    left."""
    may_be_lost = (kind, point) == ("opaque", "image-packed")
    uid = str(uuid.uuid4())
    for node in ("n1", "n2"):
        await made.daemon_process(node, point if node == victim else "", cgroups="auto")
    await asyncio.gather(made.until_session("n1"), made.until_session("n2"))
    gang = await begun(made, kind, uid, holding_shared_memory(uid) + PROGRAMS[kind])
    dies = asyncio.ensure_future(replaced(made, victim, cgroups="auto"))
    new = await expected(made, gang)
    await handed_over(made, gang)
    await dies
    await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED), patience=60)
    arrived = await made.master.until(
        "n2", 2, lambda seen: bool(seen.trouble) or seen.phase == Observed.PHASE_READY, patience=60
    )
    if arrived.trouble:
        # it went on without the daemon, so what had been sent of it is of another moment
        assert may_be_lost, arrived.trouble
        await ended(made, "n2", new)
        await made.master.want("n1", with_changes(gang, 3))
        await goes_on(made, "n1", uid)
        assert one_after_the_other(counts(made, "n1", uid, 1))
        assert counts(made, "n2", uid, 2) == []
    else:
        before = counts(made, "n1", uid, 1)
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_RUN))
        await goes_on(made, "n2", uid, 2)
        assert counts(made, "n1", uid, 1) == before
        assert one_after_the_other(before, counts(made, "n2", uid, 2))
        await ended(made, "n2", new)
    await ended(made, "n1", gang)
    await until_nothing_is_left(uid)


def waiting_criu(place: Path, when: str) -> Path:
    """Make a CRIU that waits before one of its actions, `when`: that is "dump" or "restore". It makes the file `at` in
    this directory, and goes on once there is the file `go`. Every account may use it."""
    found = choose_images()
    assert isinstance(found, CriuImages)
    place.mkdir(exist_ok=True)
    place.chmod(0o1777)
    waits = f"touch {place}/at; while [ ! -e {place}/go ]; do sleep 0.02; done"
    criu = place / "criu"
    criu.write_text(f'#!/bin/sh\n[ "$1" = {when} ] && {{ {waits}; }}\nexec {found.program} "$@"\n')
    criu.chmod(0o755)
    return criu


async def restores_while_its_launcher_dies(made: Cluster, place: Path, launcher_of: Callable[[Cluster], int]) -> None:
    """Let the launcher die that restores a program, before it has recorded that. Nothing is left, and another restore
    goes on. `launcher_of`: returns its pid while it restores."""
    uid = str(uuid.uuid4())
    await made.daemon("n1", criu=str(waiting_criu(place, "restore")))
    gang = await begun(made, "opaque", uid)
    parked = await saved(made, "n1", gang)
    before = counts(made, "n1", uid, 1)
    await made.master.forget("n1", 1)
    await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
    await until((place / "at").exists)
    launcher = launcher_of(made)
    os.kill(launcher, signal.SIGSTOP)
    (place / "go").touch()
    # it is there, as the child of a launcher that does not know of it yet
    await until(lambda: processes_of(uid) != [])
    os.kill(launcher, signal.SIGKILL)
    refused = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
    assert refused.outcome.kind == agent_pb2.Outcome.KIND_LAUNCH_FAILED
    assert processes_of(uid) == []
    await made.master.forget("n1", 2)
    await made.master.until_absent("n1", 2)
    await until_nothing_is_left(uid)
    last = from_image(made, gang, parked, "n1", 3)
    await made.master.want("n1", last)
    await goes_on(made, "n1", uid, 3)
    assert one_after_the_other(before, counts(made, "n1", uid, 3))
    await ended(made, "n1", last)
    await until_nothing_is_left(uid)


async def saves_while_its_launcher_dies(made: Cluster, place: Path) -> None:
    """Suspend a program on its image, while its launcher dies before the dump. Nothing is lost, and nothing left."""
    uid = str(uuid.uuid4())
    await made.daemon("n1", criu=str(waiting_criu(place, "dump")))
    gang = await begun(made, "opaque", uid)
    await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
    await until((place / "at").exists)
    os.kill(parent_of(made.master.book("n1").observed[1].ranks[0].pid), signal.SIGKILL)
    (place / "go").touch()
    parked = await saved(made, "n1", gang)
    before = counts(made, "n1", uid, 1)
    await ended(made, "n1", gang)
    await until_nothing_is_left(uid)
    gang = from_image(made, gang, parked, "n1", 2)
    await made.master.want("n1", gang)
    await goes_on(made, "n1", uid, 2)
    assert one_after_the_other(before, counts(made, "n1", uid, 2))
    await ended(made, "n1", gang)
    await until_nothing_is_left(uid)
