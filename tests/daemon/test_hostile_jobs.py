"""Jobs that spoil their directories, page and socket: each can be stopped, leaves nothing, frees its devices, and
disturbs no other job."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from daemon.kit import Cluster, Intents, Observed, in_phase, log_of, run, with_changes
from ganger.agent.v1 import agent_pb2
from ganger.injob.process_identity import start_ticks
from ganger.v1 import job_pb2
from ganger_daemon.gang import gang_context
from ganger_daemon.gang.exit_watcher import exit_of
from ganger_daemon.gang.job_output import JobSocketServer
from ganger_daemon.node.daemon_files import DaemonPaths, make_directory, open_plain, read_json, remove_tree, write_json
from ganger_daemon.node.process_identity import ProcessId
from kit.accounts import as_stranger, needs_a_stranger
from kit.waiting import eventually
from rpc.kit import until

HOSTILE_JOB = Path(__file__).parent / "hostile_job.py"
Outcome = agent_pb2.Outcome


def test_what_a_job_has_put_in_place_of_a_file_is_not_waited_for_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "local.json"
    for put in (
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: (path / "deeper").mkdir(parents=True),
        lambda: path.write_text("[" * 100_000),
    ):
        put()
        assert read_json(path) == {}
        os.mkfifo(path.with_name("local.json.new"))
        write_json(path, {"a": 1})
        assert read_json(path) == {"a": 1}
        path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="no plain file"):
        open_plain(path)


def test_what_a_job_has_put_in_place_of_a_directory_makes_way(tmp_path: Path) -> None:
    for file in (tmp_path / "uid", tmp_path / "uid" / "1"):
        file.write_text("x")
        make_directory(tmp_path / "uid" / "1")
        remove_tree(tmp_path / "uid" / "1")
    deepest = tmp_path
    for _ in range(60):
        deepest /= "deeper"
    deepest.mkdir(parents=True)
    remove_tree(tmp_path / "deeper")
    remove_tree(tmp_path / "uid")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_what_is_removed_goes_and_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[object] = []
    elsewhere, link, scan = tmp_path / "elsewhere", tmp_path / "rendezvous.json", os.scandir
    elsewhere.joinpath(*"123456789").mkdir(parents=True)
    link.symlink_to(elsewhere)
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", lambda path: listed.append(path) or scan(path))
        remove_tree(link)
    assert listed == []
    assert list(tmp_path.iterdir()) == [elsewhere]
    assert elsewhere.joinpath(*"123456789").is_dir()


def test_what_a_gang_leaves_is_out_of_the_way_at_once_and_gone_soon_also_after_a_crash(tmp_path: Path) -> None:
    daemon = DaemonPaths(tmp_path / "state", tmp_path / "run")
    daemon.launchers.mkdir(parents=True)
    paths = daemon.of(str(uuid.uuid4()), 1)
    for directory in (paths.run / "deeper", paths.orders):
        directory.mkdir(parents=True)
    (daemon.jobs / ".gone-before" / "deeper").mkdir(parents=True)
    paths.discard()
    assert daemon.existing() == ()
    assert not paths.job.parent.exists()
    assert not paths.run.parent.exists()
    daemon.sweep()
    eventually(lambda: list(daemon.jobs.iterdir()) == [], what="the rest of it removed")
    eventually(lambda: list(daemon.run.iterdir()) == [daemon.launchers], what="the rest of it removed")


def test_what_is_being_removed_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = DaemonPaths(tmp_path / "state", tmp_path / "run")
    job = daemon.of(str(uuid.uuid4()), 1).job
    job.mkdir(parents=True)
    (daemon.jobs / ".gone-before" / "1").mkdir(parents=True)
    iterdir = Path.iterdir

    def looked_into(path: Path) -> object:
        if path.name == ".gone-before":
            raise FileNotFoundError(path)
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", looked_into)
    assert [gang.job for gang in daemon.existing()] == [job]


@needs_a_stranger
def test_packets_of_another_account_at_the_job_socket_are_ignored() -> None:
    async def story(path: Path) -> list[object]:
        heard: list[object] = []
        server, loop = JobSocketServer(path, heard.append), asyncio.get_running_loop()
        server.start()
        os.chmod(path, 0o666)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger,
        ):
            with as_stranger():
                stranger.connect(str(path))
            stranger.setblocking(False)
            assert await loop.sock_recv(stranger, 100) == b""
            own.connect(str(path))
            own.send(b'{"event": "note"}')
            await until(lambda: bool(heard))
        server.close()
        return heard

    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        assert asyncio.run(story(Path(directory, "job.sock"))) == [{"event": "note"}]


@pytest.mark.parametrize("text", ['{"pid": [1]}', '{"code": "x"}', '{"time": [1], "code": 0}', '{"code": 1e400}'])
def test_nonsense_in_place_of_an_exit_record_is_no_record(tmp_path: Path, text: str) -> None:
    record = tmp_path / "rank-0.exit.json"
    record.write_text(text)
    gone = ProcessId(os.getpid(), 1)
    assert exit_of(record, gone, 3, launcher_lives=True) is None
    ending = exit_of(record, gone, 3, launcher_lives=False)
    assert ending is not None
    assert ending.code == 3


def test_a_rank_that_floods_the_job_socket_is_throttled_and_delays_no_other(tmp_path: Path) -> None:
    async def story() -> tuple[int, int]:
        heard: list[object] = []
        server = JobSocketServer(tmp_path / "job.sock", heard.append)
        server.start()
        reader, sent = asyncio.get_running_loop(), 0

        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as flood:
            flood.connect(str(tmp_path / "job.sock"))
            until = reader.time() + 0.5
            while reader.time() < until:
                try:
                    flood.send(b'{"event": "note"}')
                    sent += 1
                except BlockingIOError:
                    await asyncio.sleep(0)
            first = len(heard)
            async with asyncio.timeout(10):
                while len(heard) == first:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        server.close()
        return first, sent

    first, sent = asyncio.run(story())
    assert first == 200 < sent


def test_a_rank_that_never_reads_the_job_socket_keeps_no_other_from_receiving(tmp_path: Path) -> None:
    async def story() -> bytes:
        server = JobSocketServer(tmp_path / "job.sock", lambda _: None)
        server.start()
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as keen,
        ):
            for one in (deaf, keen):
                one.connect(str(tmp_path / "job.sock"))
            for _ in range(20_000):
                server.nudge()
                await asyncio.sleep(0)
                with contextlib.suppress(BlockingIOError):
                    while keen.recv(100):
                        pass
            server.nudge()
            said = keen.recv(100)
        server.close()
        return said

    assert asyncio.run(story()) == b"{}"


def test_a_job_socket_that_was_closed_is_not_opened_again_by_an_image_that_ends_later(tmp_path: Path) -> None:
    async def story() -> None:
        server = JobSocketServer(tmp_path / "job.sock", lambda _: None)
        server.start()
        server.pause()
        server.close()
        server.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank, pytest.raises(ConnectionRefusedError):
            rank.connect(str(tmp_path / "job.sock"))

    asyncio.run(story())


@pytest.mark.system
def test_hostile_jobs_end_when_told_leave_nothing_and_their_devices_go_to_the_next() -> None:
    deeds = (
        ("puts_pipes_in_place_of_files", "closes_its_files"),
        ("sends_nonsense", "puts_files_in_place_of_directories"),
        ("puts_directories_in_place_of_files",),
        ("asks_for_a_checkpoint_that_cannot_be",),
    )

    async def story(made: Cluster) -> None:
        await made.daemon_process("n1")
        await made.until_session("n1")
        gangs = []
        for epoch, job in enumerate(deeds, 1):
            command = [sys.executable, str(HOSTILE_JOB), *job]
            gang = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=epoch, command=command)
            gang.job, gang.claim.device_mask = f"jobs/{epoch}", 1 << epoch - 1
            gang.claim.millicores[:] = [200, 0]
            gang.grace.FromMilliseconds(500)
            gangs.append(gang)
            await made.master.want("n1", gang)
        wrong = await made.master.until("n1", 4, in_phase(Observed.PHASE_ENDED))
        assert "the orders in control page" in wrong.outcome.message
        for gang in gangs[:3]:
            running = await made.master.until("n1", gang.epoch, lambda seen: bool(seen.ranks))
            made.pids.add(running.ranks[0].pid)
        places = [made.directory / "n1" / "jobs" / gang.job_uid / str(gang.epoch) for gang in gangs]

        def is_done() -> bool:
            files = (places[0] / "orders").is_file() and places[1].is_file()
            return files and (places[2] / "local.json" / "deeper").is_dir()

        await asyncio.to_thread(eventually, is_done, what="their deeds")
        for gang in gangs[:3]:
            pause = {"intent": Intents.INTENT_PARK, "level": job_pb2.SUSPEND_LEVEL_PAUSE, "stop_sequence": 2}
            await made.master.want("n1", with_changes(gang, 2, **pause))
            await made.master.want("n1", with_changes(gang, 3, intent=Intents.INTENT_STOP))
        for gang in gangs[:3]:
            ended = await made.master.until("n1", gang.epoch, in_phase(Observed.PHASE_ENDED))
            assert ended.outcome.kind == Outcome.KIND_STOPPED
            await made.master.forget("n1", gang.epoch)
            await made.master.until_absent("n1", gang.epoch)
            assert not (made.directory / "n1" / "jobs" / gang.job_uid).exists()
            assert not (made.directory / "r-n1" / gang.job_uid).exists()
        following = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()), epoch=9, steps=3)
        following.claim.device_mask = 0b111
        await made.master.want("n1", following)
        done = await made.master.until("n1", 9, in_phase(Observed.PHASE_ENDED))
        assert done.outcome.kind == Outcome.KIND_DONE
        assert "gang loop failed" not in (made.directory / "n1.log").read_text()

    run(story)


@pytest.mark.system
def test_without_groups_processes_that_left_their_rank_end_with_it_before_its_devices_are_free() -> None:
    async def story(made: Cluster) -> None:
        await made.daemon("n1")
        uid = str(uuid.uuid4())
        command = [sys.executable, str(HOSTILE_JOB), "leaves_processes_behind"]
        await made.master.want("n1", made.gang({"n1": [0]}, "n1", uid=uid, command=command))
        ended = await made.master.until("n1", 1, in_phase(Observed.PHASE_ENDED))
        assert ended.outcome.kind == Outcome.KIND_DONE
        left = [int(line.split()[-1]) for line in log_of(made.directory, "n1", uid, 0, 1) if "left behind" in line]
        assert len(left) == 2
        assert [start_ticks(pid) for pid in left] == [None, None]

    run(story)


@pytest.mark.system
def test_an_order_that_cannot_be_written_is_retried_and_no_rank_is_killed_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_details, refused = gang_context.write_details, 0

    def on_a_full_disk(*_: object) -> None:
        nonlocal refused
        refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    async def story(made: Cluster) -> None:
        await made.daemon("n1", order_patience_s=0.05, order_deadline_s=0.1)
        wanted = made.gang({"n1": [0]}, "n1", uid=str(uuid.uuid4()))
        await made.master.want("n1", wanted)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_RUNNING))
        pause = {"intent": Intents.INTENT_PARK, "level": job_pb2.SUSPEND_LEVEL_PAUSE, "stop_sequence": 2}
        monkeypatch.setattr(gang_context, "write_details", on_a_full_disk)
        ordered = time.monotonic()
        await made.master.want("n1", with_changes(wanted, 2, **pause))

        def is_overdue() -> bool:
            return refused > 20 and time.monotonic() > ordered + 0.5

        await asyncio.to_thread(eventually, is_overdue, what="an order long overdue")
        assert [record.message for record in caplog.records].count("order not written") == 1
        monkeypatch.setattr(gang_context, "write_details", write_details)
        await made.master.until("n1", 1, in_phase(Observed.PHASE_PARKED))

    run(story)
