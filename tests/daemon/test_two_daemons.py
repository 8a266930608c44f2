"""Two real daemons: one gang over both, moves from one to the other with the state in memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon.kit import PATIENCE, Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.agent.v1 import agent_pb2, peer_pb2, peer_pb2_grpc
from ganger.injob.launcher.client import Launcher
from ganger.protocol.gang_orders import DesiredOrder
from ganger.v1 import job_pb2
from ganger.wire.certificate_authority import renew
from ganger.wire.channels import open_aio_channel
from ganger.wire.endpoints import Endpoint
from ganger.wire.errors import CertificateInvalid, reason_of
from ganger.wire.methods import CallerRole
from ganger.wire.revocation import REVOKED
from ganger_daemon.core.gang_judgement import PartPhase
from ganger_daemon.gang.boundary_relay import BoundaryExchange
from ganger_daemon.transfer.state_stream import StreamError, parse_line, read_line, to_daemon

pytestmark = pytest.mark.system

PARK, PAUSE = Intents.INTENT_PARK, job_pb2.SUSPEND_LEVEL_PAUSE
GUARDS = pytest.mark.parametrize("certified", [False, True], ids=["token", "certificates"])


def lines_of(made: Cluster, node: str, uid: str, rank: int, epoch: int) -> list[str]:
    return [line for line in log_of(made.directory, node, uid, rank, epoch) if line.startswith("step ")]


def last_step(lines: list[str]) -> int:
    return int(lines[-1].split()[1]) if lines else 0


@GUARDS
def test_a_gang_on_two_nodes_stops_at_one_step_and_goes_on(certified: bool) -> None:
    async def story(made: Cluster) -> None:
        await asyncio.gather(made.daemon("n1"), made.daemon("n2"))
        uid = str(uuid.uuid4())
        placement = {"n1": [0], "n2": [1]}
        gangs = {node: made.gang(placement, node, uid=uid, pause=0.01) for node in placement}
        for node, gang in gangs.items():
            await made.master.want(node, gang)
        for node in placement:
            await made.master.until(node, 1, in_phase(Observed.PHASE_RUNNING))
        for sequence in (2, 4, 6):
            for node, gang in gangs.items():
                await made.master.want(
                    node, with_changes(gang, sequence, intent=PARK, level=PAUSE, stop_sequence=sequence)
                )
            parked = [
                await made.master.until(
                    node, 1, lambda seen, s=sequence: seen.phase == Observed.PHASE_PARKED and seen.stop_sequence == s
                )
                for node in placement
            ]
            assert parked[0].stop_step == parked[1].stop_step
            for node, gang in gangs.items():
                await made.master.want(node, with_changes(gang, sequence + 1))
            for node in placement:
                await made.master.until(node, 1, in_phase(Observed.PHASE_RUNNING))

    run(story, certified=certified)


@pytest.mark.parametrize("slow", ["n1", "n2"], ids=["leader", "member"])
def test_ranks_agree_though_a_daemon_sees_the_ack_of_its_own_only_when_that_is_parked(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = BoundaryExchange.relay

    def relay_late(exchange: BoundaryExchange, wanted: DesiredOrder, phase: PartPhase) -> None:
        if exchange._host.node != slow or phase is PartPhase.PARKED:
            relay(exchange, wanted, phase)

    monkeypatch.setattr(BoundaryExchange, "relay", relay_late)

    async def story(made: Cluster) -> None:
        gangs = await runs_on_two(made)
        for node, gang in gangs.items():
            await made.master.want(node, with_changes(gang, 2, intent=PARK, level=PAUSE, stop_sequence=2))
        parked = [await made.master.until(node, 1, in_phase(Observed.PHASE_PARKED)) for node in gangs]
        assert parked[0].stop_step == parked[1].stop_step

    run(story)


@pytest.mark.parametrize("first", ["n1", "n2"], ids=["leader", "member"])
def test_a_stop_that_comes_when_the_ranks_of_one_node_have_ended_lets_the_others_finish(first: str) -> None:
    async def story(made: Cluster) -> None:
        gangs = await runs_on_two(made, **{first: 20})
        await made.master.until(first, 1, in_phase(Observed.PHASE_ENDED))
        (other,) = gangs.keys() - {first}
        await made.master.want(other, with_changes(gangs[other], 2, intent=PARK, level=PAUSE, stop_sequence=2))
        ended = await made.master.until(other, 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == agent_pb2.Outcome.KIND_DONE
        assert ended.progress.step == 200

    run(story)


async def runs_on_two(made: Cluster, **steps: int) -> dict[str, agent_pb2.DesiredGang]:
    """Start a gang of one rank on each of two nodes, with so many steps on a node, or 200."""
    await asyncio.gather(made.daemon("n1"), made.daemon("n2"))
    uid, placement = str(uuid.uuid4()), {"n1": [0], "n2": [1]}
    gangs = {node: made.gang(placement, node, uid=uid, steps=steps.get(node, 200)) for node in placement}
    for node, gang in gangs.items():
        await made.master.want(node, gang)
    for node in placement:
        await made.master.until(node, 1, in_phase(Observed.PHASE_RUNNING))
    return gangs


def test_a_daemon_answers_no_daemon_whose_certificate_the_master_has_told_it_is_revoked() -> None:
    async def story(made: Cluster) -> None:
        assert made.authority is not None
        daemon = await made.daemon("n1")
        stolen = made.authority.issue("daemon", "n2")
        uid = str(uuid.uuid4())
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        request = peer_pb2.GetRendezvousRequest(job_uid=uid, epoch=1)
        async with open_aio_channel(Endpoint(daemon.peer_address, tls=str(stolen)), role=CallerRole.DAEMON) as channel:
            stub: Any = peer_pb2_grpc.PeerServiceStub(channel)
            assert await refusal(stub.GetRendezvous(request)) == "NODE_NOT_YOURS"
            made.master.revocation_list = made.authority.revoke(stolen)
            await made.master.want(
                "n1", with_changes(made.gang({"n1": [0]}, "n1", uid=uid), 2, intent=PARK, level=PAUSE)
            )
            await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
            assert await refusal(stub.GetRendezvous(request)) == "CERTIFICATE_REVOKED"
        with pytest.raises(StreamError, match="the certificate of daemon 'n2' was revoked"):
            await asyncio.to_thread(asks_for_state, daemon.stream_address, stolen)

    run(story, certified=True)


def test_a_damaged_list_keeps_no_daemon_from_starting() -> None:
    async def story(made: Cluster) -> None:
        kept = made.directory / "n1" / REVOKED
        kept.parent.mkdir()
        kept.write_text("nonsense")
        await made.daemon("n1")
        assert not kept.exists()

    run(story, certified=True)


def test_a_daemon_whose_certificate_ended_but_was_renewed_dials_the_master_at_once() -> None:
    async def story(made: Cluster) -> None:
        assert made.authority is not None
        await made.daemon("n1")
        await made.until_session("n1")
        renew(made.directory / "authority", made.authority.issue("daemon", "n1"), 1.0)
        made.master.refusal = CertificateInvalid("it has ended")
        async with asyncio.timeout(PATIENCE):
            while made.master.refusal is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        before = made.master.book("n1").reports
        # One that was not renewed dials after 5 s at the earliest.
        async with asyncio.timeout(4.0):
            while made.master.book("n1").reports == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(story, certified=True)


def asks_for_state(address: str, certificate: Path) -> None:
    host, _, port = address.rpartition(":")
    with to_daemon(socket.create_connection((host, int(port)), 5.0), host, str(certificate)) as connection:
        found = parse_line(read_line(connection))
        raise StreamError(str(found.get("error")))


def test_a_daemon_answers_only_daemons_that_have_a_part_in_the_gang() -> None:
    """Nor is a user, whatever it knows of the gang."""

    async def story(made: Cluster) -> None:
        await asyncio.gather(made.daemon("n1"), made.daemon("n2"))
        uid, placement = str(uuid.uuid4()), {"n1": [0], "n2": [1]}
        for node in placement:
            await made.master.want(node, made.gang(placement, node, uid=uid))
        for node in placement:
            await made.master.until(node, 1, in_phase(Observed.PHASE_RUNNING))
        assert made.authority is not None
        asked = peer_pb2.GetRendezvousRequest(job_uid=uid, epoch=1)
        written = peer_pb2.ShardWrittenRequest(job_uid=uid, epoch=1, stop_sequence=9)
        points = peer_pb2.RankPoints(job_uid=uid, epoch=1)
        for role, name, reason in (
            ("daemon", "n2", ""),
            ("daemon", "n3", "NODE_NOT_YOURS"),
            ("user", "n2", "ROLE_NOT_PERMITTED"),
            ("master", "n2", "ROLE_NOT_PERMITTED"),
        ):
            own = str(made.authority.issue(role, name))
            address = made.daemons["n1"].peer_address
            async with open_aio_channel(Endpoint(address, tls=own), role=CallerRole.DAEMON) as channel:
                stub: Any = peer_pb2_grpc.PeerServiceStub(channel)
                assert await refusal(stub.GetRendezvous(asked)) == reason
                if reason:
                    assert await refusal(stub.ShardWritten(written)) == reason
                    assert await refusal(anext(aiter(stub.RelayBoundary(iter([points]))))) == reason

    run(story, certified=True)


async def refusal(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return reason_of(error)
    return ""


def test_a_gang_whose_leader_never_says_where_ranks_meet_stops_when_it_is_told_to() -> None:
    async def story(made: Cluster) -> None:
        await asyncio.gather(made.daemon("n1"), made.daemon("n2"))
        # n1 leads, and has not heard of it, or has forgotten it.
        gang = made.gang({"n1": [0], "n2": [1]}, "n2", uid=str(uuid.uuid4()))
        await made.master.want("n2", gang)
        await made.master.until("n2", 1, in_phase(Observed.PHASE_STARTING))
        await made.master.want("n2", with_changes(gang, 2, intent=Intents.INTENT_STOP))
        await made.master.until("n2", 1, in_phase(Observed.PHASE_ENDED))

    run(story)


def test_ranks_start_on_a_slower_node_although_those_of_the_leader_have_ended_and_are_forgotten() -> None:
    async def story(made: Cluster) -> None:
        for node in ("n1", "n2"):
            await made.daemon(node)
        uid = str(uuid.uuid4())
        placement = {"n1": [0], "n2": [1]}
        command = [sys.executable, "-c", "import os; print(os.environ['MASTER_PORT'])"]
        gangs = {node: made.gang(placement, node, uid=uid, command=command) for node in placement}
        await made.master.want("n1", gangs["n1"])
        await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        await made.master.forget("n1", 1)
        await made.master.until_absent("n1", 1)
        await made.master.want("n2", gangs["n2"])
        ended = await made.master.until("n2", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == 1, ended.outcome
        first = (made.storage / uid / "logs" / "rank-0.1.log").read_text().splitlines()
        assert log_of(made.directory, "n2", uid, 1, 1) == first

    run(story)


@GUARDS
def test_a_checkpoint_of_a_gang_on_two_nodes_is_published_once_all_shards_are_there(certified: bool) -> None:
    async def story(made: Cluster) -> None:
        await asyncio.gather(made.daemon("n1"), made.daemon("n2"))
        uid = str(uuid.uuid4())
        placement = {"n1": [0], "n2": [1]}
        gangs = {node: made.gang(placement, node, uid=uid, pause=0.01) for node in placement}
        for node, gang in gangs.items():
            await made.master.want(node, gang)
        for node in placement:
            await made.master.until(node, 1, in_phase(Observed.PHASE_RUNNING))
        for node, gang in gangs.items():
            await made.master.want(node, with_changes(gang, 2, checkpoint_request=1))
        seen = await made.master.until("n1", 1, lambda gang: gang.checkpoint.step > 0)
        directory = made.storage / uid / seen.checkpoint.path
        manifest = json.loads((directory / "MANIFEST.json").read_text())
        assert sorted(manifest["files"]) == ["rank-0.shard", "rank-1.shard"]
        # parking at CHECKPOINT: processes leave, and the next epoch starts from what they wrote
        for node, gang in gangs.items():
            await made.master.want(
                node,
                with_changes(gang, 3, intent=PARK, level=job_pb2.SUSPEND_LEVEL_CHECKPOINT, stop_sequence=3),
            )
        parked = [await made.master.until(node, 1, in_phase(Observed.PHASE_PARKED)) for node in placement]
        assert parked[0].stop_step == parked[1].stop_step == parked[0].checkpoint.step
        for node, gang in gangs.items():
            await made.master.want(node, with_changes(gang, 4, intent=Intents.INTENT_STOP))
        for node in placement:
            ended = await made.master.until(node, 1, in_phase(Observed.PHASE_ENDED))
            assert ended.outcome.kind == 2, ended.outcome
            await made.master.forget(node, 1)
        restore = agent_pb2.Restore(checkpoint_path=parked[0].checkpoint.path, step=parked[0].stop_step)
        for node in placement:
            again = made.gang(placement, node, uid=uid, epoch=2, pause=0.01, restore=restore)
            await made.master.want(node, again)
        for node in placement:
            await made.master.until(node, 2, in_phase(Observed.PHASE_RUNNING))
        first = lines_of(made, "n2", uid, 1, 2)[0]
        assert int(first.split()[1]) == parked[0].stop_step + 1

    run(story, certified=certified)


def test_where_storage_is_full_for_one_rank_all_stay_and_go_on_and_can_be_asked_again() -> None:
    async def story(made: Cluster) -> None:
        await asyncio.gather(made.daemon("n1"), made.daemon("n2"))
        uid = str(uuid.uuid4())
        placement = {"n1": [0], "n2": [1]}
        gangs = {node: made.gang(placement, node, uid=uid, pause=0.01) for node in placement}

        async def order(sequence: int, **changes: object) -> None:
            for node, gang in gangs.items():
                await made.master.want(node, with_changes(gang, sequence, **changes))

        save = {"intent": PARK, "level": job_pb2.SUSPEND_LEVEL_CHECKPOINT}
        await order(1)
        for node in placement:
            await made.master.until(node, 1, in_phase(Observed.PHASE_RUNNING))
        full = made.directory / "full-1"
        full.touch()
        await order(2, **save, stop_sequence=2)
        refused = await made.master.until("n2", 1, in_phase(Observed.PHASE_PARKED))
        assert refused.level == job_pb2.SUSPEND_LEVEL_PAUSE
        checkpoints = made.storage / uid / "checkpoints"
        begun = checkpoints / f"{refused.stop_step}-1.tmp"
        assert refused.trouble.startswith(f"STORAGE_FULL: rank 1: {begun}: no space left on device; ")
        assert f"{made.storage} has " in refused.trouble
        other = await made.master.until("n1", 1, lambda seen: seen.order.master_sequence == 2)
        assert other.ranks, "the rank that could save waits for the others"
        await order(3)
        for node in placement:
            await made.master.until(
                node, 1, lambda seen: seen.phase == Observed.PHASE_RUNNING and seen.order.master_sequence == 3
            )
        async with asyncio.timeout(10):
            while begun.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # a thread of the daemon removes it
        full.unlink()
        await order(4, **save, stop_sequence=4)
        parked = [
            await made.master.until(node, 1, lambda seen: seen.level == job_pb2.SUSPEND_LEVEL_CHECKPOINT)
            for node in placement
        ]
        assert parked[0].stop_step == parked[1].stop_step > refused.stop_step
        assert not parked[0].trouble + parked[1].trouble

    run(story)


@GUARDS
def test_a_checkpoint_that_one_node_could_not_write_is_reported_by_both_and_tried_again_when_due(
    certified: bool,
) -> None:
    async def story(made: Cluster) -> None:
        await asyncio.gather(made.daemon("n1"), made.daemon("n2"))
        uid = str(uuid.uuid4())
        placement = {"n1": [0], "n2": [1]}
        full = made.directory / "full-1"
        full.touch()
        for node in placement:
            gang = made.gang(placement, node, uid=uid)
            gang.checkpoint_interval.FromMilliseconds(200)
            await made.master.want(node, gang)
        for node in placement:
            await made.master.until(node, 1, lambda seen: seen.trouble.startswith("STORAGE_FULL: rank 1: "))
        full.unlink()
        await made.master.until("n1", 1, lambda seen: seen.checkpoint.step > 0)
        for node in placement:
            await made.master.until(node, 1, lambda seen: not seen.trouble)

    run(story, certified=certified)


async def trains_on_the_first_of_two(made: Cluster, size: int = 1024) -> tuple[str, agent_pb2.DesiredGang]:
    await asyncio.gather(made.daemon("n1"), made.daemon("n2"))
    uid = str(uuid.uuid4())
    gang = made.gang({"n1": [0]}, "n1", uid=uid, size=size)
    await made.master.want("n1", gang)
    await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
    return uid, gang


async def move(
    made: Cluster, uid: str, source: str, target: str, gang: agent_pb2.DesiredGang, epoch: int, sequence: int
) -> tuple[agent_pb2.DesiredGang, int]:
    """As the master does it: prepare, hand over, run, stop the source."""
    restore = agent_pb2.Restore(parked=agent_pb2.ParkedState(epoch=gang.epoch, members=[made.member(source, [0])]))
    new = made.gang(
        {target: [0]}, target, uid=uid, epoch=epoch, sequence=1, pause=0.01, size=3 << 20,
        intent=Intents.INTENT_PREPARE, restore=restore,
    )  # fmt: skip
    await made.master.want(target, new)
    await made.master.until(target, epoch, in_phase(Observed.PHASE_PREPARED))
    await made.master.want(
        source, with_changes(gang, sequence, intent=Intents.INTENT_HAND_OVER, stop_sequence=sequence)
    )
    parked = await made.master.until(source, gang.epoch, in_phase(Observed.PHASE_PARKED))
    await made.master.until(target, epoch, in_phase(Observed.PHASE_READY))
    running = with_changes(new, 2, intent=Intents.INTENT_RUN)
    await made.master.want(target, running)
    await made.master.until(target, epoch, in_phase(Observed.PHASE_RUNNING))
    await made.master.want(source, with_changes(gang, sequence + 1, intent=Intents.INTENT_STOP))
    await made.master.until(source, gang.epoch, in_phase(Observed.PHASE_ENDED))
    await made.master.forget(source, gang.epoch)
    return running, parked.stop_step


@GUARDS
def test_a_move_loses_no_step_and_changes_no_bit_of_state(certified: bool) -> None:
    async def story(made: Cluster) -> None:
        uid, gang = await trains_on_the_first_of_two(made, 3 << 20)
        gang, there = await move(made, uid, "n1", "n2", gang, 2, 2)
        gang, back = await move(made, uid, "n2", "n1", gang, 3, 5)
        await made.master.want("n1", with_changes(gang, 9, intent=Intents.INTENT_STOP))
        await made.master.until("n1", 3, in_phase(Observed.PHASE_ENDED))
        # the log of the rank is one stream, wherever it is read
        logs = made.daemons["n1"].host.logs
        assert [segment.epoch for segment in logs.segments(uid, 0)] == [1, 2, 3]
        chunks = list(logs.read(uid, 0, 0))
        assert sum(chunk.lost_bytes for chunk in chunks) == 0
        lines = b"".join(chunk.data for chunk in chunks).decode().splitlines()
        steps = [int(line.split()[1]) for line in lines]
        assert steps == list(range(1, len(steps) + 1))
        assert there < back < len(steps)
        assert [line.split()[3] for line in lines] == uninterrupted(len(lines), 3 << 20)

    run(story, certified=certified)


def test_a_launcher_that_replaces_a_dead_one_finds_the_state_of_its_ranks() -> None:
    async def story(made: Cluster) -> None:
        uid, gang = await trains_on_the_first_of_two(made, 3 << 20)
        (path,) = (made.directory / "r-n1" / "launchers").glob("*.sock")
        with Launcher(str(path)) as launcher:
            os.kill(int(launcher.info()["pid"]), signal.SIGKILL)
        other = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=7, pause=0.01)
        other.claim.device_mask = 0b10
        await made.master.want("n1", other)
        await made.master.until("n1", 7, in_phase(Observed.PHASE_RUNNING))
        await move(made, uid, "n1", "n2", gang, 2, 2)

    run(story)


def test_a_move_given_up_before_its_commit_leaves_the_source_running() -> None:
    async def story(made: Cluster) -> None:
        uid, gang = await trains_on_the_first_of_two(made)
        restore = agent_pb2.Restore(parked=agent_pb2.ParkedState(epoch=1, members=[made.member("n1", [0])]))
        new = made.gang({"n2": [0]}, "n2", uid=uid, epoch=2, pause=0.01, intent=Intents.INTENT_PREPARE, restore=restore)
        await made.master.want("n2", new)
        await made.master.until("n2", 2, in_phase(Observed.PHASE_PREPARED))
        await made.master.want("n1", with_changes(gang, 2, intent=Intents.INTENT_HAND_OVER, stop_sequence=2))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))
        await made.master.want("n2", with_changes(new, 2, intent=Intents.INTENT_STOP))
        await made.master.want("n1", with_changes(gang, 3))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        ended = await made.master.until("n2", 2, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == 5
        assert lines_of(made, "n2", uid, 0, 2) == []

    run(story)


def uninterrupted(steps: int, size: int) -> list[str]:
    """Digests of the state after each step, as a job that was never disturbed would print them."""
    import xxhash

    data = bytearray(-(-size // 64) * 64)
    digests = []
    for step in range(steps):
        at = step % (size - 8)
        data[at] = (data[at] + step) % 256
        digests.append(xxhash.xxh3_64_hexdigest(bytes(data)))
    return digests


def test_a_gang_that_has_news_at_the_instant_its_daemon_stops_is_left_alone_at_once() -> None:
    """In Python 3.11 `asyncio.wait_for` swallows a cancellation that comes with the result, and the daemon hung."""

    async def story(made: Cluster) -> None:
        daemon = await made.daemon("n1")
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4())))
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        (task,) = daemon.gangs._tasks.values()
        daemon.gangs.wake_all()
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()

    run(story)
