"""Devices taken from processes without an agent and given back, in place and around images, by a driver in files."""

from __future__ import annotations

import asyncio
import socket
import sys
import uuid

import pytest
from daemon.image_kit import (
    CHECKPOINT,
    OFFLOAD,
    begun,
    counts,
    expected,
    from_image,
    goes_on,
    handed_over,
    kinds_at_points,
    moved_in,
    needs_images,
    one_after_the_other,
    opaque,
    prepared,
    replaced,
    saved,
    until,
    with_agent,
)
from daemon.kit import Cluster, Intents, Observed, in_phase, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.failpoints import OF_DEVICES
from ganger.v1 import job_pb2
from ganger_daemon.devices.virtual import VirtualDevices, VirtualSpec
from kit import file_driver

pytestmark = pytest.mark.system

OPAQUE, WITH_AGENT = opaque(file_driver.PROGRAM, "use()"), with_agent(file_driver.PROGRAM, "use()")
PROGRAMS = {"opaque": OPAQUE, "agent": WITH_AGENT}
programs = pytest.mark.parametrize("kind", list(PROGRAMS))
# The program of daemons that have the driver.
DRIVEN = "kit.file_driver"
# At these a daemon dies in an OFFLOAD, in a checkpoint, and, at the source or at the destination, in a move.
OFFLOAD_POINTS = ("devices-locked", "devices-saved", "devices-restored")
SAVE_POINTS = ("devices-locked", "devices-saved")
MOVE_POINTS = (("devices-locked", "n1"), ("devices-saved", "n1"), ("devices-restored", "n2"))


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ganger_daemon.app.choose_device_state", file_driver.state_here)


def device_of(node: str, index: int = 0) -> str:
    return VirtualDevices(VirtualSpec(4, "2x2", 4, 8 << 30, 1 << 28), node).inventory.devices[index].uuid


async def begun_in_place(made: Cluster, uid: str, program: str = OPAQUE) -> tuple[agent_pb2.DesiredGang, int]:
    """Start a program without an agent on n1 and wait until it counts; return its gang and its pid."""
    gang = made.gang({"n1": [0]}, "n1", uid=uid, command=[sys.executable, "-u", "-c", program])
    gang.spec.environment.update(FAKE_GPU=device_of("n1"), TMPDIR=str(made.directory))
    gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
    await made.master.want("n1", gang)
    running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
    await until(lambda: counts(made, "n1", uid))
    return gang, running.ranks[0].pid


async def begun_for_images(made: Cluster, kind: str, uid: str) -> tuple[agent_pb2.DesiredGang, int]:
    """As `begun_in_place`, of any kind and with a directory for temporary files that travels with an image."""
    gang = await begun(made, kind, uid, PROGRAMS[kind], environment={"FAKE_GPU": device_of("n1")})
    return gang, made.master.book("n1").observed[1].ranks[0].pid


async def offloaded(made: Cluster, gang: agent_pb2.DesiredGang, sequence: int) -> agent_pb2.ObservedGang:
    await made.master.want("n1", with_changes(gang, sequence, stop_sequence=sequence, **OFFLOAD))
    parked = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED), patience=60)
    assert parked.level == job_pb2.SUSPEND_LEVEL_OFFLOAD
    return parked


def test_every_failpoint_of_devices_is_tried() -> None:
    assert {*OFFLOAD_POINTS, *SAVE_POINTS, *(point for point, _ in MOVE_POINTS)} == OF_DEVICES


@pytest.mark.parametrize("cgroups", ["none", "auto"])
def test_a_process_without_an_agent_is_offloaded_in_place_and_goes_on_with_its_device(cgroups: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1", criu="none", cgroups=cgroups)
        gang, pid = await begun_in_place(made, uid)
        offers = await made.master.until("n1", 1, lambda seen: seen.capabilities.can_offload)
        assert offers.capabilities.offload_by
        assert offers.peak_device_bytes, "what takes its device away needs room"
        for sequence in (2, 4):
            parked = await offloaded(made, gang, sequence)
            assert file_driver.read(pid) == {"state": "checkpointed", "uuid": device_of("n1")}
            assert [rank.pid for rank in parked.ranks] == [pid]
            stood = counts(made, "n1", uid)
            await made.master.want("n1", with_changes(gang, sequence + 1))
            await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
            assert file_driver.read(pid) == {"state": "running", "uuid": device_of("n1")}
            assert counts(made, "n1", uid)[: len(stood)] == stood
            await goes_on(made, "n1", uid)
        assert one_after_the_other(counts(made, "n1", uid))

    run(story)


@pytest.mark.parametrize(
    ("call", "result", "said"),
    [
        ("lock", "CUDA_ERROR_NOT_READY", "was not done in time"),
        ("checkpoint", "CUDA_ERROR_NOT_SUPPORTED", "NCCL, managed memory"),
        ("checkpoint", "CUDA_ERROR_OUT_OF_MEMORY", "too little free memory"),
    ],
)
def test_an_offload_that_the_driver_refuses_is_reported_and_the_process_goes_on(
    call: str, result: str, said: str
) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1", criu="none")
        gang, pid = await begun_in_place(made, uid)
        file_driver.write(pid, {call: [result, ""]}, "gpu-faults")
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **OFFLOAD))
        refused = await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        assert refused.level == job_pb2.SUSPEND_LEVEL_PAUSE
        assert said in refused.trouble
        assert file_driver.read(pid)["state"] == "running"
        await made.master.want("n1", with_changes(gang, 3))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await goes_on(made, "n1", uid)
        await offloaded(made, gang, 4)

    run(story)


async def resumed_with(made: Cluster, uid: str, result: str, text: str) -> None:
    """Offload a process, and let it go on although its driver will answer the first call to restore it like this."""
    await made.daemon("n1", criu="none")
    gang, pid = await begun_in_place(made, uid)
    await offloaded(made, gang, 2)
    file_driver.write(pid, {"restore": [result, text]}, "gpu-faults")
    await made.master.want("n1", with_changes(gang, 3))


def test_a_device_that_is_full_is_asked_for_again_until_it_has_room() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await resumed_with(made, uid, "CUDA_ERROR_OUT_OF_MEMORY", "")
        waits = await made.master.until("n1", 1, lambda seen: "too little free memory" in seen.trouble)
        assert waits.phase == Observed.PHASE_STARTING
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await goes_on(made, "n1", uid)

    run(story)


def test_a_process_that_loses_its_device_state_is_ended_with_the_reason() -> None:
    async def story(made: Cluster) -> None:
        await resumed_with(made, str(uuid.uuid4()), "CUDA_ERROR_UNKNOWN", "failed")
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_FAILED
        assert "has lost its GPU state" in ended.outcome.message

    run(story)


@pytest.mark.parametrize("point", OFFLOAD_POINTS)
def test_a_daemon_that_dies_while_it_takes_or_gives_a_device_leaves_no_process_locked(point: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon_process("n1", point, DRIVEN)
        await made.until_session("n1")
        gang, pid = await begun_in_place(made, uid)
        dies = asyncio.ensure_future(replaced(made, "n1", DRIVEN))
        if point == "devices-restored":
            await offloaded(made, gang, 2)
            await made.master.want("n1", with_changes(gang, 3))
            await dies
        else:
            await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **OFFLOAD))
            await dies
            await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED), patience=60)
            await made.master.want("n1", with_changes(gang, 3))
        await goes_on(made, "n1", uid)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        assert file_driver.read(pid)["state"] == "running"
        assert one_after_the_other(counts(made, "n1", uid))

    run(story)


def test_the_order_to_run_frees_a_process_that_a_dead_daemon_left_locked() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon_process("n1", "devices-locked", DRIVEN)
        await made.until_session("n1")
        gang, pid = await begun_in_place(made, uid)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **OFFLOAD))
        async with asyncio.timeout(60):
            await made.processes["n1"].wait()
        assert file_driver.read(pid)["state"] == "locked"
        await made.master.want("n1", with_changes(gang, 3))
        await made.daemon_process("n1", "", DRIVEN)
        await goes_on(made, "n1", uid)
        assert one_after_the_other(counts(made, "n1", uid))

    run(story)


async def restored(made: Cluster, gang: agent_pb2.DesiredGang, parked: agent_pb2.ObservedGang, node: str) -> int:
    """Let the job go on from its image on another device of a node; return its pid."""
    new = from_image(made, gang, parked, node, 2)
    new.claim.device_mask = 2
    await made.master.want(node, new)
    running = await made.master.until(node, 2, in_phase(Observed.PHASE_RUNNING), patience=60)
    return running.ranks[0].pid


@needs_images
@programs
def test_a_restored_process_gets_the_device_that_replaces_its_own(kind: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang, _ = await begun_for_images(made, kind, uid)
        parked = await saved(made, "n1", gang)
        before = counts(made, "n1", uid)
        await made.master.forget("n1", 1)
        pid = await restored(made, gang, parked, "n2")
        await goes_on(made, "n2", uid, 2)
        assert file_driver.read(pid) == {"state": "running", "uuid": device_of("n2", 1)}
        assert one_after_the_other(before, counts(made, "n2", uid, 2))

    run(story)


@needs_images
def test_an_offloaded_process_is_saved_without_its_device() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        gang, _ = await begun_for_images(made, "opaque", uid)
        await offloaded(made, gang, 2)
        parked = await saved(made, "n1", gang, sequence=3)
        before = counts(made, "n1", uid)
        await made.master.forget("n1", 1)
        await restored(made, gang, parked, "n1")
        await goes_on(made, "n1", uid, 2)
        assert one_after_the_other(before, counts(made, "n1", uid, 2))

    run(story)


@needs_images
def test_a_process_whose_image_is_refused_has_its_device_again() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        with socket.create_server(("127.0.0.1", 0)) as server:
            connects = f"import socket\nother = socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\n"
            gang, pid = await begun_in_place(made, uid, connects + OPAQUE)
            await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
            await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
            await made.master.until("n1", 1, lambda seen: "IMAGE_REFUSED" in seen.trouble)
            await made.master.want("n1", with_changes(gang, 3))
            await goes_on(made, "n1", uid)
            assert file_driver.read(pid)["state"] == "running"

    run(story)


@needs_images
@pytest.mark.parametrize(("kind", "point"), kinds_at_points(SAVE_POINTS))
def test_a_daemon_that_dies_while_it_takes_a_device_for_an_image_loses_nothing(kind: str, point: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon_process("n1", point, DRIVEN)
        await made.until_session("n1")
        gang, _ = await begun_for_images(made, kind, uid)
        dies = asyncio.ensure_future(replaced(made, "n1", DRIVEN))
        parked = await saved(made, "n1", gang)
        await dies
        before = counts(made, "n1", uid)
        await made.master.forget("n1", 1)
        await restored(made, gang, parked, "n1")
        await goes_on(made, "n1", uid, 2)
        assert one_after_the_other(before, counts(made, "n1", uid, 2))

    run(story)


@needs_images
@programs
def test_a_move_that_is_given_up_gives_the_device_back_at_the_source(kind: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang, pid = await begun_for_images(made, kind, uid)
        new = await moved_in(made, gang)
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_STOP))
        await made.master.until("n2", 2, in_phase(Observed.PHASE_ENDED))
        await made.master.want("n1", with_changes(gang, 3))
        await goes_on(made, "n1", uid)
        assert file_driver.read(pid) == {"state": "running", "uuid": device_of("n1")}
        assert one_after_the_other(counts(made, "n1", uid))
        assert counts(made, "n2", uid, 2) == []

    run(story)


@needs_images
@pytest.mark.parametrize("cgroups", ["none", "auto"])
def test_an_offloaded_process_moves_by_its_image_to_another_device(cgroups: str) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1", cgroups=cgroups)
        await made.daemon("n2", cgroups=cgroups)
        gang, _ = await begun_for_images(made, "opaque", uid)
        await offloaded(made, gang, 2)
        before = counts(made, "n1", uid)
        new = prepared(made, gang, "n2", 2)
        await made.master.want("n2", new)
        ready = await made.master.until("n2", 2, in_phase(Observed.PHASE_READY))
        assert ready.stop_step == made.master.book("n1").observed[1].stop_step
        assert made.master.book("n1").observed[1].phase == Observed.PHASE_PARKED
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_RUN))
        await goes_on(made, "n2", uid, 2)
        running = await made.master.until("n2", 2, in_phase(Observed.PHASE_RUNNING))
        assert file_driver.read(running.ranks[0].pid) == {"state": "running", "uuid": device_of("n2")}
        assert one_after_the_other(before, counts(made, "n2", uid, 2))

    run(story)


@needs_images
@pytest.mark.parametrize(("kind", "place"), kinds_at_points(MOVE_POINTS))
def test_a_move_in_which_a_daemon_dies_at_a_driver_call_never_runs_the_job_twice(
    kind: str, place: tuple[str, str]
) -> None:
    point, victim = place

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        for node in ("n1", "n2"):
            await made.daemon_process(node, point if node == victim else "", DRIVEN)
        await asyncio.gather(made.until_session("n1"), made.until_session("n2"))
        gang, _ = await begun_for_images(made, kind, uid)
        dies = asyncio.ensure_future(replaced(made, victim, DRIVEN))
        new = await expected(made, gang)
        await handed_over(made, gang)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED), patience=60)
        await made.master.until("n2", 2, in_phase(Observed.PHASE_READY), patience=60)
        before = counts(made, "n1", uid)
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_RUN))
        await dies
        await goes_on(made, "n2", uid, 2)
        running = await made.master.until("n2", 2, in_phase(Observed.PHASE_RUNNING), patience=60)
        assert file_driver.read(running.ranks[0].pid) == {"state": "running", "uuid": device_of("n2")}
        assert counts(made, "n1", uid) == before
        assert one_after_the_other(before, counts(made, "n2", uid, 2))

    run(story)
