"""Process images taken and restored by daemons: to storage and back, and from one node to another."""

from __future__ import annotations

import os
import signal
import socket
import threading
import uuid
from typing import Any

import pytest
from daemon.image_kit import (
    CHECKPOINT,
    OPAQUE,
    PAUSE,
    PROGRAMS,
    WITH_AGENT,
    begun,
    counts,
    ended,
    expected,
    from_image,
    goes_on,
    moved_in,
    needs_images,
    one_after_the_other,
    opaque,
    prepared,
    programs,
    saved,
    until,
    until_nothing_is_left,
    with_agent,
)
from daemon.kit import PATIENCE, Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.injob.process_identity import stat_fields
from ganger.protocol.gang_orders import Mechanism
from ganger.v1 import job_pb2
from ganger_daemon.images.packing import pack

pytestmark = [pytest.mark.system, needs_images]

# Every step is a collective operation, and the store of the rendezvous is asked too.
COLLECTIVE = with_agent(
    """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
total = torch.zeros(1)
def step(number):
    total.fill_(number)
    dist.all_reduce(total)
    assert total.item() == number * dist.get_world_size()
    store.set(f"count-{dist.get_rank()}", str(number))
""",
    "step(count + 1)",
)
GANG_PROGRAMS = {**PROGRAMS, "collective": COLLECTIVE}
ONE, TWO = [0], [0, 1]
gangs = pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("steps", ONE, id="steps"),
        pytest.param("opaque", TWO, id="opaque of two ranks"),
        pytest.param("collective", TWO, id="collective", marks=pytest.mark.torch),
    ],
)
# Goes on after SIGTERM.
ON_TERM = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('handler', flush=True))\n"


def counts_of_all(made: Cluster, node: str, gang: agent_pb2.DesiredGang) -> list[list[int]]:
    """Return what each rank of a gang has counted on a node."""
    return [counts(made, node, gang.job_uid, gang.epoch, rank) for rank in gang.members[0].ranks]


async def all_go_on(made: Cluster, node: str, gang: agent_pb2.DesiredGang) -> None:
    for rank in gang.members[0].ranks:
        await goes_on(made, node, gang.job_uid, gang.epoch, rank)


async def restored(
    made: Cluster, gang: agent_pb2.DesiredGang, parked: agent_pb2.ObservedGang, node: str, epoch: int
) -> agent_pb2.DesiredGang:
    """Let the gang go on from its image on a node until it can be saved again. Return its gang there."""
    gang = from_image(made, gang, parked, node, epoch)
    await made.master.want(node, gang)
    running = await made.master.until(node, epoch, in_phase(Observed.PHASE_RUNNING))
    assert len({int(stat_fields(rank.pid)[1]) for rank in running.ranks}) == 1, "they have one parent"
    await all_go_on(made, node, gang)
    await made.master.until(node, epoch, lambda seen: seen.capabilities.can_checkpoint)
    return gang


@gangs
def test_a_gang_is_saved_and_moved_as_it_is_and_goes_on_on_another_node_and_back(kind: str, ranks: list[int]) -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        await made.daemon("n2")
        gang = await begun(made, kind, uid, GANG_PROGRAMS[kind], ranks=ranks)
        parked = await saved(made, "n1", gang)
        parts = [counts_of_all(made, "n1", gang)]
        await made.master.forget("n1", 1)
        gang = await restored(made, gang, parked, "n2", 2)

        new = await moved_in(made, gang, "n1")
        parked = await made.master.until("n2", 2, in_phase(Observed.PHASE_PARKED))
        assert made.master.book("n1").observed[3].stop_step == parked.stop_step
        parts.append(counts_of_all(made, "n2", gang))
        old, gang = gang, with_changes(new, 2, intent=Intents.INTENT_RUN)
        await made.master.want("n1", gang)
        await all_go_on(made, "n1", gang)
        await made.master.until("n1", 3, in_phase(Observed.PHASE_RUNNING))
        assert counts_of_all(made, "n2", old) == parts[-1], "nothing ran at the source"
        await ended(made, "n2", old)

        await made.master.until("n1", 3, lambda seen: seen.capabilities.can_checkpoint)
        parked = await saved(made, "n1", gang, sequence=3)
        parts.append(counts_of_all(made, "n1", gang))
        await made.master.forget("n1", 3)
        gang = await restored(made, gang, parked, "n2", 4)
        parts.append(counts_of_all(made, "n2", gang))
        assert all(one_after_the_other(*of_rank) for of_rank in zip(*parts, strict=True))
        await ended(made, "n2", gang)
        await until_nothing_is_left(uid)

    run(story)


def test_a_restored_gang_of_which_one_rank_fails_has_that_ranks_code() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        gang = await begun(made, "agent", uid, ranks=TWO)
        parked = await saved(made, "n1", gang)
        await made.master.forget("n1", 1)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
        running = await made.master.until("n1", 2, in_phase(Observed.PHASE_RUNNING))
        pids = {rank.rank: rank.pid for rank in running.ranks}
        os.kill(pids[1], signal.SIGKILL)
        failed = await made.master.until("n1", 2, in_phase(Observed.PHASE_ENDED))
        assert (failed.outcome.rank, failed.outcome.exit_code) == (1, -signal.SIGKILL)

    run(story)


def test_a_job_whose_image_is_refused_goes_on_and_says_why() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            connects = f"import socket\nother = socket.create_connection(('127.0.0.1', {port}))\n"
            gang = await begun(made, "opaque", uid, connects + OPAQUE)
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
        command = [made.python, "-u", "-c", opaque(begin, "begin_once()")]
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
        gang = await begun(made, "opaque", uid, program)
        (line,) = (line for line in log_of(made.directory, "n1", uid, 0, 1) if line.startswith("it is"))
        name = "sem." + line.removeprefix("it is /")
        assert name in os.listdir("/dev/shm")
        given = {one for one in os.listdir("/dev/shm") if one.startswith("link_remap.")}
        parked = await saved(made, "n1", gang)
        before = counts(made, "n1", uid, 1)
        await made.master.forget("n1", 1)
        await until(lambda: name not in os.listdir("/dev/shm"))
        assert {one for one in os.listdir("/dev/shm") if one.startswith("link_remap.")} <= given
        await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
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
            gang = await begun(made, "opaque", uid, program, closes_connections=True)
            parked = await saved(made, "n1", gang)
            await made.master.forget("n1", 1)
            await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
            await until(lambda: len(counts(made, "n1", uid, 2)) > 2)
            assert one_after_the_other(counts(made, "n1", uid, 1), counts(made, "n1", uid, 2))
            assert "it is closed" not in log_of(made.directory, "n1", uid, 0, 1)
            assert log_of(made.directory, "n1", uid, 0, 2)[-1] != "it is open"
            assert "it is closed" in log_of(made.directory, "n1", uid, 0, 2)

    run(story)


@pytest.mark.parametrize(("kind", "cgroups"), [*((kind, "auto") for kind in PROGRAMS), ("opaque", "none")])
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
        gang = await begun(made, kind, uid, writes)
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
        await expected(made, gang)
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

    monkeypatch.setattr("ganger_daemon.gang.gang_unit.bind", forbidden)

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=[made.python, "-u", "-c", OPAQUE])
        gang.spec.agent = job_pb2.JobSpec.AGENT_NONE
        await made.master.want("n1", gang)
        running = await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        await until(lambda: len(counts(made, "n1", uid, 1)) > 2)
        assert not running.capabilities.can_checkpoint
        refused = {one.mechanism: one.reason for one in running.capabilities.refused_mechanisms}
        assert "operation not permitted" in refused[Mechanism.IMAGE]

    run(story)


def test_an_agent_behind_a_command_of_another_name_knows_that_it_is_saved_by_image() -> None:
    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        command = ["env", made.python, "-u", "-c", WITH_AGENT]
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=command)
        await made.master.want("n1", gang)
        await until(lambda: len(counts(made, "n1", uid, 1)) > 2)
        parked = await saved(made, "n1", gang)
        assert parked.level == job_pb2.SUSPEND_LEVEL_CHECKPOINT, str(parked)

    run(story)


def test_a_script_whose_agent_never_reports_is_known_to_be_saved_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ganger_daemon.gang.observation._LATEST_REPORT_S", 8.0)

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        gang = made.gang({"n1": [0]}, "n1", uid=uid, command=[made.python, "-u", "-c", OPAQUE])
        await made.master.want("n1", gang)
        early = await made.master.until("n1", 1, lambda seen: seen.capabilities.can_checkpoint)
        assert early.capabilities_presumed, "it may be importing"
        await made.master.until("n1", 1, lambda seen: not seen.capabilities_presumed)
        parked = await saved(made, "n1", gang)
        assert parked.level == job_pb2.SUSPEND_LEVEL_CHECKPOINT, str(parked)

    run(story)


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


def test_a_job_whose_suspend_is_withdrawn_while_its_image_is_written_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    is_written, may_go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> int:
        is_written.set()
        assert may_go_on.wait(PATIENCE)
        return pack(*arguments, **options)

    monkeypatch.setattr("ganger_daemon.gang.process_image.pack", slow)

    async def story(made: Cluster) -> None:
        uid = str(uuid.uuid4())
        await made.daemon("n1")
        gang = await begun(made, "opaque", uid)
        await made.master.want("n1", with_changes(gang, 2, stop_sequence=2, **CHECKPOINT))
        await until(is_written.is_set)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_STOPPING))
        await made.master.want("n1", with_changes(gang, 3))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        may_go_on.set()
        await goes_on(made, "n1", uid)
        assert one_after_the_other(counts(made, "n1", uid))
        parked = await saved(made, "n1", gang, sequence=4)
        await made.master.forget("n1", 1)
        await made.master.want("n1", from_image(made, gang, parked, "n1", 2))
        await goes_on(made, "n1", uid, 2)
        assert one_after_the_other(counts(made, "n1", uid), counts(made, "n1", uid, 2))

    run(story)
