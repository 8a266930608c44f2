"""Process images taken and restored by daemons: to storage and back, and from one node to another."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from daemon.image_kit import (
    CHECKPOINT,
    PAUSE,
    counts,
    ended,
    from_image,
    goes_on,
    holding_shared_memory,
    needs_images,
    one_after_the_other,
    opaque,
    prepared,
    processes_of,
    replaced,
    saved,
    until,
    until_nothing_is_left,
    with_agent,
)
from daemon.kit import PATIENCE, Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.failpoints import OF_DEVICES, OF_IMAGES
from ganger.injob.launcher.client import Launcher
from ganger.protocol.gang_orders import Mechanism
from ganger.v1 import job_pb2
from ganger_daemon.gang import process_image
from ganger_daemon.images.criu import CriuImages, choose_images
from ganger_daemon.images.packing import pack
from ganger_daemon.node.process_identity import parent_of

pytestmark = [pytest.mark.system, needs_images]

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
# Goes on after SIGTERM.
ON_TERM = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('handler', flush=True))\n"
SAVE_POINTS = ("image-dumped", "image-packed", "after-rename")
MOVE_POINTS = (("image-dumped", "n1"), ("image-packed", "n1"), ("image-unpacked", "n2"), ("image-restored", "n2"))
programs = pytest.mark.parametrize("kind", list(PROGRAMS))


async def begun(made: Cluster, kind: str, uid: str, program: str = "", **changes: Any) -> agent_pb2.DesiredGang:
    """Start the program on n1 and wait until it counts and offers a checkpoint."""
    command = [sys.executable, "-u", "-c", program or PROGRAMS[kind]]
    gang = made.gang({"n1": [0]}, "n1", uid=uid, command=command, **changes)
    if kind != "agent":
        gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
    await made.master.want("n1", gang)
    await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
    running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
    assert running.capabilities.mechanism == Mechanism.IMAGE
    assert not running.capabilities.missing.get("MOVE")
    await until(lambda: counts(made, "n1", uid, 1))
    return gang


@programs
def test_a_job_is_saved_as_it_is_and_goes_on_from_its_image_on_another_node(kind: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, kind, uid)
        parked = await saved(made, "n1", gang)
        parts = [counts(made, "n1", uid, 1)]
        await made.master.forget("n1", 1)
        for epoch, node in ((2, "n2"), (3, "n1")):
            gang = from_image(made, gang, parked, node, epoch)
            await made.master.want(node, gang)
            await made.master.until(node, epoch, in_phase(Observed.PHASE_RUNNING), patience=PATIENCE)
            await goes_on(made, node, uid, epoch)
            await made.master.until(node, epoch, lambda seen: seen.capabilities.can_checkpoint)
            parked = await saved(made, node, gang)
            parts.append(counts(made, node, uid, epoch))
            await made.master.forget(node, epoch)
        assert one_after_the_other(*parts)
        await until_nothing_is_left(uid)

    run(story)


@programs
def test_a_job_is_moved_as_it_is_and_back(kind: str) -> None:
    async def story(made: Cluster) -> None:
        uid, parts = str(uuid.uuid4()), []
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, kind, uid)
        for epoch, source, target in ((2, "n1", "n2"), (3, "n2", "n1")):
            new = prepared(made, gang, target, epoch)
            await made.master.want(target, new)
            await made.master.until(target, epoch, in_phase(Observed.PHASE_PREPARED))
            await made.master.want(source, with_changes(gang, 8, intent=Intents.INTENT_HAND_OVER, stop_sequence=8))
            parked = await made.master.until(source, gang.epoch, in_phase(Observed.PHASE_PARKED))
            ready = await made.master.until(target, epoch, in_phase(Observed.PHASE_READY))
            assert ready.stop_step == parked.stop_step
            parts.append(counts(made, source, uid, epoch - 1))
            old, gang = gang, with_changes(new, 2, intent=Intents.INTENT_RUN)
            await made.master.want(target, gang)
            await goes_on(made, target, uid, epoch)
            await made.master.until(target, epoch, in_phase(Observed.PHASE_RUNNING))
            # nothing ran at the source since its image was taken
            assert counts(made, source, uid, epoch - 1) == parts[-1]
            await ended(made, source, old)
        assert one_after_the_other(*parts, counts(made, "n1", uid, 3))

    run(story)


@programs
def test_a_move_that_is_given_up_leaves_the_job_where_it_was(kind: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, kind, uid)
        new = prepared(made, gang, "n2", 2)
        await made.master.want("n2", new)
        await made.master.until("n2", 2, in_phase(Observed.PHASE_PREPARED))
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_HAND_OVER, stop_sequence=2))
        await made.master.until("n2", 2, in_phase(Observed.PHASE_READY))
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_STOP))
        await made.master.until("n2", 2, in_phase(Observed.PHASE_ENDED))
        before = len(counts(made, "n1", uid, 1))
        await made.master.want("n1", with_changes(gang, 3))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await until(lambda: len(counts(made, "n1", uid, 1)) > before + 2)
        assert one_after_the_other(counts(made, "n1", uid, 1))
        assert counts(made, "n2", uid, 2) == []

    run(story)


def test_a_move_whose_image_is_lost_with_a_launcher_ends_with_the_reason() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, "opaque", uid)
        new = prepared(made, gang, "n2", 2)
        await made.master.want("n2", new)
        await made.master.until("n2", 2, in_phase(Observed.PHASE_PREPARED))
        (path,) = (made.directory / "r-n2" / "launchers").glob("*.sock")
        with Launcher(str(path)) as launcher:
            os.kill(int(launcher.info()["pid"]), signal.SIGKILL)
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_HAND_OVER, stop_sequence=2))
        refused = await made.master.until("n2", 2, lambda seen: bool(seen.trouble))
        assert "its image is gone with the launcher that held it" in refused.trouble
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_STOP))
        await made.master.want("n1", with_changes(gang, 3))
        before = len(counts(made, "n1", uid, 1))
        await until(lambda: len(counts(made, "n1", uid, 1)) > before + 2)
        assert one_after_the_other(counts(made, "n1", uid, 1))

    run(story)


def test_a_job_whose_image_is_refused_goes_on_and_says_why() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            connects = f"import socket\nother = socket.create_connection(('127.0.0.1', {port}))\n"
            gang = made.gang({"n1": [0]}, "n1", uid=uid, command=[sys.executable, "-u", "-c", connects + OPAQUE])
            gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
            await made.master.want("n1", gang)
            await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
            await until(lambda: counts(made, "n1", uid, 1))
            await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
            refused = await made.master.until("n1", 1, lambda seen: "IMAGE_REFUSED" in seen.trouble)
            assert f"127.0.0.1:{port}" in refused.trouble
            assert "--close-connections" in refused.trouble
            # short of the level, so that the master takes the order back
            resting = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
            assert resting.level == job_pb2.SUSPEND_LEVEL_PAUSE
            assert "IMAGE_REFUSED" in resting.trouble
            await made.master.want("n1", with_changes(gang, 3))
            await goes_on(made, "n1", uid)
            assert one_after_the_other(counts(made, "n1", uid, 1))

    run(story)


def test_a_process_that_begins_to_train_after_a_restore_has_the_arena_of_its_rank() -> None:
    begin = """
import os
has_begun = False
def begin_once():
    global has_begun
    if os.path.exists("begin") and not has_begun:
        from ganger.injob.control import Control
        control, has_begun = Control.from_environment(), True
        print("it has", "none" if control is None or control.arena_fd is None else "an arena", flush=True)
"""

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        command = [sys.executable, "-u", "-c", opaque(begin, "begin_once()")]
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=command)
        await made.master.want("n1", gang)
        # without a hello for some seconds it counts as one without an agent
        await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
        parked = await saved(made, "n1", gang)
        await made.master.forget("n1", 1)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
        await until(lambda: counts(made, "n1", uid, 2))
        (made.directory / "begin").touch()
        await until(lambda: [line for line in log_of(made.directory, "n1", uid, 0, 2) if "it has" in line])
        assert "it has an arena" in log_of(made.directory, "n1", uid, 0, 2)

    run(story)


def test_a_semaphore_with_a_name_goes_along_and_leaves_none_behind() -> None:
    has = "import multiprocessing\nturn = multiprocessing.get_context('spawn').Semaphore(1)\n"
    uses = "    turn.acquire()\n    turn.release()\n    time.sleep"
    program = has + "print('it is', turn._semlock.name, flush=True)\n" + OPAQUE.replace("    time.sleep", uses)

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        command = [sys.executable, "-u", "-c", program]
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=command)
        gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
        await until(lambda: counts(made, "n1", uid, 1))
        (line,) = (line for line in log_of(made.directory, "n1", uid, 0, 1) if line.startswith("it is"))
        name = "sem." + line.removeprefix("it is /")
        assert name in os.listdir("/dev/shm")
        given = {one for one in os.listdir("/dev/shm") if one.startswith("link_remap.")}
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        before = counts(made, "n1", uid, 1)
        await made.master.forget("n1", 1)
        await until(lambda: name not in os.listdir("/dev/shm"))
        assert {one for one in os.listdir("/dev/shm") if one.startswith("link_remap.")} <= given
        restore = agent_pb2.Restore(checkpoint_path=parked.checkpoint.path, step=parked.checkpoint.step)
        again = made.gang({"n1": [0]}, "n1", uid=uid, epoch=2, command=command, restore=restore)
        await made.master.want("n1", again)
        await until(lambda: len(counts(made, "n1", uid, 2)) > 2)
        assert one_after_the_other(before, counts(made, "n1", uid, 2))

    run(story)


def test_a_job_whose_connections_may_be_closed_goes_on_from_its_image_without_them() -> None:
    begin = """
import socket
other = socket.create_connection(("127.0.0.1", {port}))
other.settimeout(0)
def read():
    try:
        other.recv(1)
        return "closed"
    except BlockingIOError:
        return "open"
    except OSError:
        return "closed"
"""

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            program = opaque(begin.format(port=port), 'print("it is", read(), flush=True)')
            command = [sys.executable, "-u", "-c", program]
            gang = made.gang({"n1": [0]}, "n1", uid=uid, command=command)
            gang.spec.agent, gang.spec.closes_connections = job_pb2.JobSpec.AGENT_NONE, True
            await made.master.want("n1", gang)
            await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
            await until(lambda: counts(made, "n1", uid, 1))
            parked = await saved(made, "n1", gang)
            await made.master.forget("n1", 1)
            await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
            await until(lambda: len(counts(made, "n1", uid, 2)) > 2)
            assert one_after_the_other(counts(made, "n1", uid, 1), counts(made, "n1", uid, 2))
            assert "it is closed" not in log_of(made.directory, "n1", uid, 0, 1)
            assert log_of(made.directory, "n1", uid, 0, 2)[-1] != "it is open"
            assert "it is closed" in log_of(made.directory, "n1", uid, 0, 2)

    run(story)


def test_every_failpoint_of_images_is_tried() -> None:
    # those of devices: test_taken_devices
    assert {point for point, _ in MOVE_POINTS} | set(SAVE_POINTS) >= OF_IMAGES - OF_DEVICES


@pytest.mark.parametrize("kind", ["opaque", "agent"])
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_a_daemon_that_dies_while_it_saves_an_image_loses_nothing(kind: str, point: str) -> None:
    async def story(made: Cluster) -> None:
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

    run(story)


@pytest.mark.parametrize("kind", ["opaque", "agent"])
@pytest.mark.parametrize(("point", "victim"), MOVE_POINTS)
def test_a_move_in_which_a_daemon_dies_never_runs_the_job_twice(kind: str, point: str, victim: str) -> None:
    may_be_lost = (kind, point) == ("opaque", "image-packed")

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        for node in ("n1", "n2"):
            await made.daemon_process(node, point if node == victim else "", cgroups="auto")
        await asyncio.gather(made.until_session("n1"), made.until_session("n2"))
        gang = await begun(made, kind, uid, holding_shared_memory(uid) + PROGRAMS[kind])
        new = prepared(made, gang, "n2", 2)
        dies = asyncio.ensure_future(replaced(made, victim, cgroups="auto"))
        await made.master.want("n2", new)
        await made.master.until("n2", 2, in_phase(Observed.PHASE_PREPARED))
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_HAND_OVER, stop_sequence=2))
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

    run(story)


@pytest.mark.parametrize("cgroups", ["none", "auto"])
@programs
def test_a_parked_job_is_moved_by_its_image(kind: str, cgroups: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1", cgroups=cgroups)
        await made.daemon("n2", cgroups=cgroups)
        gang = await begun(made, kind, uid, ON_TERM + PROGRAMS[kind])
        gang.grace.FromMilliseconds(500)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **PAUSE))
        parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        before = counts(made, "n1", uid, 1)
        new = prepared(made, gang, "n2", 2)
        await made.master.want("n2", new)
        ready = await made.master.until("n2", 2, in_phase(Observed.PHASE_READY))
        assert ready.stop_step == parked.stop_step
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_RUN))
        await goes_on(made, "n2", uid, 2)
        await made.master.want("n1", with_changes(gang, 3, intent=Intents.INTENT_STOP))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert counts(made, "n1", uid, 1) == before
        if kind != "agent":
            assert "handler" not in log_of(made.directory, "n1", uid, 0, 1), "it is ended as it stands"
        assert one_after_the_other(before, counts(made, "n2", uid, 2))

    run(story)


@programs
def test_a_job_that_is_lost_goes_on_from_the_newest_image_that_was_taken_while_it_ran(kind: str) -> None:
    first, _, rest = PROGRAMS[kind].partition("import")
    writes = f'{first}out = open("counts.txt", "w")\nimport{rest}'
    writes = writes.replace("    time.sleep", "    print(count, file=out, flush=True)\n    time.sleep")

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        command = [sys.executable, "-u", "-c", writes]
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=command)
        if kind != "agent":
            gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
        await made.master.want("n1", gang)
        await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
        await until(lambda: len(counts(made, "n1", uid, 1)) > 2)
        former = ""
        for request in (1, 2):
            await made.master.want("n1", with_changes(gang, 1 + request, checkpoint_request=request))
            imaged = await made.master.until("n1", 1, lambda seen: seen.checkpoint.path not in ("", former))  # noqa: B023
            former, stood = imaged.checkpoint.path, len(counts(made, "n1", uid, 1))
            await until(lambda: len(counts(made, "n1", uid, 1)) > stood + 5)  # noqa: B023
        running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        os.kill(running.ranks[0].pid, signal.SIGKILL)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        await made.master.forget("n1", 1)
        await made.master.want("n1", from_image(made, gang, imaged, "n1", 2))
        await until(lambda: len(counts(made, "n1", uid, 2)) > 2)
        written = [int(line) for line in (made.directory / "counts.txt").read_text().split()]
        assert one_after_the_other(written)
        assert 1 < counts(made, "n1", uid, 2)[0] <= stood + 1
        if kind == "agent":
            assert counts(made, "n1", uid, 2)[0] == imaged.checkpoint.step + 1

    run(story)


def test_an_image_for_a_move_leaves_alone_the_one_that_is_still_written_to_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_written, may_go_on = threading.Event(), threading.Event()

    def slow_on_storage(*arguments: Any, **options: Any) -> int:
        if options.get("is_durable"):
            is_written.set()
            assert may_go_on.wait(PATIENCE)
        return pack(*arguments, **options)

    monkeypatch.setattr("ganger_daemon.gang.process_image.pack", slow_on_storage)

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, "opaque", uid)
        await made.master.want("n1", with_changes(gang, 2, checkpoint_request=1))
        await until(is_written.is_set)
        await made.master.want("n2", prepared(made, gang, "n2", 2))
        await made.master.until("n2", 2, in_phase(Observed.PHASE_PREPARED))
        moves = {"intent": Intents.INTENT_HAND_OVER, "stop_sequence": 3, "checkpoint_request": 1}
        await made.master.want("n1", with_changes(gang, 3, **moves))
        await made.master.until("n2", 2, in_phase(Observed.PHASE_READY))
        may_go_on.set()
        saved = await made.master.until("n1", 1, lambda seen: bool(seen.checkpoint.path or seen.trouble))
        assert saved.checkpoint.path, saved.trouble

    run(story)


def test_where_nothing_may_be_mounted_a_job_starts_and_is_not_saved_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(source: str, place: str) -> None:
        raise PermissionError(1, "Operation not permitted", place)

    monkeypatch.setattr("ganger_daemon.gang.job_names.bind", forbidden)

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=[sys.executable, "-u", "-c", OPAQUE])
        gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
        await made.master.want("n1", gang)
        running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await until(lambda: len(counts(made, "n1", uid, 1)) > 2)
        assert not running.capabilities.can_checkpoint
        refused = {one.mechanism: one.reason for one in running.capabilities.refused_mechanisms}
        assert "Operation not permitted" in refused[Mechanism.IMAGE]

    run(story)


def test_a_launcher_that_dies_before_it_has_recorded_what_it_restored_leaves_nothing(tmp_path: Path) -> None:
    found = choose_images()
    assert isinstance(found, CriuImages)
    waits = f"touch {tmp_path}/at; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"
    criu = tmp_path / "criu"
    criu.write_text(f'#!/bin/sh\n[ "$1" = restore ] && {{ {waits}; }}\nexec {found.program} "$@"\n')
    criu.chmod(0o755)

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1", criu=str(criu))
        gang = await begun(made, "opaque", uid)
        launcher = parent_of(made.master.book("n1").observed[1].ranks[0].pid)
        parked = await saved(made, "n1", gang)
        before = counts(made, "n1", uid, 1)
        await made.master.forget("n1", 1)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
        await until((tmp_path / "at").exists)
        os.kill(launcher, signal.SIGSTOP)
        (tmp_path / "go").touch()
        # it runs, as the child of a launcher that does not know of it yet
        await until(lambda: len(counts(made, "n1", uid, 2)) > 2)
        os.kill(launcher, signal.SIGKILL)
        ended = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_LAUNCH_FAILED
        assert processes_of(uid) == []
        await made.master.forget("n1", 2)
        await made.master.until_absent("n1", 2)
        await until_nothing_is_left(uid)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 3))
        await until(lambda: len(counts(made, "n1", uid, 3)) > 2)
        assert one_after_the_other(before, counts(made, "n1", uid, 3))

    run(story)


def test_an_agent_behind_a_command_of_another_name_knows_that_it_is_saved_by_image() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        command = ["env", sys.executable, "-u", "-c", WITH_AGENT]
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=command)
        await made.master.want("n1", gang)
        await until(lambda: len(counts(made, "n1", uid, 1)) > 2)
        parked = await saved(made, "n1", gang)
        assert parked.level == job_pb2.SUSPEND_LEVEL_CHECKPOINT, str(parked)

    run(story)


def test_a_script_whose_agent_never_reports_is_known_to_be_saved_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ganger_daemon.gang.offered_capabilities._LATEST_REPORT_S", 8.0)

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=[sys.executable, "-u", "-c", OPAQUE])
        await made.master.want("n1", gang)
        early = await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
        assert early.capabilities_presumed, "it may be importing"
        await made.master.until("n1", 1, lambda seen: not seen.capabilities_presumed)
        parked = await saved(made, "n1", gang)
        assert parked.level == job_pb2.SUSPEND_LEVEL_CHECKPOINT, str(parked)

    run(story)


async def moved_in(made: Cluster, gang: agent_pb2.DesiredGang) -> agent_pb2.DesiredGang:
    """Bring the job's image to n2, where it stands still. Return its gang there."""
    new = prepared(made, gang, "n2", 2)
    await made.master.want("n2", new)
    await made.master.until("n2", 2, in_phase(Observed.PHASE_PREPARED))
    await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_HAND_OVER, stop_sequence=2))
    await made.master.until("n2", 2, in_phase(Observed.PHASE_READY))
    return new


@pytest.mark.parametrize("cgroups", ["none", "auto"])
def test_a_job_that_is_suspended_before_it_may_run_at_its_destination_goes_on_from_its_image(cgroups: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1", cgroups=cgroups)
        await made.daemon("n2", cgroups=cgroups)
        gang = await begun(made, "opaque", uid)
        new = await moved_in(made, gang)
        parked = await saved(made, "n2", new)
        await made.master.want("n2", from_image(made, new, parked, "n2", 3))
        await goes_on(made, "n2", uid, 3)
        assert one_after_the_other(counts(made, "n1", uid), counts(made, "n2", uid, 2), counts(made, "n2", uid, 3))

    run(story)


@pytest.mark.parametrize("cgroups", ["none", "auto"])
def test_a_paused_job_whose_move_is_given_up_can_be_suspended_on_its_image(cgroups: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1", cgroups=cgroups)
        await made.daemon("n2", cgroups=cgroups)
        gang = await begun(made, "opaque", uid)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **PAUSE))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        new = prepared(made, gang, "n2", 2)
        await made.master.want("n2", new)
        await made.master.until("n2", 2, in_phase(Observed.PHASE_READY))
        await ended(made, "n2", new)
        parked = await saved(made, "n1", gang, sequence=3, stop_sequence=2)
        before = counts(made, "n1", uid)
        await made.master.forget("n1", 1)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 3))
        await goes_on(made, "n1", uid, 3)
        assert one_after_the_other(before, counts(made, "n1", uid, 3))

    run(story)


def test_a_job_runs_on_if_its_move_is_given_up_while_no_daemon_of_its_node_lives() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon_process("n1", "image-packed")
        await made.daemon("n2")
        await made.until_session("n1")
        gang = await begun(made, "opaque", uid)
        await made.master.want("n2", prepared(made, gang, "n2", 2))
        await made.master.until("n2", 2, in_phase(Observed.PHASE_PREPARED))
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_HAND_OVER, stop_sequence=2))
        async with asyncio.timeout(60):
            await made.processes["n1"].wait()
        await made.master.want("n1", with_changes(gang, 3))
        await made.daemon_process("n1")
        await goes_on(made, "n1", uid)
        assert one_after_the_other(counts(made, "n1", uid))

    run(story)


def test_a_source_that_stands_still_is_ended_at_once_whatever_grace_it_has() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, "opaque", uid)
        await moved_in(made, gang)
        stop = with_changes(gang, 3, intent=Intents.INTENT_STOP)
        stop.grace.FromSeconds(3600)
        await made.master.want("n1", stop)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))

    run(story)


def test_a_destination_that_cannot_use_an_image_reports_why_and_tries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def unpack(source: int, directory: Path) -> None:
        tried.append(source)
        raise KeyError("names")

    monkeypatch.setattr(process_image, "unpack", unpack)

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, "opaque", uid)
        new = prepared(made, gang, "n2", 2)
        await made.master.want("n2", new)
        await made.master.until("n2", 2, in_phase(Observed.PHASE_PREPARED))
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_HAND_OVER, stop_sequence=2))
        troubled = await made.master.until("n2", 2, lambda seen: bool(seen.trouble))
        assert "names" in troubled.trouble
        await ended(made, "n2", new)
        assert len(tried) == 1

    run(story)


def test_a_daemon_that_dies_after_its_consent_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU ends the processes only after a while, as it does where their memory is large."""
    flock = tmp_path / "flock"
    waits = f"touch {tmp_path}/at; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"
    flock.write_text(f'#!/bin/sh\n{shutil.which("flock")} "$@" || exit 1\n[ "$3" = grep ] && {{ {waits}; }}\nexit 0\n')
    flock.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon_process("n1")
        await made.until_session("n1")
        gang = await begun(made, "opaque", uid)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
        await until((tmp_path / "at").exists, "the daemon's consent")
        made.processes["n1"].kill()
        await made.processes["n1"].wait()
        await made.daemon_process("n1")
        await made.until_session("n1")
        await made.master.until("n1", 1, in_phase(Observed.PHASE_STOPPING))
        (tmp_path / "go").touch()
        parked = await saved(made, "n1", gang)
        before = counts(made, "n1", uid)
        await made.master.forget("n1", 1)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
        await goes_on(made, "n1", uid, 2)
        assert one_after_the_other(before, counts(made, "n1", uid, 2))

    run(story)
